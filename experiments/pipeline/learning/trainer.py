"""A trainer: takes samples from the controller, runs rounds with the other sites, publishes versions."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import loco
from experiments.errors import ExperimentError
from experiments.methods.methods import in_rounds, inner_of
from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.learning.losses import learn
from experiments.pipeline.learning.publishing import Publishing
from experiments.pipeline.learning.saving import Saving, newest_round
from experiments.pipeline.samples import Group
from experiments.tasks.rollout import PublishedModel
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified
from experiments.training.loop import bf16_weights, warm_up

_ALONE = Seat(0, 1, torch.device("cpu"))


class Trainer:
    """An actor: one rank of a site. `run` is its only task. If sites are elastic, Ray restarts a lost process
    and calls `run` again, and the other sites give it what it missed."""

    def __init__(self, site: int, rank: int, config: PipelineConfig) -> None:
        torch.set_num_threads(1)
        self._site, self._rank = site, rank
        self._config, self._controller = config, cluster.controller()
        self._name = f"site {site}" + (f", rank {rank}" if config.ranks_per_site > 1 else "")
        self._diary = Diary(self._name, self._controller)
        self._task = Verified(config, _ALONE)

    def address(self) -> str:
        """An address at which others can reach this process: a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{cluster.own_address()}:{probe.getsockname()[1]}"

    def run(
        self, start: dict[str, Tensor], *, url: str, at: str, world: str | None, checkpoints: Path
    ) -> int:
        """Train until the last round -> a digest of the weights.

        Args:
            url: where to publish versions.
            at: address at which the sites meet.
            world: address of this site's first rank, for sites of several ranks.
            checkpoints: the folder of the run's.
        """
        config = self._config
        self._saving = Saving(config, checkpoints / f"site {self._site}", self._controller, self._diary)
        self._build(start, at=at, world=world, checkpoints=checkpoints)
        checkpoint = cast(PublishedModel, self._model).checkpoint
        self._publishing = Publishing(checkpoint, url, config, self._controller, self._diary)
        # A site that resumes without a checkpoint is given what the others have, in its first round.
        has_nothing = config.resume and self._optimizer.round == 0
        if not has_nothing and answer_of(self._controller.newer.remote(0, 0.0)) < self._version:
            self._publish()
        if self._optimizer.round > 0:
            self._diary.say(f"goes on after round {self._optimizer.round}")
        while self._optimizer.round < config.rounds:
            self._train_round()
        if self._publishes:
            self._publishing.until_there(self._version)  # to be scored
        self._publishing.close()
        self._saving.close()
        answer_of(self._diary.send())
        return int(bf16_weights(self._model).view(torch.int16).sum(dtype=torch.int64).item())

    def _build(self, start: dict[str, Tensor], *, at: str, world: str | None, checkpoints: Path) -> None:
        """Build the optimizer together with all other trainers; a site that returns receives θ."""
        config = self._config
        self._model = self._task.model()
        self._model.load_state_dict(start)
        self._module: nn.Module = self._model
        if world is not None:
            dist.init_process_group(
                "gloo", f"tcp://{world}", rank=self._rank, world_size=config.ranks_per_site
            )
            self._module = DistributedDataParallel(self._model)
        self._reference: nn.Module | None = None
        if config.kl:
            self._reference = self._task.model().requires_grad_(False)
            self._reference.load_state_dict(start)
        inner = inner_of(self._model, config)
        before = answer_of(self._controller.version.remote())
        self._topology = loco.Sites(
            config.sites,
            site=f"site {self._site}",
            at=at,
            at_least=1 if config.elastic else None,
            timeout=config.timeout_s,
        )
        self._optimizer = in_rounds(inner, self._topology, config)
        if not config.resume and before == 0:
            self._saving.clear()
        self._saving.resume(self._optimizer)
        if self._version < before:
            newest = newest_round(checkpoints)
            rest = "" if newest is None else f": resume=true goes on from the checkpoints of round {newest}"
            raise ExperimentError(
                f"all sites were lost at once, and with them what they had learned to version {before}{rest}"
            )

    def _train_round(self) -> None:
        config, optimizer = self._config, self._optimizer
        before = optimizer.round * config.sync_every
        last = before + config.sync_every
        for step in range(before + 1, last + 1):
            with self._diary.doing("waiting"):
                groups = self._take(step - before - 1)
            with self._diary.doing("training", step=step) as found:
                optimizer.zero_grad()
                learn(self._module, groups, config, self._reference)
                nn.utils.clip_grad_norm_(self._model.parameters(), config.clip)
                warm_up(optimizer, step, config)
                if step < last:
                    optimizer.step()
                found["tokens"] = sum(group.tokens for group in groups)
                found["answers"] = sum(len(group.lengths) for group in groups)
        with self._diary.doing("exchanging", step=last):
            optimizer.step()
        report = optimizer.last_report
        assert report is not None
        self._diary.notes.counts["round bytes"] += report.sent_bytes
        if report.exchange != "rejoin":
            self._publish()
            self._saving.after_round(optimizer)

    @property
    def _publishes(self) -> bool:
        """All sites hold the same weights after a round, and the first one that took part publishes them."""
        return self._topology.site == 0 and self._rank == 0

    def _publish(self) -> None:
        if self._publishes:
            with self._diary.doing("publishing", version=self._version):
                self._publishing.begin(self._version)

    def _take(self, step: int) -> list[Group]:
        ask, count = self._controller.take, self._config.grpo.prompts
        number = self._site * self._config.ranks_per_site + self._rank
        while (parcels := answer_of(ask.remote(number, self._version, step, count))) is None:
            self._optimizer.eval()  # show θ: within a round the weights are this site's own
            with self._diary.doing("publishing", version=self._version):
                self._publishing.until_there(self._version)  # the publishing site or the store was lost
            self._optimizer.train()
        groups = [Group.unpacked(parcel) for parcel in parcels]
        for group in groups:
            self._diary.notes.staleness.update((self._version - group.versions).tolist())
        return groups

    @property
    def _version(self) -> int:
        """The version of the weights after the last round; versions begin with 1."""
        return int(self._optimizer.round) + 1
