"""Configuration: frozen dataclasses that check themselves. `experiments.settings.merging` fills them in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.errors import ExperimentError
from experiments.settings.checks import at_least, one_of, require
from experiments.settings.tasks import AnswerConfig, ArithmeticConfig, GymConfig, PromptsConfig, TextConfig
from loco.config import Settings
from loco.exchange.wire_config import WireConfig
from loco.presets import outer_settings

TITLES = {
    "single": "one trainer",
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "pulseloco": "PULSELoCo",
    "sparseloco": "SparseLoCo",
}
METHODS = tuple(TITLES)
# By loco, where a run does not give them.
DECIDED = ("saving", "outer_lr", "outer_momentum", "gate_gain", "gate_margin", "value_steps", "sums_margin")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    dim: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64  # bytes a prediction may look back on

    def __post_init__(self) -> None:
        require(
            self.dim % self.heads == 0,
            f"transformer.dim must be a multiple of transformer.heads, got {self.dim} and {self.heads}",
        )


@dataclass(frozen=True, kw_only=True)
class SparseLoCoConfig:
    """See `experiments.methods.sparseloco.SparseLoCo`; outer_lr is the shared one."""

    k: int = 64  # entries sent of a chunk of 4096
    decay: float = 0.95  # β
    # What g divides by: "sites" is the paper's R; "senders", in the authors' code, is how many sites sent an
    # element, and so the larger step.
    average: str = "sites"
    quantiser: str = "uniform"  # the authors'; "signed" errs less

    def __post_init__(self) -> None:
        require(1 <= self.k <= 4096, f"sparseloco.k must be between 1 and 4096, got {self.k}")
        require(0 <= self.decay <= 1, f"sparseloco.decay must be in [0, 1], got {self.decay}")
        one_of(self, "average", ("sites", "senders"), part="sparseloco.")
        one_of(self, "quantiser", ("uniform", "signed"), part="sparseloco.")


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """The training that stands in for a published checkpoint. Done once, then kept."""

    steps: int = 1500  # 0: the model starts from chance
    batch: int = 192
    lr: float = 3e-3
    decay: bool = True  # to zero, along half a cosine
    folder: str = "runs/warm_start"

    def __post_init__(self) -> None:
        at_least(1, self, "batch", part="warm_start.")
        at_least(0, self, "steps", part="warm_start.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a single run and a comparison share. The defaults are the demo's."""

    name: str | None = None  # results go to runs/<name>/
    seed: int = 0
    device: str = "auto"  # auto, cpu or cuda
    nproc: int | None = None  # processes to launch; None: the launcher's business
    port: int | None = None  # the launcher's rendezvous port; None: any free one
    timeout_s: float = 300.0  # of one collective

    task: str = "arithmetic"
    model: str = "transformer"
    path: str | None = None  # folder of a Hugging Face model, for model=hf
    parameters: str = "float32"  # or bfloat16: no masters

    method: str = "pulseloco"
    steps: int = 240
    eval_every: int = 48  # steps
    lr: float = 1e-6
    warmup: int = 20  # steps, from 0 to lr
    optimizer: str = "AdamW"  # of torch.optim
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # its own, e.g. {momentum: 0.9}
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0  # these two where the optimizer knows them
    clip: float = 1.0  # norm of a site's gradient

    sync_every: int = 8
    # loco decides those of the next seven that are not given.
    saving: float | None = None  # of a BF16 ulp
    outer_lr: float | None = None
    outer_momentum: float | None = None
    gate_gain: float | None = None
    gate_margin: float | None = None  # of a BF16 ulp
    value_steps: int | None = None  # to a BF16 ulp
    sums_margin: float | None = None  # of a BF16 ulp
    nesterov: bool = True
    gate: str = "bf16"
    overlap: float | None = None  # β: rounds travel beside the inner steps; where the
    # outer step finds its length any number stands for α
    error_feedback: bool = True  # False: what a round withholds is forgotten
    whole_ulps: bool = False  # differences of BF16 casts are sent instead of updates
    wire: str | None = None  # None: PULSELoCo's tight, DiLoCo's float32
    exchange: str = "auto"
    ranks_per_site: int = 1

    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    gym: GymConfig = field(default_factory=GymConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    text: TextConfig = field(default_factory=TextConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    sparseloco: SparseLoCoConfig = field(default_factory=SparseLoCoConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "eval_every", "sync_every", "ranks_per_site", "nproc")
        at_least(0, self, "seed", "warmup")
        for name in ("lr", "clip", "timeout_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        one_of(self, "method", METHODS)
        one_of(self, "task", ("arithmetic", "gym", "prompts", "text"))
        one_of(self, "model", ("transformer", "hf"))
        one_of(self, "parameters", ("float32", "bfloat16"))
        one_of(self, "device", ("auto", "cpu", "cuda"))
        require(
            self.port is None or 0 < self.port < 65536, f"port must be between 1 and 65535, got {self.port}"
        )
        require(
            (self.path is not None) == (self.model == "hf"),
            "model=hf and path=<folder of the model> belong together",
        )
        require(
            self.model != "hf" or self.task != "text",
            "the text task reads bytes: model=hf needs task=prompts, task=gym or task=arithmetic",
        )
        require(
            self.task != "prompts" or self.model == "hf",
            "prompts need a model that has been trained: set model=hf and path=<folder of the model>",
        )
        require(
            (self.task == "prompts") == (self.prompts.file is not None) == (self.prompts.judge is not None),
            "task=prompts, prompts.file=<JSONL or Parquet> and prompts.reward=<module:function> or "
            "prompts.environment=<module:Class> belong together",
        )
        require(
            self.saving is None or self.method == "pulseloco",
            f"saving is for method=pulseloco: leave it out with method={self.method}, or set saving=null",
        )
        needed = self.arithmetic.longest
        require(
            (self.task, self.model) != ("arithmetic", "transformer") or self.transformer.context >= needed,
            f"transformer.context must be at least {needed} for a prompt and its answer, "
            f"got {self.transformer.context}",
        )
        require(
            self.gate != "open" or (self.error_feedback and not self.whole_ulps),
            "an open gate withholds nothing: error_feedback=false and whole_ulps=true need another gate",
        )
        require(
            self.method != "sparseloco" or self.ranks_per_site == 1,
            f"SparseLoCo here has sites of one rank, got ranks_per_site={self.ranks_per_site}",
        )
        require(
            self.overlap is None
            or (self.error_feedback and not self.whole_ulps and self.ranks_per_site == 1),
            "overlap is for sites of one rank, and for the method as it is: leave out ranks_per_site, "
            "error_feedback and whole_ulps",
        )
        self._check_with_loco()
        # Between two rounds each site has weights of its own; only right after a round do all sites hold the
        # same. A method without rounds takes its rollouts as often as the others do.
        for name in ("steps", "eval_every"):
            value, every = getattr(self, name), self.sync_every
            below = value - value % every
            choices = f"{below} or {below + every}" if below else f"{every}"
            require(
                value % every == 0,
                f"{name} must be a multiple of sync_every ({every}), so that the evaluated weights are "
                f"those of a finished round: got {value}, use {choices}",
            )

    def _check_with_loco(self) -> None:
        """The settings that loco checks itself, in loco's words."""
        own = {name: getattr(self, name) for name in ("sync_every", "nesterov", "overlap")}
        try:
            outer = told(self)
            own["overlap"] = None if "finds_outer_lr" in outer else self.overlap
            Settings(kind="PulseLoCo", **own, **outer)
            if self.method == "diloco":
                WireConfig.of_all(wire_of(self))
            else:
                WireConfig.of_entries(wire_of(self), self.exchange, gate=self.gate)
        except ValueError as error:
            raise ExperimentError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """A single run's."""

    save_every: int = 0  # rounds between checkpoints, in runs/<name>/checkpoints; 0: none
    resume: bool = False  # go on from them, if there are any; torchrun's restarts do so by themselves

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "save_every")
        require(
            not self.save_every or self.method != "sparseloco",
            "save_every needs a method that can be saved: SparseLoCo's residual is not kept",
        )
        _one_turn(self)
        require(
            bool(self.save_every) or not self.resume,
            "resume=true goes on from checkpoints, and save_every=0 writes none: say how often, save_every=1",
        )


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    nproc: int | None = 4
    seeds: int = 1
    runs: dict[str, Any] = field(default_factory=dict)  # what differs, by label; empty: the demo's

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "seeds")
        _one_turn(self)


def _one_turn(config: RunConfig) -> None:
    require(
        config.prompts.environment is None,
        "answers of several turns need workers: use prompts.environment with experiments.pipeline",
    )


def told(config: RunConfig) -> dict[str, Any]:
    """loco's settings of the outer step, the gate and the economies."""
    return outer_settings(**{name: getattr(config, name) for name in DECIDED}, gate=config.gate)


def wire_of(config: RunConfig) -> str:
    if config.wire is not None:
        return config.wire
    if config.method == "diloco":
        return "float32"
    # Trainers on one machine stand for sites that are far apart: the fewest bytes, not the fewest seconds.
    every_element = config.gate == "open" or config.exchange == "dense"
    return "auto" if every_element else "tight"


def check_world(config: RunConfig, world: int, *, launch_line: str) -> None:
    """Refuse a number of processes that the method cannot be run with."""
    if config.method == "single":
        require(world == 1, f"method=single is one trainer, and there are {world} processes: use nproc=1")
        return
    per_site = config.ranks_per_site
    require(
        world % per_site == 0,
        f"{world} processes cannot be split into sites of ranks_per_site={per_site}: "
        f"launch a multiple of {per_site}",
    )
    require(
        world >= 2 * per_site,
        f"at least two sites are needed to exchange anything, and {world} process"
        f"{' makes' if world == 1 else 'es make'} one: launch with `{launch_line}`",
    )
