"""Who trains: samples from the controller, rounds with the other sites, versions to whoever samples."""

from __future__ import annotations

import logging
import pickle
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import loco
from experiments.loop import bf16_weights, evaluate, warm_up
from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of, ray
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.losses import losses_of
from experiments.pipeline.samples import Group
from experiments.tasks import Seat
from experiments.tasks.rollout import pad
from experiments.tasks.verified import Verified, answer_log_probabilities

_logger = logging.getLogger(__name__)


class Trainer:
    """An actor, one rank of a site. It is asked where it is, then to join the others, and then to run."""

    def __init__(self, site: int, rank: int, config: PipelineConfig) -> None:
        torch.set_num_threads(1)
        self._site, self._rank = site, rank
        self._config, self._controller = config, cluster.controller()
        self._number = site * config.ranks_per_site + rank
        part = f"site {site}" + (f", rank {rank}" if config.ranks_per_site > 1 else "")
        self._diary = Diary(part, self._controller)
        self._task = Verified(config, Seat(0, 1, torch.device("cpu")))
        self._evaluations: list[dict[str, Any]] = []

    def address(self) -> str:
        """Where others reach this process: a port that is free by now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, start: dict[str, Tensor], *, at: str, world: str, url: str) -> None:
        """Build the optimizer together with all other trainers.

        Args:
            at: where the sites meet, at the first site's first rank.
            world: where the ranks of this site do, at its first one.
            url: where versions go.
        """
        config = self._config
        self._model = self._task.model()
        self._model.load_state_dict(start)
        self._module: nn.Module = self._model
        if config.ranks_per_site > 1:
            dist.init_process_group(
                "gloo", f"tcp://{world}", rank=self._rank, world_size=config.ranks_per_site
            )
            self._module = DistributedDataParallel(self._model)
        inner = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        topology = loco.Sites(config.sites, site=f"site {self._site}", at=at, timeout=config.timeout_s)
        self._optimizer = _wrapped(inner, topology, config)
        # All sites hold the same weights after a round: one of them publishes.
        self._publisher = loco.sync.Publisher(self._model, url) if self._number == 0 else None

    def run(self) -> dict[str, Any]:
        """Train until the last round -> the held-out scores, and the time that training took."""
        config, optimizer = self._config, self._optimizer
        self._publish()
        begun, apart = time.time(), self._evaluate(0)
        for step in range(1, config.steps + 1):
            with self._diary.doing("waiting"):
                groups = self._take()
            with self._diary.doing("training", step=step) as found:
                loss = self._loss(groups)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._model.parameters(), config.clip)
                warm_up(optimizer, step, config)
                if step % config.sync_every:
                    optimizer.step()
                found["tokens"] = sum(group.tokens for group in groups)
            if step % config.sync_every == 0:
                with self._diary.doing("exchanging"):
                    optimizer.step()
                report = optimizer.last_report
                assert report is not None
                self._diary.counts["round bytes"] += report.sent_bytes
                self._publish()
                if step % config.eval_every == 0:
                    apart += self._evaluate(step)
        ended = time.time()
        answer_of(self._diary.send())
        return {
            "evaluations": self._evaluations,
            "begun": begun,
            "ended": ended,
            "seconds": ended - begun - apart,
            "digest": bf16_weights(self._model).view(torch.int16).sum(dtype=torch.int64).item(),
        }

    def _take(self) -> list[Group]:
        parcels = answer_of(self._controller.take.remote(self._version, self._config.grpo.prompts))
        groups = [pickle.loads(parcel) for parcel in parcels]
        for group in groups:
            self._diary.staleness.update((self._version - group.versions).tolist())
        return groups

    def _loss(self, groups: list[Group]) -> Tensor:
        config = self._config
        rows, heads, old, advantage = [], [], [], []
        for group in groups:
            for row, logp, gain in zip(group.rows(), group.split(group.logp), group.advantage, strict=True):
                if gain or not rows:  # one stays in any case: DDP's ranks must all pass through the model
                    rows.append(row)
                    heads.append(len(group.head))
                    old.append(logp)
                    advantage.append(float(gain))
        logp, counts, _ = answer_log_probabilities(self._module, rows, heads, torch.device("cpu"))
        losses = losses_of(
            config.correction,
            logp,
            pad(old),
            torch.tensor(advantage)[:, None],
            ratio_limit=config.ratio_limit,
            clip_low=config.grpo.clip_low,
            clip_high=config.grpo.clip_high,
        )
        return losses[counts].sum() / sum(group.tokens for group in groups)

    @property
    def _version(self) -> int:
        """Of the weights after the last round; versions begin with 1."""
        return int(self._optimizer.round) + 1

    def _publish(self) -> None:
        if self._publisher is None:
            return
        version = self._version
        with self._diary.doing("publishing", version=version) as found:
            while True:
                try:
                    found["bytes"] = self._publisher.publish(version).patch_bytes
                    break
                except (loco.sync.SyncError, OSError) as error:  # without new weights nobody samples for long
                    _logger.warning(
                        "version %d can't be published, another try in a second: %s", version, error
                    )
                    time.sleep(1.0)
        answer_of(self._controller.published.remote(version))

    def _evaluate(self, step: int) -> float:
        """-> the seconds that it took, which are not the pipeline's."""
        begun = time.time()
        if self._number == 0:
            with self._diary.doing("evaluating"):
                scores = evaluate(self._task, self._model, Seat(0, 1, torch.device("cpu")))
            self._evaluations.append({"step": step, "time": begun, "scores": scores})
        return time.time() - begun


def _wrapped(inner: torch.optim.Optimizer, topology: loco.Sites, config: PipelineConfig) -> Any:
    shared: dict[str, Any] = {
        "sync_every": config.sync_every,
        "outer_lr": config.outer_lr,
        "outer_momentum": config.outer_momentum,
        "nesterov": config.nesterov,
        "topology": topology,
    }
    if config.method == "diloco":
        return loco.DiLoCo(inner, **shared)
    return loco.PulseLoCo(
        inner,
        gate=config.gate,
        gate_gain=config.gate_gain,
        gate_margin=config.gate_margin,
        value_steps=config.value_steps,
        sums_margin=config.sums_margin,
        wire="tight",
        **shared,
    )
