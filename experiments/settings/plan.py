"""Which runs a comparison is made of: labels, what differs in each, and seeds.

A preset's `runs` say by label what differs from the rest of the configuration:

    runs:
      DDP: {method: ddp}
      PULSELoCo: {method: pulseloco, seeds: 5}
      DiLoCo α {outer_lr}: {method: diloco, over: {outer_lr: [7, 14, 28]}}  # three runs

A label's {name} is the value of that setting.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.errors import ExperimentError
from experiments.settings.config import CompareConfig, RunConfig, TrainConfig, check_world
from experiments.settings.merging import derive

# The baselines, too, with the longest steps that they bear: see docs/frontier.md.
DEMO: dict[str, dict[str, Any]] = {
    "DDP, tuned": {"method": "ddp", "lr": 1e-4},
    "DiLoCo, tuned": {"method": "diloco", "outer_lr": 112.0, "outer_momentum": 0.0},
    "PULSELoCo, saving 0.25": {"saving": 0.25},
    "PULSELoCo, saving 1": {"saving": 1.0},
}

_GREEK = str.maketrans({"α": "alpha", "μ": "mu", "γ": "gamma"})  # for file names that any system takes


@dataclass(frozen=True)
class Run:
    label: str  # what a reader calls it
    config: TrainConfig

    @property
    def key(self) -> str:
        """The name of its file."""
        return file_name(self.label, self.config.seed)

    @property
    def ranks(self) -> int:
        assert self.config.nproc is not None
        return self.config.nproc

    def stored(self) -> dict[str, Any]:
        """The configuration as its file holds it."""
        return _plain(dataclasses.asdict(self.config))

    def same_as(self, stored: dict[str, Any]) -> bool:
        """Whether a stored configuration would train what this one does."""
        return not self.differing(stored)

    def differing(self, stored: dict[str, Any]) -> list[str]:
        """The settings that would train something else: "nproc: 4 then, 3 now". A setting that did not exist
        when the configuration was stored had its default, and one that no longer exists counts if it
        was set."""
        then = flat(_deciding(_over(_plain(dataclasses.asdict(TrainConfig())), stored)))
        now = flat(_deciding(self.stored()))
        return [
            f"{key}: {then.get(key)} then, {now.get(key)} now"
            for key in now | then
            if then.get(key) != now.get(key) and (key in now or then[key])
        ]


def file_name(label: str, seed: int) -> str:
    letters = label.lower().translate(_GREEK)
    return f"{re.sub(r'[^a-z0-9.]+', '-', letters).strip('-')}.seed{seed}"


def runs_of(config: CompareConfig) -> list[Run]:
    """Every run, one seed after the other, so that what is there after a while can be compared.

    Raises:
        ExperimentError: a run that can't be, named by its label.
    """
    runs = []
    for seed, label, changes, where in choices(config.runs or DEMO, config.seeds):
        single = _single(config, changes, where)
        runs.append(Run(named(label, single, where), dataclasses.replace(single, seed=single.seed + seed)))
    if twice := [key for key, count in Counter(run.key for run in runs).items() if count > 1]:
        raise ExperimentError(f"two runs would be kept in one file, {twice[0]}.json: change a label")
    return runs


def choices(runs: dict[str, Any], seeds: int) -> list[tuple[int, str, dict[str, Any], str]]:
    """What each run is made of, one seed after the other: the seed's number, the label with its {names}, the
    settings that differ, and where these are written.

    Args:
        runs: what differs, by label.
        seeds: of labels that do not say how many.
    """
    found: list[tuple[int, str, dict[str, Any], str]] = []
    for label, given in runs.items():
        where = f"runs.{label}"
        if not isinstance(given, dict):
            raise ExperimentError(f"{where} holds keys, write {where}.…=…")
        changes = dict(given)
        count = changes.pop("seeds", seeds)
        if not isinstance(count, int) or count < 1:
            raise ExperimentError(f"{where}: seeds must be a whole number of at least 1, got {count!r}")
        for chosen in _spread(label, changes, where):
            found += [(seed, label, chosen, where) for seed in range(count)]
    return sorted(found, key=lambda one: one[0])


def _spread(label: str, changes: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The settings for each choice of what `over` lists."""
    over = changes.pop("over", {})
    if not isinstance(over, dict) or not all(isinstance(values, list) and values for values in over.values()):
        raise ExperimentError(f"{where}: over lists values by setting, such as over: {{outer_lr: [7, 14]}}")
    if missing := [key for key, values in over.items() if len(values) > 1 and f"{{{key}}}" not in label]:
        raise ExperimentError(f"{where}: runs need names of their own, write {{{missing[0]}}} into the label")
    for values in product(*over.values()):
        chosen = changes
        for key, value in zip(over, values, strict=True):
            chosen = _over(chosen, nested(key, value))
        yield chosen


def named(label: str, config: RunConfig, where: str) -> str:
    """The label with values of settings in the places of their names: "lr {lr}" becomes "lr 1e-06"."""
    settings = flat(_plain(dataclasses.asdict(config)))

    def value(match: re.Match[str]) -> str:
        if match[1] not in settings:
            raise ExperimentError(f"{where}: {match[0]} in the label is no setting")
        value = settings[match[1]]
        return f"{value:g}" if isinstance(value, float) else str(value)

    return re.sub(r"{([^{}]*)}", value, label)


def _single(config: CompareConfig, changes: dict[str, Any], where: str) -> TrainConfig:
    single = derive(TrainConfig, config, changes, where=where)
    if single.method == "single" and "nproc" not in changes:
        single = dataclasses.replace(single, nproc=1)
    try:
        if single.nproc is None:
            raise ExperimentError("nproc must be at least 1, got None")
        check_world(single, single.nproc, launch_line=f"nproc={2 * single.ranks_per_site}")
    except ExperimentError as error:
        raise ExperimentError(f"{where}: {error}") from error
    return single


def _deciding(config: dict[str, Any]) -> dict[str, Any]:
    """Without what decides nothing: names, ports, patience, checkpoints."""
    idle = ("name", "port", "timeout_s", "save_every", "resume")
    return {key: value for key, value in config.items() if key not in idle}


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def nested(key: str, value: Any) -> dict[str, Any]:
    """`flat` undone, of one key."""
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Nested keys with dots, as a command line takes them."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": item for inner, item in flat(value).items()}
        else:
            found[key] = value
    return found


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = below | above
    return {k: _over(below[k], v) if isinstance(below.get(k), dict) else v for k, v in merged.items()}
