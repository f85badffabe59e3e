"""Configuration: frozen dataclasses, merged once at the edge from defaults, a YAML file and `key=value`.

    preset=two_sites steps=320 transformer.dim=192

Several presets are merged in their order.

OmegaConf does the merging and the type conversion; what leaves this module is plain dataclasses.
A key that does not exist is answered with the nearest one that does.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.errors import ExperimentError
from loco.config import Settings, matching_gain
from loco.exchange.wire_config import WireConfig

TITLES = {
    "single": "one trainer",
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "pulseloco": "PULSELoCo",
    "sparseloco": "SparseLoCo",
}
METHODS = tuple(TITLES)
TASKS = ("arithmetic", "text")
MODELS = ("transformer", "hf")
PARAMETERS = ("float32", "bfloat16")
PRESETS = Path("configs")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    dim: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64  # bytes a prediction may look back on


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    largest: int = 100  # operands lie below
    held_out: int = 2048  # problems that are never trained on
    slips: float = 0.5  # share of the warm start's answers in which a carry is forgotten
    prompts: int = 8  # per trainer and step
    group: int = 8  # answers to each prompt
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    stdlib: str | None = None  # folder of the Python standard library's source; None: this Python's
    adapt_on: tuple[str, ...] = ("pydoc_data",)  # its folders held out from the warm start
    eval_share: float = 0.2  # the last part of the held-out text, never trained on
    eval_sequences: int = 512  # fixed windows spread over it
    batch: int = 4  # sequences per trainer and step


@dataclass(frozen=True, kw_only=True)
class SparseLoCoConfig:
    """See `experiments.sparseloco.SparseLoCo`; outer_lr is the shared one."""

    k: int = 64  # of a chunk of 4096
    decay: float = 0.95
    average: str = "sites"  # or senders
    quantiser: str = "uniform"  # or signed


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """The training that stands in for a published checkpoint. Done once, then kept."""

    steps: int = 1500  # 0: the model starts from chance
    batch: int = 192
    lr: float = 3e-3
    decay: bool = True  # to zero, along half a cosine
    folder: str = "runs/warm_start"


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
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0  # norm of a site's gradient

    sync_every: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    gate: str = "bf16"
    gate_gain: float | None = None  # None: loco's choice, by outer_lr and outer_momentum
    late_gate_gain: float | None = None  # in the last quarter of the rounds
    gate_margin: float = 0.0  # of a BF16 ulp
    value_steps: int | None = None  # to a BF16 ulp; None: exact values
    error_feedback: bool = True  # False: what a round withholds is forgotten
    momentum_before_gate: bool = False  # each site runs the outer optimizer itself, ahead of the gate
    whole_ulps: bool = False  # differences of BF16 casts are sent instead of updates
    wire: str | None = None  # None: PULSELoCo's tight, DiLoCo's float32
    exchange: str = "auto"
    ranks_per_site: int = 1

    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    text: TextConfig = field(default_factory=TextConfig)
    sparseloco: SparseLoCoConfig = field(default_factory=SparseLoCoConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """A single run's."""

    save_every: int = 0  # rounds between checkpoints, in runs/<name>/checkpoints; 0: none
    resume: bool = False  # go on from them, if there are any; torchrun's restarts do so by themselves


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    nproc: int | None = 4
    seeds: int = 1
    runs: dict[str, Any] = field(default_factory=dict)  # what differs, by label; empty: the demo's


@dataclass(frozen=True, kw_only=True)
class RecordConfig(RunConfig):
    nproc: int | None = 4
    steps: int = 160  # the round after the last of them is recorded
    excerpt: int = 131072  # elements of it that are kept with the code
    excerpts: str = "experiments/results/recorded"  # the folder for that


C = TypeVar("C", bound=RunConfig)


def load(kind: type[C], arguments: list[str]) -> C:
    """The configuration that `arguments` ask for, checked. Raises `ExperimentError`."""
    presets = [argument for argument in arguments if argument.startswith("preset=")]
    pairs = [argument for argument in arguments if argument not in presets]
    for pair in pairs:
        if "=" not in pair or pair.startswith("-"):
            raise ExperimentError(f"arguments are written key=value, got '{pair}'")
    layers = [_read_yaml(preset.removeprefix("preset=")) for preset in presets]
    with _sentences():
        layers.append(OmegaConf.from_dotlist(pairs))
        config = _merge(kind, layers)
    check(config)
    return config


