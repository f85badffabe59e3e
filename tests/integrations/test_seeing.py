"""What is seen of rounds: TensorBoard's files have the same tags, of the same meaning, in every framework."""

import os
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from datasets import Dataset
from lightning.fabric import Fabric
from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoard
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.loggers import TensorBoardLogger
from sites import launch_worlds
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_lightning import Module
from test_trainer import BATCH, STEPS, H, arguments
from test_trl import model_of
from test_trl import usual as usual_of_trl
from tiny import dataset, llama, site_tokens, texts, tokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import loco
from loco.integrations import accelerate, lightning
from loco.integrations.transformers import LocoCallback

TAGS = {
    "loco/round",
    "loco/sent_bytes",
    "loco/sent_bytes_total",
    "loco/below_dense",
    "loco/density",
    "loco/round_seconds",
    "loco/waited",
}
Reports = list[loco.SyncReport]
REPORTING: dict[str, Any] = {"report_to": "tensorboard", "save_strategy": "no"}


def noted(handle: loco.Attached) -> Reports:
    reports: Reports = []
    handle.register_report_hook(reports.append)
    return reports


class Noting(LocoCallback):
    """Keeps all reports."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        assert self.handle is not None
        self.reports = noted(self.handle)


def with_trainer(folder: str) -> Reports:
    callback = Noting(sync_every=H)
    rows = dataset(site_tokens(BATCH * STEPS))
    Trainer(llama(), arguments(folder, **REPORTING), train_dataset=rows, callbacks=[callback]).train()
    return callback.reports


def with_sft(folder: str) -> Reports:
    callback = Noting(sync_every=H)
    told: dict[str, Any] = usual_of_trl("") | REPORTING | {"output_dir": folder}
    trainer = SFTTrainer(
        model_of("full"),
        SFTConfig(**told),
        train_dataset=Dataset.from_dict({"input_ids": site_tokens(BATCH * STEPS * 2).tolist()}),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    return callback.reports


def with_grpo(folder: str) -> Reports:
    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [sum(len(word) for word in completion.split()) / 10 for completion in completions]

    callback = Noting(sync_every=H)
    groups = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    told: dict[str, Any] = usual_of_trl("") | REPORTING | groups | {"output_dir": folder}
    trainer = GRPOTrainer(
        model_of("full"),
        reward,
        args=GRPOConfig(**told),
        train_dataset=Dataset.from_dict({"prompt": texts(site_tokens(64)[:, :4])}),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    return callback.reports


def with_accelerate(folder: str) -> Reports:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("rounds")
    loader = DataLoader(TensorDataset(site_tokens(BATCH * STEPS)), batch_size=BATCH)
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3), loader)
    handle = accelerate.attach(accelerator, optimizer, sync_every=H)
    reports = noted(handle)
    for (rows,) in loader:
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()
    handle.sync()
    accelerator.end_training()
    return reports


class NotingLightning(lightning.LocoCallback):
    def on_fit_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        assert self.handle is not None
        self.reports = noted(self.handle)


def with_lightning(folder: str) -> Reports:
    callback = NotingLightning(sync_every=H)
    trainer = LightningTrainer(
        max_steps=STEPS,
        callbacks=[callback],
        logger=TensorBoardLogger(folder),
        enable_checkpointing=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(site_tokens(BATCH * STEPS)), batch_size=BATCH))
    return callback.reports


def with_fabric(folder: str) -> Reports:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=FabricTensorBoard(folder))
    model = llama()
    net, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=1e-3))
    handle = lightning.attach(fabric, optimizer, sync_every=H)
    reports = noted(handle)
    for rows in site_tokens(BATCH * STEPS).split(BATCH):
        fabric.backward(net(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()
    handle.sync()
    fabric.loggers[0].finalize("done")
    return reports


def with_torchtitan(folder: str) -> Reports:
    import titan  # before anything else of torchtitan, which learns its device when it is imported
    from test_torchtitan import _launched

    from loco.integrations.torchtitan import LocoMetricsProcessor, LocoOptimizersContainer

    _launched()
    config = titan.config(folder)
    config.dump_folder = folder
    config.checkpoint.enable = config.validator.enable = False
    config.metrics.enable_tensorboard = True
    config.optimizer = LocoOptimizersContainer.of(config.optimizer, sync_every=H)
    config.metrics = LocoMetricsProcessor.of(config.metrics)
    trainer = config.build()
    reports = noted(trainer.optimizers.handle)
    trainer.train()
    trainer.close()
    return reports


MOST = [with_trainer, with_sft, with_grpo, with_accelerate, with_lightning, with_fabric]


def of_site(group: list[Any], folder: str) -> list[Reports]:
    return [framework(f"{folder}/{os.environ['LOCO_SITE']}/{framework.__name__}") for framework in group]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Value by step, by tag, of all of TensorBoard's files in a folder."""
    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


# torchtitan wants a process of its own.
@pytest.mark.parametrize("group", [MOST, [with_torchtitan]], ids=["most", "torchtitan"])
def test_tensorboard_has_the_same_tags_of_the_same_meaning(group: list[Any], tmp_path: Path) -> None:
    (berlin,), _ = launch_worlds(of_site, group, str(tmp_path))
    for framework, reports in zip(group, berlin, strict=True):
        assert len(reports) == (2 if framework is with_torchtitan else 3)  # which ends between two rounds
        check(scalars(tmp_path / "berlin" / framework.__name__), reports)


def check(found: dict[str, dict[int, float]], reports: Reports) -> None:
    assert {tag for tag in found if "loco/" in tag} == TAGS
    assert list(found["loco/round"].values()) == [report.round for report in reports]
    assert list(found["loco/round"])[:2] == [H, 2 * H]
    sent = [report.site.sent_bytes for report in reports]
    assert list(found["loco/sent_bytes"].values()) == sent
    assert list(found["loco/sent_bytes_total"].values()) == [sum(sent[: k + 1]) for k in range(len(sent))]
    for tag, of in {
        "loco/below_dense": lambda report: report.site.below_dense,
        "loco/density": lambda report: report.site.density,
        "loco/round_seconds": lambda report: sum(report.seconds.values()),
        "loco/waited": lambda report: report.waited,
    }.items():
        assert list(found[tag].values()) == pytest.approx([of(report) for report in reports], rel=1e-6)
