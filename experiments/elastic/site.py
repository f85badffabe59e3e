"""A site of `python -m experiments.elastic`: it trains a byte model on text of its own, and says in a line of
JSON what each round brought.

On a machine of its own:

    python -m experiments.elastic.site site=berlin data=0 at=10.0.0.1:29510
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

import loco
from experiments.errors import ExperimentError
from experiments.methods.methods import Trainee, in_rounds
from experiments.settings.checks import require
from experiments.settings.config import RunConfig, TransformerConfig, WarmStartConfig
from experiments.settings.merging import load
from experiments.settings.tasks import TextConfig
from experiments.tasks.registry import task_of
from experiments.tasks.task import Seat
from experiments.training.loop import evaluate, take_step
from experiments.training.meter import Meter
from loco.round.outer.state import digest_of

VICTIM = 2  # the site that dies and comes back
DEAD_AFTER = 3.0  # seconds without a sign of life


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(RunConfig):
    """From chance, at a rate at which every round shows in the curve: it is about sites, not about bytes."""

    task: str = "text"
    steps: int = 480
    lr: float = 1e-3
    outer_momentum: float = 0.6
    transformer: TransformerConfig = field(default_factory=lambda: TransformerConfig(dim=64, layers=2))
    text: TextConfig = field(default_factory=lambda: TextConfig(batch=4, eval_sequences=64))
    warm_start: WarmStartConfig = field(default_factory=lambda: WarmStartConfig(steps=0))

    sites: int = 4  # a run starts with
    site: str | None = None  # this one's name
    data: int = 0  # which share of the text this site reads
    shares: int = 4
    at: str | None = None  # host:port at which the sites meet; None: LOCO_AT

    dies: int = 20  # the round after which one site is killed
    returns: int = 28  # the round of the others in which it is started again

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds = self.steps // self.sync_every
        require(
            0 < self.dies < self.returns < rounds - 1 and self.sites > VICTIM,
            f"of {rounds} rounds, dies must be before returns, and that before the end, with at least "
            f"{VICTIM + 1} sites: got dies={self.dies} returns={self.returns} sites={self.sites}",
        )


def train(config: ElasticConfig) -> None:
    cpu = torch.device("cpu")
    task = task_of(config, Seat(config.data, config.shares, cpu))
    judge, alone = task_of(config, Seat(0, 1, cpu)), Seat(0, 1, cpu)  # all sites hold one θ; each scores it

    def held_out() -> float:
        return evaluate(judge, model, alone)[judge.metric]

    model = task.model()
    topology = loco.Sites(
        config.sites,
        site=config.site,
        at=config.at,
        at_least=1,
        timeout=config.timeout_s,
        dead_after=DEAD_AFTER,
    )
    inner = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas)
    optimizer = in_rounds(inner, topology, config)

    trainee, meter = Trainee(model, optimizer, None, None), Meter(cpu, computed_bytes_per_step=0)

    def say(event: str, **what: Any) -> None:
        about = {"time": time.time(), "site": config.site, "event": event, "round": optimizer.round}
        # In one piece: other sites may write to the same file.
        sys.stdout.write(json.dumps(about | what) + "\n")
        sys.stdout.flush()

    say("joined", held_out=held_out())

    # The number of rounds is the run's: a site that comes back goes on where the others are.
    while optimizer.round * config.sync_every < config.steps:
        first, losses = optimizer.round * config.sync_every + 1, []
        for step in range(first, first + config.sync_every):
            losses.append(take_step(step, config, task, trainee, model, meter).item())
        report = optimizer.last_report
        assert report is not None
        say(
            "given" if report.exchange == "rejoin" else "round",
            sites=topology.num_sites,
            loss=fmean(losses),
            held_out=held_out(),
            sent_bytes=report.sent_bytes,
        )
    say("end", digest=digest_of(optimizer.outer_state.anchor))
    topology.close()


def main() -> int:
    # Ctrl-C ends a site without a word: who started it speaks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        train(load(ElasticConfig, sys.argv[1:]))
    except (ExperimentError, loco.LocoError, ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
