"""What a user is told of checkpoints that can't be loaded, each tried in one process."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_optimizer import model

import loco
from loco.checkpoints import checkpoints as saving
from loco.checkpoints.rank_manifest import Position
from loco.checkpoints.restore import Load, read_folder
from loco.coordination.rendezvous import NeededError

pytestmark = pytest.mark.usefixtures("single_site")


def saved(folder: Path) -> loco.PulseLoCo:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1), sync_every=2)
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)
    return optimizer


def test_another_sharding_and_other_sites_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reshard needs the same sites: load with reshard, save, and load"):
        loco.Checkpoints(tmp_path).load(saved(tmp_path), reshard=True, lost=[1])


def test_a_checkpoint_that_can_not_be_read_is_named_and_is_no_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = saved(tmp_path)
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.write_text("{")
    with pytest.raises(loco.CheckpointError, match=r"holds checkpoints, but none that is whole on all ranks"):
        loco.Checkpoints(tmp_path).load(optimizer)
    assert f"skipping a checkpoint: {manifest.parent}" in caplog.text


def test_files_that_are_exchanged_are_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"local_step": 1}))
    with pytest.raises(loco.CheckpointError, match=r"is damaged \(ValueError: its data are not of .*step 1"):
        read_folder(manifest.parent)


def test_a_checkpoint_of_another_version_or_in_anothers_place_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = saved(tmp_path)
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": "later"}))
    said = r"is damaged \(ValueError: its format is 'later', which this version of loco does not read"
    with pytest.raises(loco.CheckpointError, match=said):
        read_folder(manifest.parent)
    (tmp_path / "round-00000000").rename(tmp_path / "round-00000005")
    with pytest.raises(loco.CheckpointError, match="none that is whole on all ranks"):
        loco.Checkpoints(tmp_path).load(optimizer)
    assert "rank-00000 holds round 0 of rank 0" in caplog.text


def test_a_first_checkpoint_that_no_rank_completed_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    save: Any = SimpleNamespace(position=Position(1, 0))
    load: Any = SimpleNamespace()
    Load._require_fresh_start(load, [save], False)
    assert "the first checkpoint, of round 1, was never completed: starting from scratch" in caplog.text


def test_ranks_that_are_needed_elsewhere_say_so_before_they_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = saved(tmp_path / "other")
    together, needed = saving.together, [NeededError("saving: others wait for it elsewhere", lasting=True)]

    def once(*arguments: Any) -> Any:
        if needed:
            raise needed.pop()
        return together(*arguments)

    monkeypatch.setattr(saving, "together", once)
    with caplog.at_level(logging.WARNING), loco.Checkpoints(tmp_path / "one") as checkpoints:
        checkpoints.save(optimizer, blocking=True)
    assert caplog.messages == ["saving: others wait for it elsewhere. Ranks reconnect before they save"]
