"""The warm start: trained once, kept whole, the same weights whenever it is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.errors import ExperimentError
from experiments.models import warm_start as module
from experiments.models.warm_start import train, warm_start
from experiments.settings.config import TrainConfig, TransformerConfig, WarmStartConfig
from experiments.settings.tasks import ArithmeticConfig, TextConfig
from experiments.tasks.registry import task_of
from experiments.tasks.task import Seat

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        transformer=TransformerConfig(dim=16, layers=1, heads=2, context=16),
        arithmetic=ArithmeticConfig(largest=20, held_out=64),
        warm_start=WarmStartConfig(steps=12, batch=4, folder=str(tmp_path / "kept")),
    )


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More cost a model this small more than they save."""
    monkeypatch.setattr(module, "_cores", lambda: 1)


def started(config: TrainConfig) -> dict[str, torch.Tensor]:
    return warm_start(config, task_of(config, Seat(0, 1, CPU)), CPU)


def key(config: TrainConfig) -> str:
    return module.key(config, task_of(config, Seat(0, 1, CPU)))


@pytest.mark.usefixtures("single_site")
def test_it_is_trained_once_and_then_read(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = started(config)
    monkeypatch.delattr(module, "train")
    again = started(config)
    assert all(torch.equal(first[name], again[name]) for name in first)
    names = [path.name for path in Path(config.warm_start.folder).iterdir()]
    assert names == [f"{key(config)}.pt"]  # and no unfinished file beside it


@pytest.mark.parametrize("task", ["arithmetic", "text"])
def test_training_it_is_deterministic_and_ends_on_the_bf16_grid(config: TrainConfig, task: str) -> None:
    config = replace(config, task=task)
    first, again = (train(config, task_of(config, Seat(0, 1, CPU)), CPU) for _ in range(2))
    untrained = task_of(config, Seat(0, 1, CPU)).model().state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert weight.dtype == torch.bfloat16
    assert not torch.equal(first["embedding"], untrained["embedding"].bfloat16())


def test_decay_lowers_the_rate_along_half_a_cosine() -> None:
    rates = [module._schedule(step, 1000, True) for step in range(50, 1000)]
    assert rates == sorted(rates, reverse=True)
    assert module._schedule(500, 1000, True) == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-5
    assert [module._schedule(step, 1000, False) for step in (0, 24, 49, 500, 999)] == [0.02, 0.5, 1, 1, 1]


def test_whatever_decides_the_weights_decides_the_file(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("another library")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "json.py").write_text("0123456789")
    arithmetic, recipe = config.arithmetic, config.warm_start
    different = [
        config,
        replace(config, transformer=replace(config.transformer, layers=2)),
        replace(config, warm_start=replace(recipe, lr=1e-3)),
        replace(config, warm_start=replace(recipe, decay=False)),
        replace(config, arithmetic=replace(arithmetic, slips=0.1)),
        replace(config, arithmetic=replace(arithmetic, largest=21)),
        replace(config, arithmetic=replace(arithmetic, held_out=65)),
        replace(config, task="text", text=TextConfig(adapt_on=("json",))),
        replace(config, task="text", text=TextConfig(adapt_on=("json",), stdlib=str(tmp_path))),
    ]
    keys = {key(one) for one in different}
    assert len(keys) == len(different)
    for alike in (
        replace(config, warm_start=replace(recipe, folder="elsewhere")),
        replace(config, lr=1.0, seed=5, method="ddp"),
        replace(config, arithmetic=replace(arithmetic, prompts=2, group=3)),
    ):
        assert key(alike) == key(config)


@pytest.mark.usefixtures("single_site")
def test_a_damaged_file_is_named(config: TrainConfig) -> None:
    path = Path(config.warm_start.folder) / f"{key(config)}.pt"
    path.parent.mkdir()
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ExperimentError, match=f"{path.name} is damaged: delete it"):
        started(config)
