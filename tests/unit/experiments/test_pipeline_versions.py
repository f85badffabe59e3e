"""Versions of the weights, from the site that publishes to the worker that samples."""

import threading
import time
from pathlib import Path

import pytest
import torch
from pipeline_parts import NobodysController, config_of
from torch import Tensor

import loco
from experiments.pipeline.diary import Diary
from experiments.pipeline.learning.publishing import Publishing
from experiments.pipeline.sampling.engine import TorchEngine, whole


class Model(torch.nn.Module):
    """What an engine samples from: all that counts here is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4096))

    @property
    def checkpoint(self) -> torch.nn.Module:
        return self


@pytest.mark.parametrize("patches", [True, False])
def test_an_engine_has_the_weights_of_the_newest_version(
    patches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.pipeline.sampling.engine.language_model", lambda config: Model())
    url, source, newest = str(tmp_path / "weights"), Model(), 0
    diary = Diary("worker", NobodysController())
    engine = TorchEngine(config_of(f"patches={str(patches).lower()}"), url, diary, lambda version: newest)
    publisher = loco.sync.Publisher(source, url)
    read = []
    for version in (1, 2, 3):
        with torch.no_grad():
            source.weight[version] += 1
        if not patches:
            publisher = loco.sync.Publisher(source, whole(url, version))
        publisher.publish(version)
        newest = version
        engine.wait_for(version)
        assert torch.equal(engine.model.checkpoint.state_dict()["weight"], source.weight.bfloat16().float())
        read.append(diary.notes.counts["patch bytes"])
    engine.close()
    last = read[2] - read[1]
    assert last < read[0] / 10 if patches else last == pytest.approx(read[0], rel=0.1)


def test_an_engine_says_once_that_it_gets_no_newer_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.pipeline.sampling.engine.language_model", lambda config: Model())
    monkeypatch.setattr("experiments.pipeline.sampling.engine.POLL", 0.02)
    folder = tmp_path / "weights"
    loco.sync.Publisher(Model(), str(folder)).publish(1)
    diary = Diary("worker", NobodysController())
    said: list[str] = []
    monkeypatch.setattr(diary, "say", said.append)
    engine = TorchEngine(config_of(), str(folder), diary, lambda version: 2)
    engine.wait_for(1)
    waiting = threading.Thread(target=engine.wait_for, args=(2,))
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("no folder")
    waiting.start()
    until = time.monotonic() + 30
    while not said and time.monotonic() < until:
        time.sleep(0.01)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    again = loco.sync.Publisher(Model(), str(folder))
    again.publish(2)
    waiting.join(30)
    assert not waiting.is_alive()
    assert len(said) == 1
    assert said[0].startswith("no newer weights for now")
    engine.close()


class Site:
    """That publishes to a folder of a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("experiments.pipeline.learning.publishing.answer_of", lambda answer: answer)
        monkeypatch.setattr("experiments.pipeline.learning.publishing._PAUSE", 0.02)
        self.folder, self.model, self.controller = folder / "weights", Model(), NobodysController()
        diary = Diary("site 0", self.controller)
        self.publishing = Publishing(self.model, str(self.folder), config_of(), self.controller, diary)

    def published(self) -> Tensor:
        """The newest version's weights."""
        held = {"weight": torch.zeros(4096, dtype=torch.bfloat16)}
        loco.sync.Subscriber(held, str(self.folder)).update()
        return held["weight"]


def test_weights_may_change_while_a_thread_writes_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, monkeypatch)
    before = site.model.weight.detach().bfloat16()
    for version in (1, 2):
        site.publishing.begin(version)
        with torch.no_grad():
            site.model.weight.add_(1)
        site.publishing.close() if version == 2 else site.publishing.finish()
        assert torch.equal(site.published(), before)
        before = site.model.weight.detach().bfloat16()
    assert site.controller.versions == [1, 2]
    assert site.controller.said == []


def test_the_next_version_makes_up_for_one_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, monkeypatch)
    site.publishing.begin(1)
    site.publishing.finish()
    site.folder.rename(tmp_path / "elsewhere")
    site.folder.write_text("no folder")
    for version in (2, 3):
        site.publishing.begin(version)
        site.publishing.finish()
    assert site.controller.versions == [1]
    site.folder.unlink()
    (tmp_path / "elsewhere").rename(site.folder)
    site.publishing.begin(4)
    site.publishing.close()
    assert site.controller.versions == [1, 4]
    assert torch.equal(site.published(), site.model.weight.detach().bfloat16())
    first, second = site.controller.said
    assert first.startswith("site 0, store: version 2 can't be published yet: ")
    assert second == "site 0, store: version 4 is published"


def test_a_version_that_is_missing_is_published_as_often_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, monkeypatch)
    site.folder.write_text("no folder")
    mended = threading.Timer(0.2, site.folder.unlink)
    mended.start()
    site.publishing.until_there(1)
    assert site.controller.versions == [1]
    assert torch.equal(site.published(), site.model.weight.detach().bfloat16())
    site.publishing.until_there(1)  # it is
    assert site.controller.versions == [1]
    site.controller.versions.clear()  # a controller that was lost
    site.publishing.until_there(1)
    assert site.controller.versions == [1]


def test_a_version_that_another_site_has_published_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Site(tmp_path, monkeypatch), Site(tmp_path, monkeypatch)
    for site in (one, other):
        site.publishing.begin(1)
        site.publishing.finish()
        assert site.controller.versions == [1]
    assert torch.equal(one.published(), one.model.weight.detach().bfloat16())
    other.publishing.begin(2)
    other.publishing.close()
    one.publishing.begin(2)
    one.publishing.close()
    assert one.controller.versions == other.controller.versions == [1, 2]


def test_an_earlier_version_that_another_site_has_published_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sites publish what is missing while the store is gone, and one of them goes on alone."""
    one, other = Site(tmp_path, monkeypatch), Site(tmp_path, monkeypatch)
    for site, version in ((one, 1), (other, 2), (one, 3)):
        with torch.no_grad():
            site.model.weight.add_(version)
        site.publishing.begin(version)
        site.publishing.finish()
    assert one.controller.versions == [1, 3]
    assert torch.equal(one.published(), one.model.weight.detach().bfloat16())