def derive(config: RunConfig, changes: Any, *, where: str) -> TrainConfig:
    """`config` as a single run's, with `changes`; `where` they were written. Not checked yet."""
    shared = OmegaConf.structured(config)
    names = [item.name for item in dataclasses.fields(TrainConfig)]
    with _sentences(where):
        _require(isinstance(changes, dict), f"{where} holds keys, write {where}.…=…")
        _check_keys(changes, TrainConfig, f"{where}.")
        return resolved(
            _merge(TrainConfig, [OmegaConf.masked_copy(shared, names), OmegaConf.create(changes)])
        )


def resolved(config: C) -> C:
    """With what loco would choose said in numbers, for the record."""
    if config.gate_gain is not None:
        return config
    return dataclasses.replace(config, gate_gain=matching_gain(config.outer_lr, config.outer_momentum))


def to_yaml(config: RunConfig) -> str:
    """`config` in full, in the form that `preset=` reads."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def check(config: RunConfig) -> None:
    """Refuse what cannot work, before anything is launched."""
    for name in ("steps", "eval_every", "sync_every", "ranks_per_site"):
        _require(getattr(config, name) >= 1, f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("lr", "clip", "timeout_s"):
        _require(getattr(config, name) > 0, f"{name} must be > 0, got {getattr(config, name)}")
    for part, name in (
        ("arithmetic", "largest"),
        ("arithmetic", "prompts"),
        ("arithmetic", "group"),
        ("arithmetic", "held_out"),
        ("text", "batch"),
        ("warm_start", "batch"),
    ):
        value = getattr(getattr(config, part), name)
        _require(value >= 1, f"{part}.{name} must be at least 1, got {value}")
    for name, value in (
        ("seed", config.seed),
        ("warmup", config.warmup),
        ("warm_start.steps", config.warm_start.steps),
    ):
        _require(value >= 0, f"{name} must be at least 0, got {value}")
    for name, value, known in (
        ("method", config.method, METHODS),
        ("task", config.task, TASKS),
        ("model", config.model, MODELS),
        ("parameters", config.parameters, PARAMETERS),
        ("sparseloco.average", config.sparseloco.average, ("sites", "senders")),
        ("sparseloco.quantiser", config.sparseloco.quantiser, ("uniform", "signed")),
    ):
        _require(value in known, f"unknown {name} '{value}'{_nearest(value, known)}")
    _require(
        (config.path is not None) == (config.model == "hf"),
        "model=hf and path=<folder of the model> belong together",
    )
    _require(
        config.gate != "open" or (config.error_feedback and not config.whole_ulps),
        "an open gate withholds nothing: error_feedback=false and whole_ulps=true need another gate",
    )
    if config.task == "arithmetic":
        largest, digits = config.arithmetic.largest, len(str(config.arithmetic.largest - 1))
        problems = largest * (2 * largest + min(largest, 10))
        _require(
            config.arithmetic.held_out < problems,
            f"arithmetic.held_out must leave some of {problems} problems, got {config.arithmetic.held_out}",
        )
        _require(
            config.model != "transformer" or config.transformer.context >= 3 * digits + 3,
            f"transformer.context must be at least {3 * digits + 3} for a prompt and its answer, "
            f"got {config.transformer.context}",
        )
    if config.method == "sparseloco":
        _require(
            config.ranks_per_site == 1,
            f"SparseLoCo here has sites of one rank, got ranks_per_site={config.ranks_per_site}",
        )
    if config.model == "hf":
        _require(config.task == "arithmetic", "the text task reads bytes: model=hf needs task=arithmetic")
    if isinstance(config, RecordConfig):
        _require(config.excerpt >= 1, f"excerpt must be at least 1, got {config.excerpt}")
        _require(
            config.ranks_per_site == 1,
            f"only sites of one rank can be recorded, got ranks_per_site={config.ranks_per_site}",
        )
        _require(config.gate != "open", "an open gate sends everything: there are no entries to record")
        _require(config.method == "pulseloco", f"PULSELoCo is what is recorded, got method={config.method}")
    if isinstance(config, TrainConfig):
        _require(config.save_every >= 0, f"save_every must be at least 0, got {config.save_every}")
        _require(
            not config.save_every or (config.method != "sparseloco" and not config.momentum_before_gate),
            "save_every needs a method that can be saved: SparseLoCo's residual and the momentum before the "
            "gate are not kept",
        )
        _require(
            bool(config.save_every) or not config.resume,
            "resume=true goes on from checkpoints, and save_every=0 writes none: say how often, save_every=1",
        )
    if isinstance(config, CompareConfig):
        _require(config.seeds >= 1, f"seeds must be at least 1, got {config.seeds}")
    if config.nproc is not None:
        _require(config.nproc >= 1, f"nproc must be at least 1, got {config.nproc}")
    if config.port is not None:
        _require(0 < config.port < 65536, f"port must be between 1 and 65535, got {config.port}")
    shape = config.transformer
    _require(
        shape.dim % shape.heads == 0,
        f"transformer.dim must be a multiple of transformer.heads, got {shape.dim} and {shape.heads}",
    )
    _require(
        config.device in ("auto", "cpu", "cuda"),
        f"device must be auto, cpu or cuda, got '{config.device}'",
    )
    try:
        Settings(
            kind="PulseLoCo",
            sync_every=config.sync_every,
            outer_lr=config.outer_lr,
            outer_momentum=config.outer_momentum,
            nesterov=config.nesterov,
            gate=config.gate,
            gate_gain=1.0 if config.gate_gain is None else config.gate_gain,
            gate_margin=config.gate_margin,
            value_steps=config.value_steps,
        )
        if config.method == "diloco":
            WireConfig.of_all(wire_of(config))
        else:
            WireConfig.of_entries(wire_of(config), config.exchange, gate=config.gate)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    # Weights between two rounds belong to one site; only right after a round are they everyone's. And what
    # has no rounds takes its rollouts as often as the others do.
    for name in ("steps", "eval_every"):
        value, every = getattr(config, name), config.sync_every
        below = value - value % every
        choices = f"{below} or {below + every}" if below else f"{every}"
        _require(
            value % every == 0,
            f"{name} must be a multiple of sync_every ({every}), so that the evaluated weights are "
            f"those of a finished round: got {value}, use {choices}",
        )


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
        _require(world == 1, f"method=single is one trainer, and there are {world} processes: use nproc=1")
        return
    per_site = config.ranks_per_site
    _require(
        world % per_site == 0,
        f"{world} processes cannot be split into sites of ranks_per_site={per_site}: "
        f"launch a multiple of {per_site}",
    )
    _require(
        world >= 2 * per_site,
        f"at least two sites are needed to exchange anything, and {world} process"
        f"{' makes' if world == 1 else 'es make'} one: launch with `{launch_line}`",
    )


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ExperimentError(sentence)


@contextmanager
def _sentences(where: str = "") -> Iterator[None]:
    """OmegaConf's errors in a sentence."""
    try:
        yield
    except OmegaConfBaseException as error:
        key = ".".join(filter(None, [where, error.full_key]))
        raise ExperimentError(
            (f"{key}: " if key else "") + str(error.msg or error).splitlines()[0]
        ) from error


