"""A configuration from defaults, YAML files and `key=value`, merged once, at the edge:

    preset=two_sites steps=320 transformer.dim=192

Several presets are merged in their order. OmegaConf merges and converts types; what leaves this module is
plain dataclasses. An unknown key is answered with the nearest one that exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError, missing_extra
from experiments.settings.checks import nearest, require
from experiments.settings.config import RunConfig
from experiments.settings.rounds import C, resolved

try:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ImportError as error:
    raise missing_extra(error) from None

PRESETS = Path("configs")


def load(kind: type[C], arguments: list[str]) -> C:
    """The configuration that `arguments` ask for. Raises `ExperimentError`."""
    presets = [argument for argument in arguments if argument.startswith("preset=")]
    pairs = [argument for argument in arguments if argument not in presets]
    for pair in pairs:
        if "=" not in pair or pair.startswith("-"):
            raise ExperimentError(f"arguments are written key=value, got '{pair}'")
    layers = [_read_yaml(preset.removeprefix("preset=")) for preset in presets]
    with _sentences():
        return _merge(kind, [*layers, OmegaConf.from_dotlist(pairs)])


def derive(kind: type[C], config: RunConfig, changes: Any, *, where: str) -> C:
    """`config` as a single run's, with `changes`; `where` they were written."""
    names = [item.name for item in dataclasses.fields(kind)]
    shared = OmegaConf.masked_copy(OmegaConf.structured(config), names)
    _check_keys(changes, kind, f"{where}.")
    with _sentences(where):
        try:
            return resolved(_merge(kind, [shared, OmegaConf.create(changes)]))
        except ExperimentError as error:
            raise ExperimentError(f"{where}: {error}") from error


def to_yaml(config: RunConfig) -> str:
    """`config` in full, in the form that `preset=` reads."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


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
        require(not Path(name).suffix, f"there is no file {name}")
        known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
        raise ExperimentError(f"no preset '{name}'{nearest(Path(name).stem, known)}")
    try:
        layer = OmegaConf.load(path)
        require(isinstance(OmegaConf.to_container(layer), dict), f"{path} is not a list of keys")
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
            raise ExperimentError(f"unknown key '{prefix}{key}'{nearest(f'{prefix}{key}', known)}")
        nested = fields[key].default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            require(isinstance(value, dict), f"{prefix}{key} holds keys, write {prefix}{key}.…=…")
            _check_keys(value, nested, f"{prefix}{key}.")
