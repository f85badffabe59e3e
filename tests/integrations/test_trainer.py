"""transformers' Trainer: each site runs its own, unmodified, with one callback."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from claims import ended_alike, learned_separately, resumed, same_bits, same_training, sent_its_rounds_only
from safetensors.torch import load_file
from sites import launch_worlds
from tiny import Told, as_one_rank, dataset, finish, llama, look, reduce_gradients, site_tokens, tokens, watch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_linear_schedule_with_warmup

import loco
from loco.integrations.transformers import LocoCallback

STEPS, BATCH, RATE, H = 10, 4, 1e-3, 4
CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05},
    "bf16": {"bf16": True},
    "bf16-weights": {"dtype": torch.bfloat16},
}


class Watch(TrainerCallback):
    """After the callback that it watches."""

    def __init__(self, callback: LocoCallback) -> None:
        self.callback = callback
        self.told = Told()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self.callback.handle is not None
        self.told = watch(self.callback.handle)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        assert self.callback.handle is not None
        look(self.told, self.callback.handle)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        assert self.callback.handle is not None
        finish(self.told, self.callback.handle)


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**usual | options)


def trainer_site(folder: str, options: dict[str, Any], resume: str = "") -> Told:
    options = dict(options)
    callback = LocoCallback(sync_every=H, overlap=options.pop("overlap", False))
    watching = Watch(callback)
    model = llama(options.pop("dtype", torch.float32))
    model.train()
    trainer = Trainer(
        model,
        arguments(f"{folder}/{_name()}", **options),
        train_dataset=dataset(site_tokens(BATCH * STEPS * 4)),
        eval_dataset=dataset(tokens(7, 8)),
        callbacks=[callback, watching],
    )
    trainer.train(resume_from_checkpoint=f"{folder}/{_name()}/{resume}" if resume else None)
    watching.told.more = {
        "log": trainer.state.log_history,
        "model": {name: p.detach().clone() for name, p in model.named_parameters()},
    }
    return watching.told


def plain_site(options: dict[str, Any], shards: bool = False) -> Told:
    return plain_loop(llama(options.get("dtype", torch.float32)), options, shards=shards)


def plain_loop(
    model: nn.Module,
    options: dict[str, Any],
    loss_of: Callable[..., Tensor] | None = None,
    *,
    shards: bool = False,
) -> Told:
    """The same training as a loop of torch's.

    Args:
        loss_of: outputs, labels and their number; by default the model has its own.
        shards: of FSDP2, in a site of several ranks.
    """
    model.train()
    topology = loco.Sites()
    net, rank, size = as_one_rank(model, shards=shards)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    inner = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8, fused=True)
    overlap = options.get("overlap", False)
    optimizer = loco.PulseLoCo(inner, sync_every=H, topology=topology, overlap=overlap)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    told = watch(optimizer)
    told.more["losses"] = []
    pieces = options.get("gradient_accumulation_steps", 1)
    batches = iter(site_tokens(BATCH * STEPS * 4).split(BATCH)[rank::size])
    for _ in range(STEPS):
        rows = [next(batches) for _ in range(pieces)]
        count = torch.tensor(sum(x[:, 1:].numel() for x in rows) * size) / 1
        for k, x in enumerate(rows):
            reduce_gradients(net, k == pieces - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.get("bf16", False)):
                if loss_of is None:
                    loss = net(input_ids=x, labels=x, num_items_in_batch=count).loss
                else:
                    loss = loss_of(net(input_ids=x), x, count)
            (loss * size).backward()
        nn.utils.clip_grad_norm_(params, options.get("max_grad_norm", 1.0))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        told.more["losses"].append(evaluated(optimizer))
    optimizer.sync()
    return finish(told, optimizer)


@torch.no_grad()
def evaluated(optimizer: loco.PulseLoCo) -> float:
    """The loss of θ on the data that all sites evaluate on."""
    model = llama()
    params = [p for p in model.parameters() if p.ndim > 1] + [p for p in model.parameters() if p.ndim == 1]
    anchor = optimizer.outer_state.anchor
    if anchor.numel() != sum(p.numel() for p in params):
        return 0.0  # of an adapter
    for p, values in zip(params, anchor.split([p.numel() for p in params]), strict=True):
        p.copy_(values.view_as(p))
    rows = tokens(7, 8)
    return model.eval()(input_ids=rows, labels=rows).loss.item()


def _name() -> str:
    return os.environ["LOCO_SITE"]


@pytest.mark.parametrize("case", CASES)
def test_two_trainers_are_two_sites_and_do_what_a_plain_loop_does(case: str, tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(trainer_site, str(tmp_path), CASES[case])
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    assert same_bits(list(berlin.more["model"].values()), list(paris.more["model"].values()))
    sent_its_rounds_only(berlin, paris, rounds=3)  # after 4, 8, and at the end
    for found, expected in zip((berlin, paris), launch_worlds(plain_site, CASES[case]), strict=True):
        same_training(found, expected[0])


def test_it_resumes_bit_for_bit_from_between_two_rounds(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    (berlin,), (paris,) = launch_worlds(trainer_site, str(tmp_path), saving)
    again = launch_worlds(trainer_site, str(tmp_path), saving, "checkpoint-6")
    for found, whole in zip(again, (berlin, paris), strict=True):
        resumed(found[0], whole, after=6)
    assert not same_bits([berlin.outer["residual"]], [paris.outer["residual"]])


def test_rounds_may_overlap_the_steps_and_it_resumes_with_one_in_flight(tmp_path: Path) -> None:
    options = {"overlap": True, "save_strategy": "steps", "save_steps": 3}
    (berlin,), (paris,) = launch_worlds(trainer_site, str(tmp_path), options)
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    for found, expected in zip((berlin, paris), launch_worlds(plain_site, {"overlap": True}), strict=True):
        same_training(found, expected[0])
        assert found.reports[-1].round == 3
    for found, whole in zip(
        launch_worlds(trainer_site, str(tmp_path), options, "checkpoint-6"), (berlin, paris), strict=True
    ):
        resumed(found[0], whole, after=6)


def test_the_rounds_state_is_saved_once(tmp_path: Path) -> None:
    """Beside the checkpoint, by each rank, and not also in what one rank saves of the optimizer."""
    launch_worlds(trainer_site, str(tmp_path), {"save_strategy": "steps", "save_steps": 5})
    for name in ("berlin", "paris"):
        folder = tmp_path / name / "checkpoint-5"
        assert set(torch.load(folder / "optimizer.pt")) == {"state", "param_groups"}
        state = torch.load(folder / "loco_rank0.pt")["loco"]
        assert (state["round"], state["local_step"]) == (1, 1)


def test_it_evaluates_and_saves_theta_between_two_rounds(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    (berlin,), (paris,) = launch_worlds(trainer_site, str(tmp_path), options)
    expected = [plain[0] for plain in launch_worlds(plain_site, {})]
    for found, plain in zip((berlin, paris), expected, strict=True):
        losses = {entry["step"]: entry["eval_loss"] for entry in found.more["log"] if "eval_loss" in entry}
        assert list(losses) == [3, 6, 9, 10]
        assert [losses[step] for step in (3, 6, 9)] == [plain.more["losses"][step - 1] for step in (3, 6, 9)]
        same_training(found, plain)  # so evaluating and saving have changed nothing
    for step in (3, 6, 9, 10):
        one, other = (
            load_file(tmp_path / name / f"checkpoint-{step}" / "model.safetensors")
            for name in ("berlin", "paris")
        )
        assert one.keys() == other.keys()
        assert same_bits(list(one.values()), list(other.values()))


def test_the_best_model_is_the_same_on_all_sites(tmp_path: Path) -> None:
    """With a learning rate that ruins the model, the best one is an early one."""
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    options |= {"load_best_model_at_end": True, "learning_rate": 0.3}
    (berlin,), (paris,) = launch_worlds(trainer_site, str(tmp_path), options)
    losses = {entry["step"]: entry["eval_loss"] for entry in berlin.more["log"] if "eval_loss" in entry}
    best = min(losses, key=lambda step: losses[step])
    assert best != 10
    model = berlin.more["model"]
    saved = load_file(tmp_path / "paris" / f"checkpoint-{best}" / "model.safetensors")
    assert same_bits(list(model.values()), [saved[name] for name in model])
    assert same_bits(list(model.values()), list(paris.more["model"].values()))


def test_reports_are_in_the_logs(tmp_path: Path) -> None:
    (berlin,), _ = launch_worlds(trainer_site, str(tmp_path), {})
    logged = {e["step"]: e for e in berlin.more["log"] if "loco/round" in e}
    assert [(step, entry["loco/round"]) for step, entry in logged.items()] == [(4, 1), (8, 2), (10, 3)]
    first, second, third = (report.site for report in berlin.reports)
    assert logged[10]["loco/sent_bytes_total"] == first.sent_bytes + second.sent_bytes + third.sent_bytes
    assert logged[8]["loco/sent_bytes"] == second.sent_bytes
    assert logged[4]["loco/density"] == first.density


def refused(folder: str, options: dict[str, Any]) -> str:
    """What the Trainer says when it shall resume, at one site alone."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3, **options}
    callback = LocoCallback(sync_every=2)
    trainer = Trainer(
        llama(), arguments(folder, **options), train_dataset=dataset(site_tokens(64)), callbacks=[callback]
    )
    trainer.train()
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_a_checkpoint_without_the_rounds_is_refused(tmp_path: Path) -> None:
    ((said,),) = launch_worlds(refused, str(tmp_path), {"save_only_model": True}, names=["berlin"])
    assert said.startswith(f"{tmp_path}/checkpoint-3 has no loco_rank0.pt, this rank's state of the rounds")


