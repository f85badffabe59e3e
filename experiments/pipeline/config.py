"""The settings of a pipeline: those of a training run, and how many parts work on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.errors import ExperimentError
from experiments.settings.checks import at_least, nearest, require
from experiments.settings.config import METHODS, RunConfig
from experiments.settings.tasks import GrpoConfig
from loco.sync.storage.stores import check_url

ENGINES = ("torch", "vllm")
CORRECTIONS = ("aipo", "grpo", "none")  # see `learning/losses.py`


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(RunConfig):
    saving: float | None = 0.25

    sites: int = 2  # that train, each of `ranks_per_site` ranks
    elastic: bool = True  # a lost site is restarted while the others train on
    shard: bool = False  # FSDP2 over a site's ranks, in BF16 over FP32 masters; False: DDP
    checkpoint_activations: bool = False  # backward computes them again
    workers: int = 2  # that sample
    lease: int = 32  # prompts that a worker answers in one batch
    engine: str = (
        "torch"  # that workers sample with: torch (the training model itself), or vllm with model=hf
    )
    vllm: dict[str, Any] = field(default_factory=dict)  # options of vllm.LLM

    reward_processes: int = 1  # of each worker, which call prompts.reward
    reward_timeout_s: float = 60.0  # of one answer; then it is tried once more

    max_staleness: int = 2  # versions; 0: training and sampling take turns
    in_flight: bool = True  # workers switch weights between two tokens; False: between two leases
    recompute_cache: bool = False  # recompute keys and values when the weights change
    correction: str = "aipo"  # for samples from older weights
    ratio_limit: float = 4.0  # AIPO's ρ
    kl: float = 0.0  # weight of the distance from the model that the run began with
    micro_batch: int | None = None  # answers of one forward pass; None: all of a step's

    save_every: int = 10  # rounds between checkpoints, in runs/<name>/checkpoints; 0: none
    resume: bool = False  # go on from them
    weights: str | None = None  # URL under which versions are published; None: the run's folder
    patches: bool = True  # publish what changed; False: all weights, as a baseline
    address: str | None = None  # of a Ray cluster; None: start one on this machine
    # Ray resources that mark nodes of the cluster; sites and workers are placed on them in turn.
    sites_on: tuple[str, ...] = ()
    workers_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.method not in METHODS or self.method in ("pulseloco", "diloco", "ddp"),
            f"sites train by method=pulseloco, diloco or ddp, got method={self.method}",
        )
        super().__post_init__()
        at_least(1, self, "sites", "workers", "lease", "reward_processes")
        at_least(1, self, "micro_batch")
        at_least(0, self, "max_staleness", "save_every", "kl")
        require(self.reward_timeout_s > 0, f"reward_timeout_s must be > 0, got {self.reward_timeout_s}")
        require(self.engine in ENGINES, f"unknown engine '{self.engine}'{nearest(self.engine, ENGINES)}")
        require(
            self.engine != "vllm" or self.model == "hf",
            "vLLM loads models of Hugging Face's format: engine=vllm needs model=hf and path=<folder>",
        )
        require(self.engine == "vllm" or not self.vllm, "vllm.* are options of vLLM: set engine=vllm, too")
        require(self.ratio_limit >= 1, f"ratio_limit must be at least 1, got {self.ratio_limit}")
        require(
            self.correction in CORRECTIONS,
            f"unknown correction '{self.correction}'{nearest(self.correction, CORRECTIONS)}",
        )
        require(
            self.task != "text",
            "task=text has no verifier, which a pipeline needs: use prompts, gym or arithmetic",
        )
        require(
            self.device != "cuda",
            "device=cuda is not built for pipelines, whose parts compute on CPUs: leave device out",
        )
        require(
            self.address is None or self.weights is not None,
            f"the parts of a cluster may not see this machine's folders: with address={self.address} set "
            "weights=s3://…, http://… or a folder that all of them see",
        )
        require(
            self.address is not None or not (self.sites_on or self.workers_on),
            "sites_on and workers_on are nodes of a cluster, which address=HOST:PORT joins",
        )
        if self.weights is not None:
            try:
                check_url(self.weights)
            except ValueError as error:
                raise ExperimentError(f"weights: {error}") from error
        require(self.patches or self.engine == "torch", "patches=false needs engine=torch")
        require(not self.grpo.own_problems, "own_problems: a pipeline's workers sample for all sites")
        require(
            not self.elastic or self.ranks_per_site == 1,
            "sites of several ranks stay the same, and the run ends when one is lost: set elastic=false",
        )
        require(
            self.method != "ddp"
            or not (self.elastic or self.shard or self.save_every or self.resume or self.overlap is not None),
            "method=ddp is there to compare with, all trainers as one site: set elastic=false save_every=0, "
            "and leave out shard, resume and overlap",
        )
        require(
            self.overlap is None or self.max_staleness > 0,
            "where all take turns, nothing overlaps: leave out overlap, or set max_staleness to 1 or more",
        )
        require(
            self.shard or not self.checkpoint_activations,
            "checkpoint_activations is for models that are sharded: set shard=true, too",
        )

    @property
    def grpo(self) -> GrpoConfig:
        return getattr(self, self.task)

    @property
    def trainers(self) -> int:
        return self.sites * self.ranks_per_site

    @property
    def processes(self) -> int:
        return self.trainers + self.workers + 1  # the controller

    @property
    def rounds(self) -> int:
        return self.steps // self.sync_every

    @property
    def quota(self) -> int:
        """Prompts that one round trains on."""
        return self.sync_every * self.trainers * self.grpo.prompts
