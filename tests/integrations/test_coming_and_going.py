"""Sites that come and go, each with a framework's trainer: a killed one comes back to the others' step."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from claims import same_bits
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from sites import launch_worlds
from test_lightning import Module
from test_trainer import arguments
from tiny import dataset, llama, site_tokens
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback

from loco.integrations import lightning
from loco.integrations.transformers import LocoCallback

STEPS, BATCH, H = 24, 4, 2
DIES, WAITS = 5, 12  # steps
LATEST = 90.0  # seconds for a site to come back
Ends = tuple[int, int, list[float], list[Tensor]]  # steps taken, rounds, rates, weights


def after_step(step: int, folder: Path, dies: bool) -> None:
    """One site is killed; the other waits at some later step until it is back."""
    if dies and step == DIES:
        os._exit(9)
    if os.environ["LOCO_SITE"] == "berlin" and step == WAITS:
        deadline = time.monotonic() + LATEST
        while not (folder / "back").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


class Trips(TrainerCallback):
    def __init__(self, folder: Path, dies: bool) -> None:
        self.folder, self.dies = folder, dies
        self.steps = 0
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])
        after_step(state.global_step, self.folder, self.dies)


def with_trainer(folder: Path, dies: bool) -> Ends:
    callback, trips = LocoCallback(sync_every=H), Trips(folder, dies)
    model = llama()
    told = arguments(folder / os.environ["LOCO_SITE"], max_steps=STEPS)
    rows = dataset(site_tokens(BATCH * STEPS))
    trainer = Trainer(model, told, train_dataset=rows, callbacks=[callback, trips])
    trainer.train()
    assert callback.handle is not None
    assert trainer.state.global_step == STEPS
    return trips.steps, callback.handle.round, trips.rates, [p.detach() for p in model.parameters()]


class Decaying(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (STEPS + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LightningTrips(Callback):
    def __init__(self, folder: Path, dies: bool) -> None:
        self.folder, self.dies = folder, dies
        self.steps = 0
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: LightningTrainer, *_: Any, **__: Any) -> None:
        self.steps += 1
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        after_step(trainer.global_step, self.folder, self.dies)


def with_lightning(folder: Path, dies: bool) -> Ends:
    callback, trips = lightning.LocoCallback(sync_every=H), LightningTrips(folder, dies)
    module = Decaying()
    trainer = LightningTrainer(
        max_steps=STEPS,
        callbacks=[callback, trips],
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(site_tokens(BATCH * STEPS)), batch_size=BATCH))
    assert callback.handle is not None
    return trips.steps, callback.handle.round, trips.rates, [p.detach() for p in module.parameters()]


def coming_and_going(framework: Callable[[Path, bool], Ends], folder: str) -> Ends:
    os.environ["LOCO_AT_LEAST"] = "1"
    if os.environ["LOCO_SITE"] == "berlin":  # which hosts the store
        return framework(Path(folder), False)
    host, _, port = os.environ["LOCO_AT"].rpartition(":")
    deadline = time.monotonic() + LATEST
    while time.monotonic() < deadline:
        with socket.socket() as trial:
            if trial.connect_ex((host, int(port))) == 0:
                break
        time.sleep(0.05)
    first = os.fork()  # a rank of a test is a daemon, which may start no other processes
    if first == 0:
        framework(Path(folder), True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 9
    (Path(folder) / "back").touch()
    return framework(Path(folder), False)


@pytest.mark.parametrize("framework", [with_trainer, with_lightning])
def test_a_site_that_was_killed_comes_back_to_the_step_of_the_others(framework: Any, tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(coming_and_going, framework, str(tmp_path))
    steps, rounds, rates, weights = berlin
    assert (steps, rounds) == (STEPS, STEPS // H)
    assert paris[1] == rounds
    assert paris[0] < STEPS  # what was left when it came
    assert same_bits(weights, paris[3])
    # Its learning rate is the others', and not that of a start.
    assert paris[2] == pytest.approx(rates[-paris[0] :])
