"""A trainer: takes samples from the controller, runs rounds with the other sites, publishes versions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import loco
from experiments.errors import ExperimentError
from experiments.methods.methods import AllReduceWait, in_rounds, inner_of
from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.learning.every_step import EveryStep
from experiments.pipeline.learning.losses import learn
from experiments.pipeline.learning.publishing import Publishing
from experiments.pipeline.learning.saving import Saving, newest_round
from experiments.pipeline.learning.sharding import shard
from experiments.pipeline.samples import Group
from experiments.tasks.rollout import PublishedModel
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified
from experiments.training.gathering import most
from experiments.training.loop import warm_up

_ALONE = Seat(0, 1, torch.device("cpu"))


class Trainer:
    """An actor: one rank of a site. `run` is its only task. If sites are elastic, Ray restarts a lost process
    and calls `run` again, and the other sites give it what it missed."""

    def __init__(self, site: int, rank: int, config: PipelineConfig) -> None:
        torch.set_num_threads(1)
        self._site, self._rank = site, rank
        self._config, self._controller = config, cluster.controller()
        self._name = f"site {site}" + (f" rank {rank}" if config.ranks_per_site > 1 else "")
        self._diary = Diary(self._name, self._controller)
        self._task = Verified(config, _ALONE)
        self._asked: Any = None  # the controller, for samples
        self._all_reduce: AllReduceWait | None = None
        self._has_rejoined = False  # in the last round: the others went on without this site

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
            world: address of the first of the ranks that meet in every step: this site's, or with
                method=ddp those of all sites.
            checkpoints: the folder of the run's.
        """
        config = self._config
        folder = checkpoints / f"site {self._site}"
        self._saving = Saving(config, folder, self._controller, self._diary, trainer=self._number)
        self._build(start, at=at, world=world, checkpoints=checkpoints)
        self._publishing = Publishing(
            cast(PublishedModel, self._model).checkpoint,
            url,
            config,
            self._controller,
            self._diary,
            part=(self._rank, config.ranks_per_site) if config.shard else (0, 1),
        )
        # A site that resumes without a checkpoint is given what the others have, in its first round.
        has_nothing = config.resume and self._optimizer.round == 0
        is_over = self._is_late and self._version > config.rounds  # but for the last round, on its way
        if not (has_nothing or is_over) and answer_of(self._controller.newer.remote(0, 0.0)) < self._version:
            self._publish()
        if self._optimizer.round > 0:
            self._diary.say(f"goes on after round {self._optimizer.round}")
        while self._version <= config.rounds:
            self._train_round()
        if self._is_late:  # the last round is on its way
            with self._diary.doing("exchanging"):
                self._optimizer.sync()
            self._publish()
        if self._publishes:
            self._publishing.until_there(self._version)  # to be scored
        self._publishing.close()
        self._saving.close()
        answer_of(self._diary.send())
        return _digest(self._model)

    def _build(self, start: dict[str, Tensor], *, at: str, world: str | None, checkpoints: Path) -> None:
        """Build the optimizer together with all other trainers; a site that returns receives θ."""
        config = self._config
        if world is not None:
            rank, ranks = self._rank, config.ranks_per_site
            if config.method == "ddp":
                rank, ranks = self._number, config.trainers
            dist.init_process_group("gloo", f"tcp://{world}", rank=rank, world_size=ranks)
        self._model = self._model_of(start)
        self._module: nn.Module = self._model
        if world is not None and not config.shard:
            self._module = DistributedDataParallel(self._model)
            self._all_reduce = AllReduceWait(self._module)
        self._reference = self._model_of(start).requires_grad_(False) if config.kl else None
        inner = inner_of(self._model, config)
        if config.method == "ddp":
            self._optimizer = EveryStep(inner, sync_every=config.sync_every, ranks=config.trainers)
            return
        before = answer_of(self._controller.version.remote())
        self._topology = loco.Sites(
            config.sites,
            site=f"site {self._site}",
            at=at,
            at_least=1 if config.elastic else None,
            timeout=config.timeout_s,
        )
        self._optimizer = in_rounds(inner, self._topology, config)
        self._optimizer.register_report_hook(self._after_round)
        if not config.resume and before == 0:
            self._saving.clear()
        self._saving.resume(self._optimizer)
        if self._version < before:
            newest = newest_round(checkpoints)
            rest = "" if newest is None else f": resume=true goes on from the checkpoints of round {newest}"
            raise ExperimentError(
                f"all sites were lost at once, and with them what they had learned to version {before}{rest}"
            )

    def _model_of(self, start: dict[str, Tensor]) -> nn.Module:
        config, model = self._config, self._task.model()
        model.load_state_dict(start)
        if config.shard:
            shard(model, config.ranks_per_site, checkpoint_activations=config.checkpoint_activations)
        return model

    def _train_round(self) -> None:
        config, optimizer = self._config, self._optimizer
        before = (self._version - 1) * config.sync_every
        last = before + config.sync_every
        for step in range(before + 1, last + 1):
            with self._diary.doing("waiting"):
                groups = self._take(step - before - 1)
            with self._diary.doing("training", step=step) as found:
                optimizer.zero_grad()
                learn(self._module, groups, config, self._reference)
                if self._all_reduce is not None:
                    found["all-reduce"] = self._all_reduce.seconds()
                nn.utils.clip_grad_norm_(self._model.parameters(), config.clip)
                warm_up(optimizer.param_groups, step, config)
                if step < last:
                    optimizer.step()
                found["tokens"] = sum(group.tokens for group in groups)
                found["answers"] = sum(len(group.lengths) for group in groups)
        self._has_rejoined = False
        with self._diary.doing("exchanging", step=last):
            optimizer.step()
        if self._has_rejoined:
            return
        if not (self._is_late and last == config.steps):  # else that version is still to come
            self._publish()
        if isinstance(optimizer, EveryStep):
            self._diary.notes.counts["round bytes"] += optimizer.bytes_per_round
        else:
            self._saving.after_round(optimizer, self._version)

    def _after_round(self, report: loco.SyncReport) -> None:
        self._diary.notes.counts["round bytes"] += report.sent_bytes
        self._has_rejoined = report.exchange == "rejoin"

    @property
    def _publishes(self) -> bool:
        """All sites hold the same weights after a round, and the first one that took part publishes them."""
        return self._is_first and (self._rank == 0 or self._config.shard)

    @property
    def _is_first(self) -> bool:
        return self._site == 0 if self._config.method == "ddp" else self._topology.site == 0

    def _publish(self) -> None:
        if self._publishes:
            with self._diary.doing("publishing", version=self._version), self._agreed(self._is_late):
                self._publishing.begin(self._version)

    def _take(self, step: int) -> list[Group]:
        """Samples for this step of the round; those for the next one are asked for."""
        parcels: list[bytes] | None = None
        while True:
            parcels = parcels or answer_of(self._asked or self._ask(step))
            self._asked = None
            if not _any(parcels is None):
                break
            self._publish_again()
        assert parcels is not None
        if step + 1 < self._config.sync_every:
            self._asked = self._ask(step + 1)
        groups = [Group.unpacked(parcel) for parcel in parcels]
        for group in groups:
            self._diary.notes.staleness.update((self._version - group.sampled_versions).tolist())
        return groups

    def _publish_again(self) -> None:
        """The site that publishes was lost, or the store was. Another site can take its place if it is one
        rank. The ranks of a site call this together."""
        config, publishes = self._config, self._publishes
        if config.method != "ddp":
            if config.ranks_per_site > 1 and not self._is_first:
                return
            publishes |= config.ranks_per_site == 1
        if not _any(publishes and not self._publishing.has(self._version)):
            return  # it was only slow, or the controller was lost
        with self._agreed(True):
            if publishes:
                with self._diary.doing("publishing", version=self._version):
                    self._publishing.until_there(self._version)

    def _ask(self, step: int) -> Any:
        return self._controller.take.remote(self._number, self._version, step, self._config.grpo.prompts)

    @contextmanager
    def _agreed(self, shown: bool) -> Iterator[None]:
        """Show the weights that all sites agree on: within a round each site has its own."""
        if shown:
            self._optimizer.eval()
        yield
        if shown:
            self._optimizer.train()

    @property
    def _is_late(self) -> bool:
        """Whether rounds are applied one round late. Then so are the versions' weights, but for the last."""
        return self._config.overlap is not None

    @property
    def _number(self) -> int:
        """Of this trainer, among all of them."""
        return self._site * self._config.ranks_per_site + self._rank

    @property
    def _version(self) -> int:
        """The version of the weights after the last round; versions begin with 1."""
        optimizer = self._optimizer
        on_its_way = 0 if isinstance(optimizer, EveryStep) else optimizer.outer_state.on_its_way
        return min(max(optimizer.round, on_its_way), self._config.rounds) + 1


def _any(flag: bool) -> bool:
    """Whether it is so on any of the ranks that meet in every step."""
    return bool(most(int(flag))) if dist.is_initialized() else flag


@torch.no_grad()
def _digest(model: nn.Module) -> int:
    """Of the weights as the forward pass sees them."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(int(p.bfloat16().view(torch.int16).sum(dtype=torch.int64)) for p in whole)
