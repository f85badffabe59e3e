"""What LocoCallback takes from the Trainer, and does beside the rounds."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from claims import same_bits
from pages import code, page
from sites import launch_worlds
from test_trainer import BATCH, STEPS, H, arguments
from tiny import dataset, llama, site_tokens
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from loco.integrations.transformers import LocoCallback
from loco.presets import economies
from loco.sync import Subscriber


def trained(folder: str, callbacks: list[TrainerCallback], resume: bool = False, **options: Any) -> nn.Module:
    rows = dataset(site_tokens(BATCH * STEPS))
    model = llama()
    trainer = Trainer(model, arguments(folder, **options), train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return model


def name() -> str:
    return os.environ["LOCO_SITE"]


def publishing_site(folder: str) -> tuple[dict[str, Any], list[str], dict[str, Tensor]]:
    callback = LocoCallback(saving=0.25, publish=f"{folder}/weights")
    model = trained(f"{folder}/{name()}", [callback])
    assert callback.handle is not None
    settings = vars(callback.handle.settings)
    return settings, callback.handle.outer_state.parameters.names, dict(model.state_dict())


def test_three_lines_hold_back_publish_and_name_parameters(tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(publishing_site, str(tmp_path))
    settings, names, weights = berlin
    expected = economies(0.25) | {"finds_outer_lr": True, "outer_momentum": 0.0}
    assert {key: settings[key] for key in expected} == expected
    assert "model.layers.1.mlp.up_proj.weight" in names
    assert same_bits(list(weights.values()), list(paris[2].values()))
    engine = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in weights.items()}
    subscriber = Subscriber(engine, tmp_path / "weights")
    assert subscriber.update().version == 2  # of 10 steps, 8 and the rest
    assert same_bits(list(engine.values()), [value.bfloat16() for value in weights.values()])


def as_the_readme_has_it(folder: str) -> dict[str, Tensor]:
    (block,) = (block for _, block in code(page("README.md"), "py") if "LocoCallback(" in block)
    os.chdir(folder)
    known: dict[str, Any] = {"Trainer": Trainer, "model": llama(), "arguments": arguments(name())}
    exec(block, known | {"data": dataset(site_tokens(BATCH * STEPS))})
    return dict(known["model"].state_dict())


def test_the_readmes_trainer_runs_and_publishes(tmp_path: Path) -> None:
    (weights,), (others,) = launch_worlds(as_the_readme_has_it, str(tmp_path))
    assert same_bits(list(weights.values()), list(others.values()))
    engine = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in weights.items()}
    assert Subscriber(engine, tmp_path / "weights").update().version == 2
    assert same_bits(list(engine.values()), [value.bfloat16() for value in weights.values()])


def stopped_and_resumed(folder: str) -> tuple[int, dict[str, Tensor]]:
    at = f"{folder}/{name()}"
    trained(at, [LocoCallback(sync_every=H)], max_steps=8, save_strategy="steps", save_steps=2)
    if name() == "paris":
        shutil.rmtree(f"{at}/checkpoint-8")
        (Path(at) / "checkpoint-6" / "loco_rank0.pt").unlink()  # it was killed before this was written
    seen: list[int] = []

    class Sees(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)

    model = trained(at, [LocoCallback(sync_every=H), Sees()], resume=True, max_steps=8)
    return seen[0], dict(model.state_dict())


def test_sites_resume_from_the_newest_checkpoint_that_all_have(tmp_path: Path) -> None:
    (berlin,), (paris,) = launch_worlds(stopped_and_resumed, str(tmp_path))
    assert berlin[0] == paris[0] == 4
    assert same_bits(list(berlin[1].values()), list(paris[1].values()))


def without_a_common_one(folder: str) -> str:
    at = f"{folder}/{name()}"
    trained(at, [LocoCallback(sync_every=H)], max_steps=4, save_strategy="steps", save_steps=2)
    shutil.rmtree(f"{at}/checkpoint-{2 if name() == 'paris' else 4}")
    try:
        trained(at, [LocoCallback(sync_every=H)], resume=True, max_steps=4)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_sites_without_a_common_checkpoint_are_told_what_each_has(tmp_path: Path) -> None:
    for (said,) in launch_worlds(without_a_common_one, str(tmp_path)):
        assert said == (
            "there is no checkpoint that all have, from which all could resume: "
            "site berlin has those of step 2; site paris has those of step 4"
        )


@pytest.fixture
def no_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCO_SITES", "LOCO_SITE", "LOCO_AT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("no_sites")
def test_without_variables_it_is_a_run_of_one_site_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiny.site_seed", lambda: 0)
    callback = LocoCallback(sync_every=H)
    with caplog.at_level(logging.INFO, "loco"):
        trained(str(tmp_path), [callback])
    assert "are not set: this is a run of one site, for a try" in caplog.text
    assert callback.handle is not None
    assert callback.handle.round == 3
    assert "site alone: round 3: sent" in caplog.text
