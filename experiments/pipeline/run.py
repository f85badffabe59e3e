"""Start the actors, show what they do, and keep what comes of it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of, create, ray
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.controller import Controller
from experiments.pipeline.figures import draw, figures
from experiments.pipeline.trainer import Trainer
from experiments.pipeline.worker import Worker
from experiments.tasks import Seat, task_of
from experiments.warm_start import kept_or_trained

_EVERY = 1.0  # seconds between looks


def run(config: PipelineConfig, folder: Path) -> dict[str, Any]:
    """Train -> the figures, which are kept in the folder, too."""
    cpu = torch.device("cpu")
    start = kept_or_trained(config, task_of(config, Seat(0, 1, cpu)), cpu)
    folder.mkdir(parents=True, exist_ok=True)
    # A run's versions are its own: workers would take those of an older one for newer weights.
    url = config.weights or str((folder / "weights" / time.strftime("%Y%m%d-%H%M%S")).resolve())
    with cluster.started(config):
        found = _run(config, start, url)
    (folder / "pipeline.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, folder / "pipeline.png")
    return found


def _run(config: PipelineConfig, start: dict[str, Tensor], url: str) -> dict[str, Any]:
    controller = cluster.create_controller(Controller, config)
    answer_of(controller.version.remote())  # it is there when the others look for it
    per_site = config.ranks_per_site
    trainers = [
        create(Trainer, site, rank, config, lives_again=False)
        for site in range(config.sites)
        for rank in range(per_site)
    ]
    workers = [create(Worker, number, config, url, lives_again=True) for number in range(config.workers)]
    worlds = answer_of([one.address.remote() for one in trainers[::per_site]])
    at = answer_of(trainers[0].address.remote())
    joining = [
        one.join.remote(start, at=at, world=worlds[number // per_site], url=url)
        for number, one in enumerate(trainers)
    ]
    answer_of(joining)
    sampling = [worker.run.remote() for worker in workers]
    training = [trainer.run.remote() for trainer in trainers]
    screen, left = Screen(config), list(training)
    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=_EVERY)
        answer_of(done)  # raises what failed
        ended, _ = ray.wait(sampling, num_returns=len(sampling), timeout=0)
        answer_of(ended)
        screen.show(answer_of(controller.status.remote()))
    answer_of(controller.end.remote())
    answer_of(sampling)
    return figures(config, answer_of(training), answer_of(controller.end.remote()))


class Screen:
    """One line for each part, written over the last ones; into a file, one line for all now and then."""

    def __init__(self, config: PipelineConfig, every: float = 15.0) -> None:
        self._config, self._every = config, every
        self._live = sys.stderr.isatty()
        self._lines, self._begun, self._next = 0, time.monotonic(), 0.0

    def show(self, status: dict[str, Any]) -> None:
        config, now = self._config, time.monotonic()
        done = status["taken"] / (config.rounds * config.quota)
        lines = [
            f"{done:4.0%}, version {status['version']} of {config.rounds + 1}, {now - self._begun:.0f} s; "
            f"prompts out {status['out']}, answered {status['ready']}"
        ]
        if not self._live:
            if now >= self._next or done == 1:
                print(lines[0], file=sys.stderr, flush=True)
                self._next = now + self._every
            return
        for part, event in sorted(status["parts"].items()):
            about = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("part", "what", "from", "to"))
            lines.append(f"  {part}: {event['what']} for {event['to'] - event['from']:.2f} s {about}")
        up = f"\x1b[{self._lines}F" if self._lines else ""
        with suppress(OSError):
            sys.stderr.write(up + "".join(f"\x1b[2K{text}\n" for text in lines))
            sys.stderr.flush()
        self._lines = len(lines)