def ends_early(folder: str, steps: dict[str, int]) -> str:
    try:
        trainer_site(folder, {"max_steps": steps[_name()], "save_strategy": "steps", "save_steps": 5})
    except loco.TransportError as error:
        return str(error)
    return ""


def test_a_site_that_ends_early_is_named_by_the_others(tmp_path: Path) -> None:
    """Its last round, at its end, is the second one of both; the third is the other site's alone."""
    (berlin,), (paris,) = launch_worlds(ends_early, str(tmp_path), {"berlin": STEPS, "paris": 6})
    assert paris == ""
    assert "site paris has left: its program has ended" in berlin
    assert "If its training was over, give all sites the same max_steps" in berlin
    # What berlin has saved can be resumed: without the third round, which would have ended after step 10.
    state = torch.load(tmp_path / "berlin" / "checkpoint-5" / "loco_rank0.pt")["loco"]
    assert (state["round"], state["local_step"]) == (1, 1)


class RunsOutOfMemory(TrainerCallback):
    """Once, at one site, in the middle of its second round."""

    def __init__(self) -> None:
        self.runs_out = _name() == "berlin"

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.runs_out and state.global_step == H + 1:
            self.runs_out = False
            raise RuntimeError("CUDA out of memory.")


def trains_again(folder: str) -> tuple[str, Told]:
    callback = LocoCallback(sync_every=H)
    watching = Watch(callback)
    trainer = Trainer(
        llama(),
        arguments(f"{folder}/{_name()}", auto_find_batch_size=True),
        train_dataset=dataset(site_tokens(BATCH * STEPS * 4)),
        callbacks=[callback, watching, RunsOutOfMemory()],
    )
    try:
        trainer.train()
    except loco.TransportError as error:
        trainer.train()  # while the error holds what was before
        return str(error), watching.told
    return "", watching.told


def test_both_sites_train_again_when_one_looks_for_a_batch_that_fits(tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(trains_again, str(tmp_path))
    assert berlin[0] == ""
    assert "site berlin has left" in paris[0]
    assert len(berlin[1].steps) == len(paris[1].steps) == STEPS
    learned_separately(berlin[1], paris[1])
    ended_alike(berlin[1], paris[1])


def world_of_sites() -> str:
    """Several sites in one world of torch's, as plain `torchrun` gives."""
    torch.distributed.init_process_group("gloo")
    callback = LocoCallback(sync_every=2, topology=loco.Topology())
    trainer = Trainer(
        llama(), arguments("unused"), train_dataset=dataset(site_tokens(64)), callbacks=[callback]
    )
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_sites_in_one_world_are_refused() -> None:
    for said in launch_worlds(world_of_sites, names=["berlin"], ranks=2)[0]:
        assert said.startswith("torch's world has 2 ranks, a site of this topology has 1")
        assert "loco.Sites" in said
