"""The warm start: trained once, kept whole, the same weights whenever it is asked for."""

import dataclasses
from pathlib import Path

import pytest
import torch

from experiments import warm_start as module
from experiments.config import ModelConfig, TrainConfig, WarmStartConfig
from experiments.data import Corpus
from experiments.errors import ExperimentError
from experiments.warm_start import key, train, warm_start

CPU = torch.device("cpu")
TEXT = torch.arange(20000).remainder(97).to(torch.uint8)
CORPUS = Corpus(warm=TEXT, adapt=TEXT, held_out=TEXT)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dim=16, layers=1, heads=2, context=16),
        warm_start=WarmStartConfig(steps=12, batch=4, folder=str(tmp_path / "kept")),
    )


@pytest.mark.usefixtures("single_site")
def test_it_is_trained_once_and_then_read(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = warm_start(config, CORPUS, CPU)
    monkeypatch.delattr(module, "train")
    again = warm_start(config, CORPUS, CPU)
    assert all(torch.equal(first[name], again[name]) for name in first)
    names = [path.name for path in Path(config.warm_start.folder).iterdir()]
    assert names == [f"{key(config, CORPUS)}.pt"]  # and no unfinished file beside it


def test_training_it_is_deterministic_and_ends_on_the_bf16_grid(config: TrainConfig) -> None:
    first, again = train(config, CORPUS, CPU), train(config, CORPUS, CPU)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, weight.to(torch.bfloat16).float())


def test_whatever_decides_the_weights_decides_the_file(config: TrainConfig) -> None:
    other_text = dataclasses.replace(CORPUS, warm=TEXT.flip(0))
    other_recipe = dataclasses.replace(config.warm_start, lr=1e-3)
    other_model = dataclasses.replace(config.model, layers=2)
    elsewhere = dataclasses.replace(config.warm_start, folder="elsewhere")
    keys = {
        key(config, CORPUS),
        key(config, other_text),
        key(dataclasses.replace(config, warm_start=other_recipe), CORPUS),
        key(dataclasses.replace(config, model=other_model), CORPUS),
    }
    assert len(keys) == 4
    assert key(dataclasses.replace(config, warm_start=elsewhere, lr=1.0), CORPUS) in keys


@pytest.mark.usefixtures("single_site")
def test_a_damaged_file_is_named(config: TrainConfig) -> None:
    path = Path(config.warm_start.folder) / f"{key(config, CORPUS)}.pt"
    path.parent.mkdir()
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ExperimentError, match=f"{path.name} is damaged: delete it"):
        warm_start(config, CORPUS, CPU)