def _merge(kind: type[C], layers: list[Any]) -> C:
    for layer in layers:
        _check_keys(OmegaConf.to_container(layer), kind)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), *layers))
    assert isinstance(config, kind)
    return config


def _read_yaml(name: str) -> Any:
    path = Path(name)
    if not path.is_file():
        path = PRESETS / f"{name}.yaml"  # the short form: preset=two_sites
    if not path.is_file():
        _require(not Path(name).suffix, f"there is no file {name}")
        known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
        raise ExperimentError(f"no preset '{name}'{_nearest(Path(name).stem, known)}")
    try:
        layer = OmegaConf.load(path)
        _require(isinstance(OmegaConf.to_container(layer), dict), f"{path} is not a list of keys")
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ExperimentError(f"{path}{line} is not valid YAML") from error
    return layer


def _check_keys(given: Any, kind: type, prefix: str = "") -> None:
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key, value in given.items():
        if key not in fields:
            known = [prefix + name for name in fields]
            raise ExperimentError(f"unknown key '{prefix}{key}'{_nearest(f'{prefix}{key}', known)}")
        nested = fields[key].default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            _require(isinstance(value, dict), f"{prefix}{key} holds keys, write {prefix}{key}.…=…")
            _check_keys(value, nested, f"{prefix}{key}.")


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}"
