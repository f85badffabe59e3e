"""Lightning's Trainer, and a loop of Fabric's."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from claims import (
    ended_alike,
    evaluated_theta,
    learned_separately,
    resumed,
    same_bits,
    same_training,
    sent_its_rounds_only,
)
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sites import launch_worlds
from tiny import Told, as_one_rank, finish, llama, look, reduce_gradients, site_tokens, tokens, watch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import loco
from loco.integrations.lightning import LocoCallback, SiteState, attach

STEPS, BATCH, H = 10, 4, 4
CASES = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.05},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.losses.append(self.model(input_ids=batch[0], labels=batch[0]).loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """After the callback that it watches."""

    def __init__(self, callback: LocoCallback) -> None:
        self.callback = callback
        self.told = Told()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.callback.handle is not None
        self.told = watch(self.callback.handle)

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        assert self.callback.handle is not None
        look(self.told, self.callback.handle)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.callback.handle is not None
        finish(self.told, self.callback.handle)


def lightning_site(folder: str, options: dict[str, Any], resume: bool = False) -> Told:
    callback = LocoCallback(sync_every=H)
    watching = Watch(callback)
    pieces = options.get("accumulate_grad_batches", 1)
    at = f"{folder}/{os.environ['LOCO_SITE']}"
    saving = ModelCheckpoint(at, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    module = Module()
    trainer = Trainer(
        max_steps=STEPS,
        callbacks=[callback, watching, saving],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=3 * pieces,
        **options,
    )
    rows = TensorDataset(site_tokens(BATCH * STEPS * pieces * trainer.world_size))
    held_out = DataLoader(TensorDataset(tokens(7, 8)), batch_size=8)
    loader = StatefulDataLoader(rows, batch_size=BATCH)  # Lightning starts a plain one anew
    trainer.fit(module, loader, held_out, ckpt_path=f"{at}/step=6.ckpt" if resume else None)
    watching.told.more["losses"] = module.losses
    return watching.told


def plain_site(options: dict[str, Any], by_row: bool = True) -> Told:
    model = llama()
    topology = loco.Sites()
    net, rank, size = as_one_rank(model)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = loco.PulseLoCo(inner, sync_every=H, topology=topology)
    told = watch(optimizer)
    losses = []
    pieces = options.get("accumulate_grad_batches", 1)
    is_bf16 = "precision" in options
    rows = site_tokens(BATCH * STEPS * pieces * size)
    if by_row and size > 1:  # as Lightning deals out a StatefulDataLoader's, of whose order it knows nothing
        dealt = rows[list(DistributedSampler(TensorDataset(rows), size, rank))].split(BATCH)
    else:
        dealt = rows.split(BATCH)[rank::size]
    batches = iter(dealt)
    for step in range(STEPS):
        for k in range(pieces):
            rows = next(batches)
            reduce_gradients(net, k == pieces - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16, cache_enabled=False):
                loss = net(input_ids=rows, labels=rows).loss
            (loss / pieces).backward()
        if "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 3 == 0 and size == 1:  # a rank of several has a part of θ
            losses.append(loss_of_anchor(optimizer, is_bf16=is_bf16))
    optimizer.sync()
    told.more["losses"] = losses
    return finish(told, optimizer)


@torch.no_grad()
def loss_of_anchor(rounds: Any, *, is_bf16: bool = False) -> float:
    model = llama()
    nn.utils.vector_to_parameters(rounds.outer_state.anchor, model.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16, cache_enabled=False):
        return model(input_ids=tokens(7, 8), labels=tokens(7, 8)).loss.item()


@pytest.mark.parametrize("case", CASES)
def test_two_trainers_do_what_a_plain_loop_does_and_evaluate_theta(case: str, tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(lightning_site, str(tmp_path), CASES[case])
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    assert len(berlin.more["losses"]) == 3
    for told in (berlin, paris):
        evaluated_theta(told)
    for found, expected in zip((berlin, paris), launch_worlds(plain_site, CASES[case]), strict=True):
        same_training(found, expected[0])
        assert found.more == expected[0].more


def test_it_saves_theta_and_resumes_bit_for_bit_from_between_two_rounds(tmp_path: Path) -> None:
    whole = launch_worlds(lightning_site, str(tmp_path), {})
    saved = [torch.load(tmp_path / name / "step=6.ckpt", weights_only=False) for name in ("berlin", "paris")]
    assert [checkpoint["loco"]["ranks"][0]["local_step"] for checkpoint in saved] == [2, 2]
    one, other = (list(checkpoint["state_dict"].values()) for checkpoint in saved)
    assert same_bits(one, other)
    for again, expected in zip(launch_worlds(lightning_site, str(tmp_path), {}, True), whole, strict=True):
        resumed(again[0], expected[0], after=6)


class Fails(Callback):
    """Once, at one site, in the middle of its second round."""

    def __init__(self) -> None:
        self.fails = os.environ["LOCO_SITE"] == "berlin"

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if self.fails and trainer.global_step == H + 1:
            self.fails = False
            raise RuntimeError("the data loader failed")


def fits_again() -> tuple[str, Told]:
    callback = LocoCallback(sync_every=H)
    watching, failing, raised = Watch(callback), Fails(), None
    while True:
        trainer = Trainer(
            max_steps=STEPS,
            callbacks=[callback, watching, failing],
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(Module(), DataLoader(TensorDataset(site_tokens(BATCH * STEPS)), batch_size=BATCH))
            return str(raised), watching.told
        except RuntimeError as error:
            raised = error  # which holds what was before


def test_both_sites_fit_again_after_one_failed() -> None:
    (berlin,), (paris,) = launch_worlds(fits_again)
    assert berlin[0] == "the data loader failed"
    assert "site berlin has left" in paris[0]
    assert len(berlin[1].steps) == len(paris[1].steps) == STEPS
    learned_separately(berlin[1], paris[1])
    ended_alike(berlin[1], paris[1])


def fabric_site(folder: str, precision: Any, resume: bool = False) -> Told:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", precision=precision
    )
    fabric.launch()
    model = llama()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    handle = attach(fabric, optimizer, sync_every=H)
    state = {"model": model, "optimizer": optimizer, "rounds": SiteState(handle)}
    path = f"{folder}/{os.environ['LOCO_SITE']}.ckpt"
    begin = 0
    if resume:
        fabric.load(path, state)
        begin = 6
    told = watch(handle)
    told.more["losses"] = []
    batches = site_tokens(BATCH * STEPS * size).split(BATCH)[fabric.global_rank :: size]
    for step, rows in enumerate(batches):
        if step < begin:
            continue
        optimizer.zero_grad()
        fabric.backward(model(input_ids=rows, labels=rows).loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        if not resume and step == 5:
            fabric.save(path, state)
        if (step + 1) % 3 == 0:
            handle.eval()
            with torch.no_grad():
                told.more["losses"].append(model(input_ids=tokens(7, 8), labels=tokens(7, 8)).loss.item())
            look(told, handle)
            handle.train()
    handle.sync()
    return finish(told, handle)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_does_what_a_plain_loop_does_and_resumes(precision: str, tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(fabric_site, str(tmp_path), precision)
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    for told in (berlin, paris):
        evaluated_theta(told)
    options = {"gradient_clip_val": 0.5} | ({"precision": precision} if precision != "32-true" else {})
    for found, expected in zip((berlin, paris), launch_worlds(plain_site, options, False), strict=True):
        same_training(found, expected[0])
        assert found.more == expected[0].more
    again = launch_worlds(fabric_site, str(tmp_path), precision, True)
    for found, whole in zip(again, (berlin, paris), strict=True):
        resumed(found[0], whole, after=6)
