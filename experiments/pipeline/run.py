"""Start the actors, show what they do, and keep what comes of it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.errors import ExperimentError
from experiments.models.warm_start import kept_or_trained
from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of, ray
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.controller import Controller
from experiments.pipeline.diary import Notes
from experiments.pipeline.figures import figures
from experiments.pipeline.learning.saving import newest_round
from experiments.pipeline.learning.trainer import Trainer
from experiments.pipeline.report import Curves, draw, page
from experiments.pipeline.sampling.worker import Worker
from experiments.processes.meeting import meeting
from experiments.tasks.registry import task_of
from experiments.tasks.task import Seat

_EVERY = 1.0  # seconds between looks
_SHOWN = ("step", "version", "tokens", "bytes")  # of an event, while the run goes on


def run(config: PipelineConfig, folder: Path) -> dict[str, Any]:
    """Train, in a cluster that has been started -> the figures, which are stored in the folder too."""
    cpu = torch.device("cpu")
    start = kept_or_trained(config, task_of(config, Seat(0, 1, cpu)), cpu)
    checkpoints = (folder / "checkpoints").resolve()
    newest = newest_round(checkpoints)
    if not config.resume:
        shutil.rmtree(checkpoints, ignore_errors=True)
    elif newest is None and config.address is None:  # else those of other machines are there
        raise ExperimentError(f"there are no checkpoints in {checkpoints}: leave out resume=true to begin")
    elif newest is not None and newest >= config.rounds:
        raise ExperimentError(
            f"the checkpoints in {checkpoints} are of round {newest}, and steps={config.steps} are "
            f"{config.rounds} rounds: set steps higher to go on"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "weights", ignore_errors=True)  # of an earlier run
    # Each run has its own URL: workers would take an older run's versions for newer weights.
    where = config.weights or str((folder / "weights").resolve())
    url = f"{where.rstrip('/')}/{time.strftime('%Y%m%d-%H%M%S')}"
    with ExitStack() as closing:
        at = None
        if config.elastic:
            at = closing.enter_context(meeting(folder / "store.log", host=cluster.own_address()))
        curves = closing.enter_context(Curves(folder / "tensorboard"))
        found = _run(config, start, url, at, checkpoints, closing.enter_context(cluster.Actors()), curves)
    (folder / "pipeline.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, folder / "pipeline.png")
    (folder / "report.html").write_text(page(found, folder / "pipeline.png"), encoding="utf-8")
    return found


def _located(config: PipelineConfig) -> PipelineConfig:
    """With paths that mean the same in all actors, wherever they work."""

    def whole(path: str | None) -> str | None:
        return path if path is None else str(Path(path).resolve())

    def in_file(name: str | None) -> str | None:
        source, _, own = (name or "").rpartition(":")
        return f"{whole(source)}:{own}" if source.endswith(".py") else name

    prompts = config.prompts
    files = {"file": whole(prompts.file), "held_out_file": whole(prompts.held_out_file)}
    named = {"reward": in_file(prompts.reward), "environment": in_file(prompts.environment)}
    return replace(config, path=whole(config.path), prompts=replace(prompts, **named, **files))


def _run(
    config: PipelineConfig,
    start: dict[str, Tensor],
    url: str,
    at: str | None,
    checkpoints: Path,
    actors: cluster.Actors,
    curves: Curves,
) -> dict[str, Any]:
    controller = actors.controller(Controller, config)
    answer_of(controller.version.remote())  # the others look it up by name, so it must be running
    per_site, located = config.ranks_per_site, _located(config)
    trainers = [
        actors.create(
            Trainer, site, rank, located, lives_again=config.elastic, on=_one_of(config.sites_on, site)
        )
        for site in range(config.sites)
        for rank in range(per_site)
    ]
    workers = [
        actors.create(Worker, number, located, url, lives_again=True, on=_one_of(config.workers_on, number))
        for number in range(config.workers)
    ]
    if at is None:
        at = answer_of(trainers[0].address.remote())
    worlds = []  # of ranks that meet in every step
    if config.method == "ddp":
        worlds = [answer_of(trainers[0].address.remote())] * config.sites
    elif per_site > 1 or config.shard:
        worlds = answer_of([one.address.remote() for one in trainers[::per_site]])
    shared = ray.put(start)
    training = [
        one.run.remote(
            shared,
            url=url,
            at=at,
            world=worlds[number // per_site] if worlds else None,
            checkpoints=checkpoints,
        )
        for number, one in enumerate(trainers)
    ]
    sampling = [worker.run.remote() for worker in workers]
    screen, notes, left = Screen(config), Notes(), list(training)

    def look() -> None:
        status = answer_of(controller.look.remote())
        notes.add(status["notes"])
        curves.add(status["notes"], status["version"])
        screen.show(status)

    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=_EVERY)
        answer_of(done)  # raises what failed
        ended, _ = ray.wait(sampling, num_returns=len(sampling), timeout=0)
        answer_of(ended)
        look()
    finishing = controller.finish.remote()
    while not ray.wait([finishing], timeout=_EVERY)[0]:
        ended, _ = ray.wait(sampling, num_returns=len(sampling), timeout=0)
        answer_of(ended)
    answer_of([finishing, *sampling])
    look()
    return figures(config, answer_of(training), notes)


def _one_of(nodes: tuple[str, ...], number: int) -> str | None:
    return nodes[number % len(nodes)] if nodes else None


class Screen:
    """On a terminal one line for each part, rewritten in place; otherwise one line for all, now and then."""

    def __init__(self, config: PipelineConfig, every: float = 15.0) -> None:
        self._config, self._every = config, every
        self._live = sys.stderr.isatty()
        self._lines, self._begun, self._next = 0, time.monotonic(), 0.0
        self._latest: dict[str, dict[str, Any]] = {}  # the last event of each part
        self._spent: dict[str, Counter[str]] = {"sites": Counter(), "workers": Counter()}  # seconds, lately
        self._ended = False

    def show(self, status: dict[str, Any]) -> None:
        """
        Args:
            status: of `Controller.look`.
        """
        config, now = self._config, time.monotonic()
        notes: Notes = status["notes"]
        self._latest |= {event["part"]: event for event in notes.events}
        for event in notes.events:
            if "," not in event["part"]:  # threads work beside their part
                kind = "sites" if event["part"].startswith("site") else "workers"
                self._spent[kind][event["what"]] += event["to"] - event["from"]
        done = status["taken"] / (config.rounds * config.quota)
        line = (
            f"{done:4.0%}, version {status['version']} of {config.rounds + 1}, {now - self._begun:.0f} s; "
            f"prompts out {status['out']}, answered {status['ready']}{self._shares()}"
        )
        if not self._live:
            ended = status["version"] > config.rounds and not self._ended
            lines = [*notes.said, *([line] if now >= self._next or ended else [])]
            self._ended |= ended
            if now >= self._next:
                self._next = now + self._every
                for spent in self._spent.values():
                    spent.clear()
            self._write("".join(f"{text}\n" for text in lines))
            return
        lines = [line]
        for part, event in sorted(self._latest.items()):
            about = ", ".join(f"{k} {v}" for k, v in event.items() if k in _SHOWN)
            lines.append(f"  {part}: {event['what']} for {event['to'] - event['from']:.2f} s {about}")
        up = f"\x1b[{self._lines}F" if self._lines else ""
        self._write(up + "".join(f"\x1b[2K{text}\n" for text in [*notes.said, *lines]))
        self._lines = len(lines)

    def _shares(self) -> str:
        """What bounds the run: who works, and who waits."""
        said = ""
        for kind, spent in self._spent.items():
            total = sum(spent.values())
            most = [f"{what} {seconds / total:.0%}" for what, seconds in spent.most_common(2)]
            said += f"; {kind}: {', '.join(most)}" if most else ""
        return said

    def _write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
