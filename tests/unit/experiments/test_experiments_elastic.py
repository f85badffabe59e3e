"""The elastic run: one site is killed and started again at its rounds, and the figures and plot follow."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments.elastic import __main__ as elastic
from experiments.elastic.site import VICTIM, ElasticConfig
from experiments.errors import ExperimentError
from experiments.reporting.plots import LOOK, draw_elastic
from experiments.settings.merging import load


class Scripted:
    """Sites that do a round whenever they are asked what they say next."""

    def __init__(self, config: ElasticConfig) -> None:
        self.rounds, self.running = config.steps // config.sync_every, set[int]()
        self.said: list[dict[str, Any]] = []
        self.done: list[tuple[str, int]] = []
        self.round = 0

    def start(self, number: int) -> None:
        self.done.append(("start", number))
        self.running.add(number)
        self.say(number, "joined", held_out=3.0)

    def kill(self, number: int) -> None:
        self.done.append(("kill", number))
        self.running.discard(number)

    def say(self, number: int, event: str, **more: Any) -> None:
        self.said.append(
            {"site": f"site-{number}", "event": event, "round": self.round, "time": time.time(), **more}
        )

    def next(self) -> dict[str, Any]:
        if not self.said:
            self.round += 1
            for number in sorted(self.running):
                if self.round > self.rounds:
                    self.round = self.rounds
                    for each in sorted(self.running):
                        self.say(each, "end", digest="ab")
                    break
                self.say(number, "round", sites=len(self.running), loss=2.0, held_out=3 - self.round / 10)
        event = self.said.pop(0)
        return event | {"time": time.time()}


def ran(config: ElasticConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, *, disturbed: bool) -> Any:
    sites = Scripted(config)

    @contextmanager
    def scripted(_: Path) -> Iterator[Scripted]:
        yield sites

    monkeypatch.setattr(elastic, "processes", scripted)
    return elastic.run(config, folder, disturbed=disturbed), sites.done


def test_one_site_dies_and_comes_back_at_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOOK, "figure.dpi", 40)
    config = load(ElasticConfig, ["steps=80", "dies=3", "returns=5"])
    starts = [("start", number) for number in range(4)]
    undisturbed, done = ran(config, tmp_path, monkeypatch, disturbed=False)
    assert done == starts
    disturbed, done = ran(config, tmp_path, monkeypatch, disturbed=True)
    assert done == [*starts, ("kill", VICTIM), ("start", VICTIM)]
    found = elastic.results(config, disturbed, undisturbed)
    assert (found["rounds"], found["killed_after_round"]) == (10, 3)
    assert (found["first_round_without_it"], found["last_round_without_it"]) == (4, 5)
    assert found["first_round_with_it_again"] == 6
    assert set(found["digests_at_the_end"]) == {f"site-{k}" for k in range(4)}
    draw_elastic(disturbed, undisturbed, tmp_path / "elastic.png")
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_that_is_half_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic.Processes, "__init__", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: written.write('"end"}\n') and written.flush())
    with ExitStack() as closing:
        written = closing.enter_context((tmp_path / "events").open("a"))
        running = elastic.Processes(tmp_path, closing)
        running._events, running._sites = closing.enter_context((tmp_path / "events").open()), {}
        written.write('{"event": ')
        written.flush()
        assert running.next() == {"event": "end"}


def test_a_site_that_dies_must_have_rounds_to_come_back_to() -> None:
    with pytest.raises(ExperimentError, match="dies must be before returns, and that before the end"):
        load(ElasticConfig, ["dies=30"])
