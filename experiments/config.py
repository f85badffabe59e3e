"""Configuration: frozen dataclasses, merged once at the edge from defaults, a YAML file and `key=value`.

    config=configs/two_sites.yaml steps=320 model.dim=192

OmegaConf does the merging and the type conversion; what leaves this module is plain dataclasses.
A key that does not exist is answered with the nearest one that does.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.errors import ExperimentError
from loco.exchange import Wire
from loco.settings import Settings

METHODS = ("ddp", "diloco", "pulseloco")
CONFIG_FOLDER = Path("configs")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    dim: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64  # bytes a prediction may look back on


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    stdlib: str | None = None  # folder of the Python standard library's source; None: this Python's
    adapt_on: tuple[str, ...] = ("pydoc_data",)  # its folders held out from the warm start
    eval_share: float = 0.2  # the last part of the held-out text, never trained on
    eval_sequences: int = 512  # fixed windows spread over it


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """The pre-training that stands in for a published checkpoint. Trained once, then kept."""

    steps: int = 1000
    batch: int = 16
    lr: float = 3e-3
    folder: str = "runs/warm_start"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a single run and a comparison share. The defaults are the demo."""

    name: str | None = None  # results go to runs/<name>/
    seed: int = 0
    device: str = "auto"  # auto, cpu or cuda
    nproc: int | None = None  # processes to launch; None: the launcher's business
    port: int | None = None  # the launcher's rendezvous port; None: any free one
    timeout_s: float = 300.0  # of one collective

    steps: int = 240
    batch: int = 4  # sequences per rank and step
    eval_every: int = 24  # steps
    lr: float = 3e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0  # norm of a site's gradient

    sync_every: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    gate: str = "bf16"
    gate_gain: float = 1.0
    gate_margin: float = 0.0  # of a BF16 ulp
    value_steps: int | None = None  # to a BF16 ulp; None: exact values
    wire: str | None = None  # PULSELoCo's; None: tight, as trainers here stand for far sites
    exchange: str = "auto"
    ranks_per_site: int = 1

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    method: str = "pulseloco"


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    nproc: int | None = 4
    methods: tuple[str, ...] = METHODS
    plain_averaging: bool = True  # run diloco and pulseloco with outer_lr 1, outer_momentum 0 too


@dataclass(frozen=True, kw_only=True)
class RecordConfig(RunConfig):
    nproc: int | None = 4
    steps: int = 160  # the round after the last of them is recorded
    excerpt: int = 131072  # elements of it that are kept with the code
    excerpts: str = "experiments/results/recorded"  # the folder for that


C = TypeVar("C", bound=RunConfig)


def load(kind: type[C], arguments: list[str]) -> C:
    """The configuration that `arguments` ask for, checked. Raises `ExperimentError`."""
    files = [argument for argument in arguments if argument.startswith("config=")]
    pairs = [argument for argument in arguments if argument not in files]
    if len(files) > 1:
        raise ExperimentError(f"one config file at a time, got {' and '.join(files)}")
    for pair in pairs:
        if "=" not in pair or pair.startswith("-"):
            raise ExperimentError(f"arguments are written key=value, got '{pair}'")
    layers = [_read_yaml(file.removeprefix("config=")) for file in files]
    try:
        layers.append(OmegaConf.from_dotlist(pairs))
        for layer in layers:
            _check_keys(OmegaConf.to_container(layer), kind)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), *layers))
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ExperimentError(where + str(error.msg or error).splitlines()[0]) from error
    assert isinstance(config, kind)
    check(config)
    return config


def to_yaml(config: RunConfig) -> str:
    """`config` in full, in the form that `config=` reads."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def check(config: RunConfig) -> None:
    """Refuse what cannot work, before anything is launched."""
    for name in ("steps", "batch", "eval_every", "sync_every", "ranks_per_site"):
        _require(getattr(config, name) >= 1, f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("lr", "clip", "timeout_s"):
        _require(getattr(config, name) > 0, f"{name} must be > 0, got {getattr(config, name)}")
    if isinstance(config, RecordConfig):
        _require(config.excerpt >= 1, f"excerpt must be at least 1, got {config.excerpt}")
        _require(
            config.ranks_per_site == 1,
            f"only sites of one rank can be recorded, got ranks_per_site={config.ranks_per_site}",
        )
        _require(config.gate != "open", "an open gate sends everything: there are no entries to record")
    if config.nproc is not None:
        _require(config.nproc >= 1, f"nproc must be at least 1, got {config.nproc}")
    if config.port is not None:
        _require(0 < config.port < 65536, f"port must be between 1 and 65535, got {config.port}")
    model = config.model
    _require(
        model.dim % model.heads == 0,
        f"model.dim must be a multiple of model.heads, got {model.dim} and {model.heads}",
    )
    _require(
        config.device in ("auto", "cpu", "cuda"),
        f"device must be auto, cpu or cuda, got '{config.device}'",
    )
    methods = (config.method,) if isinstance(config, TrainConfig) else ("pulseloco",)
    methods = config.methods if isinstance(config, CompareConfig) else methods
    _require(len(methods) > 0, "methods must name at least one method")
    for method in methods:
        _require(method in METHODS, f"unknown method '{method}'{_nearest(method, METHODS)}")
    try:
        Settings(
            kind="PulseLoCo",
            sync_every=config.sync_every,
            outer_lr=config.outer_lr,
            outer_momentum=config.outer_momentum,
            nesterov=config.nesterov,
            gate=config.gate,
            gate_gain=config.gate_gain,
            gate_margin=config.gate_margin,
            value_steps=config.value_steps,
        )
        Wire.of_entries(wire_of(config), config.exchange, gate=config.gate)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    if set(methods) <= {"ddp"}:
        return  # has no rounds that the steps could miss
    # Weights between two rounds belong to one site; only right after a round are they everyone's.
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
    every_element = config.gate == "open" or config.exchange == "dense"
    return config.wire or ("auto" if every_element else "tight")


def check_world(config: RunConfig, world: int, *, launch_line: str) -> None:
    """Refuse a number of processes that the methods cannot be run with."""
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


def _read_yaml(name: str) -> Any:
    path = Path(name)
    if not path.is_file():
        path = CONFIG_FOLDER / f"{name}.yaml"  # the short form: config=two_sites
    if not path.is_file():
        known = sorted(file.stem for file in CONFIG_FOLDER.glob("*.yaml"))
        raise ExperimentError(f"no config file '{name}'{_nearest(Path(name).stem, known)}")
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
