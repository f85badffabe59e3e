"""torchtitan's own trainer, by an optimizers container, a validator and configs only."""

import io
import os
import runpy
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from claims import (
    ended_alike,
    evaluated_theta,
    learned_separately,
    resumed,
    same_training,
    sent_its_rounds_only,
)
from sites import free_port, launch_worlds
from tiny import Told, finish, look, watch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import loco

H = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "with_torchtitan.py"


def titan_site(folder: str) -> Told:
    import titan  # before anything else of torchtitan, which learns its device when it is imported

    from loco.integrations.torchtitan import LocoOptimizersContainer, LocoValidator

    _launched()
    config = titan.config(folder)
    config.optimizer = LocoOptimizersContainer.of(config.optimizer, sync_every=H)
    config.validator = LocoValidator.of(config.validator)
    trainer = config.build()
    titan.let_gloo_reduce(trainer)
    handle = trainer.optimizers.handle
    told = watch(handle)
    (model,) = trainer.model_parts
    model.register_forward_pre_hook(lambda *_: None if model.training else look(told, handle))
    trainer.train()
    if handle.local_step:
        handle.sync()
    finish(told, handle)
    trainer.close()
    return told


def plain_site(folder: str) -> Told:
    """A loop of torch's over the model as torchtitan has built and divided it."""
    import titan

    _launched()
    trainer = titan.config(f"{folder}/plain").build()
    titan.let_gloo_reduce(trainer)
    (model,) = trainer.model_parts
    inner = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    optimizer = loco.PulseLoCo(inner, sync_every=H, topology=loco.Sites())
    schedule = LambdaLR(optimizer, lambda k: (k + 1) / 2 if k < 2 else 1 - max(k - 2, 0) / (titan.STEPS - 2))
    told = watch(optimizer)
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = titan.Batches(titan.Batches.Config(), dp_world_size=size, dp_rank=rank)
    for inputs, labels in loader:
        predicted = model(inputs["input"], positions=inputs["positions"])
        loss = nn.functional.cross_entropy(
            predicted.flatten(0, 1).float(), labels.flatten(), reduction="sum"
        ) / (labels.numel() * size)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    optimizer.sync()
    finish(told, optimizer)
    trainer.close()
    return told


def _launched() -> None:
    """torchtitan wants a launcher also for a site of one rank."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})


def test_two_trainers_do_what_a_plain_loop_does_validate_theta_and_resume(tmp_path: Path) -> None:
    (berlin,), (paris,) = whole = launch_worlds(titan_site, str(tmp_path))
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    for (found,), (expected,) in zip(whole, launch_worlds(plain_site, str(tmp_path)), strict=True):
        evaluated_theta(found)
        same_training(found, expected)
    for name in ("berlin", "paris"):
        assert (tmp_path / name / "checkpoint" / "step-6").is_dir()
        shutil.rmtree(tmp_path / name / "checkpoint" / "step-10")
    for again, expected in zip(launch_worlds(titan_site, str(tmp_path)), whole, strict=True):
        resumed(again[0], expected[0], after=6)
    assert not torch.equal(berlin.outer["residual"], paris.outer["residual"])


def example_site(folder: str) -> str:
    """What the example prints, with a model and data that are there."""
    import titan
    from torchtitan.models.llama3 import config_registry

    _launched()
    config_registry.llama3_debugmodel = lambda: titan.config(folder)
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def test_the_example_runs(tmp_path: Path) -> None:
    for (printed,) in launch_worlds(example_site, str(tmp_path)):
        assert "round 2: sent" in printed
