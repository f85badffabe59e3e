"""Run several pipelines one after the other, for several settings and seeds, and compare them.

    python -m experiments.pipeline compare preset=pipeline_modes
    python -m experiments.pipeline compare 'runs={one: {workers: 1}, two: {workers: 2}}' seeds=3

Results go to runs/<name>/. Each run is stored when it ends, and the same command again runs only what is
missing or has other settings. Timings mean something only if nothing else runs on the machine.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.errors import ExperimentError
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.figures import share_of_sites
from experiments.reporting.charts import CYCLE, DASHES, LOOK, plt, saved
from experiments.reporting.markdown import markdown
from experiments.reporting.statistics import of_mean
from experiments.settings.checks import require
from experiments.settings.merging import derive
from experiments.settings.plan import choices, file_name, named

_IDLE = ("name", "address", "weights")  # settings that do not change the result


@dataclass(frozen=True, kw_only=True)
class PipelineCompareConfig(PipelineConfig):
    save_every: int = 0  # time is compared
    seeds: int = 1
    runs: dict[str, Any] = field(default_factory=dict)  # what differs, by label

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.seeds >= 1, f"seeds must be at least 1, got {self.seeds}")
        require(bool(self.runs), "a comparison needs runs, such as preset=pipeline_modes")


@dataclass(frozen=True)
class Labelled:
    label: str
    config: PipelineConfig

    def path(self, folder: Path) -> Path:
        return folder / "runs" / f"{file_name(self.label, self.config.seed)}.json"

    def stored(self, folder: Path) -> dict[str, Any] | None:
        """Its stored figures, if it was run with these settings."""
        path = self.path(folder)
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found is None or _deciding(found["config"]) != _deciding(dataclasses.asdict(self.config)):
            return None
        return found


def compare(config: PipelineCompareConfig, folder: Path) -> str:
    """Run what is missing -> the table, which is stored in the folder too."""
    runs = runs_of(config)
    missing = [one for one in runs if one.stored(folder) is None]
    if missing:
        _run(missing, config, folder)
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        figures = one.stored(folder)
        assert figures is not None
        groups.setdefault(one.label, []).append(figures)
    text = table(groups)
    (folder / "table.md").write_text(text, encoding="utf-8")
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "seed", *COLUMNS[1:]])
        for label, found in groups.items():
            writer.writerows([label, one["config"]["seed"], *row_of(one).values()] for one in found)
    draw(groups, folder / "compared.png")
    return text


def _run(missing: Sequence[Labelled], config: PipelineConfig, folder: Path) -> None:
    from experiments.pipeline import cluster  # Ray takes a second to import
    from experiments.pipeline.run import run

    with cluster.started(config, max(one.config.processes for one in missing)):
        for number, one in enumerate(missing, 1):
            title = f"[{number}/{len(missing)}] {one.label}, seed {one.config.seed}"
            print(title, file=sys.stderr, flush=True)
            found = run(one.config, folder / "latest")
            del found["events"]  # megabytes; those of the latest run stay beside its timeline
            one.path(folder).parent.mkdir(parents=True, exist_ok=True)
            one.path(folder).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def runs_of(config: PipelineCompareConfig) -> list[Labelled]:
    runs = []
    for seed, label, changes, where in choices(config.runs, config.seeds):
        single = derive(PipelineConfig, config, changes, where=where)
        label = named(label, single, where)
        runs.append(Labelled(label, dataclasses.replace(single, seed=single.seed + seed)))
    paths = [one.path(Path()) for one in runs]
    for path in paths:
        if paths.count(path) > 1:
            raise ExperimentError(f"two runs would be kept in one file, {path.name}: change a label")
    return runs


COLUMNS = ("label", "score", "s per step", "staleness", "tokens thrown away", "training", "MB of rounds")
_FORMS = ("{:.3f}", "{:.3f}", "{:.2f}", "{:.1f}%", "{:.0f}%", "{:.2f}")


def table(groups: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown; ± is the 95% interval over the seeds."""
    rows = []
    for label, runs in groups.items():
        figures = [list(map(float, row_of(one).values())) for one in runs]
        texts = [_text(values, form) for values, form in zip(zip(*figures, strict=True), _FORMS, strict=True)]
        rows.append([label, *texts])
    return markdown(COLUMNS, rows)


def row_of(found: dict[str, Any]) -> dict[str, float]:
    """A run's figures, by column."""
    figures = (
        found["evaluations"][-1]["score"],
        found["seconds_per_step"],
        found["mean_staleness"],
        100 * thrown_away(found),
        100 * share_of_sites(found, "training"),
        found["counts"]["round bytes"] / 1e6,
    )
    return dict(zip(COLUMNS[1:], figures, strict=True))


def thrown_away(found: dict[str, Any]) -> float:
    """The share of the sampled tokens that no trainer used."""
    counts = found["counts"]
    return 1 - sum(found["staleness"].values()) / max(1, counts["tokens"])


def _text(values: Sequence[float], form: str) -> str:
    found = of_mean(values)
    mean = form.format(found.mean)
    return mean if found.half is None else f"{mean} ± {form.format(found.half).rstrip('%')}"


def draw(groups: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Held-out score over time, and what a step takes: the mean of the seeds, and each of them."""
    with plt.rc_context(LOOK):
        figure, (scores, seconds) = plt.subplots(1, 2, figsize=(11, 0.4 * len(groups) + 4))
        for k, (label, found) in enumerate(groups.items()):
            color = CYCLE[k % len(CYCLE)]
            line = {"color": color, "linestyle": DASHES[k // len(CYCLE) % len(DASHES)], "marker": "."}
            by_step = [{point["step"]: point for point in one["evaluations"]} for one in found]
            steps = [step for step in by_step[0] if all(step in one for one in by_step)]
            begun = [one["begun"] for one in found]
            times = [[one[step]["time"] - t for one, t in zip(by_step, begun, strict=True)] for step in steps]
            values = [[one[step]["score"] for one in by_step] for step in steps]
            scores.plot(
                [fmean(moment) for moment in times], [fmean(at) for at in values], label=label, **line
            )
            values = [one["seconds_per_step"] for one in found]
            seconds.barh(k, sum(values) / len(values), color=color, alpha=0.35)
            seconds.plot(values, [k] * len(values), "o", color=color)
        metric = next(iter(groups.values()))[0]["metric"]
        scores.set(title="On held-out problems", xlabel="seconds", ylabel=metric)
        seconds.set(title="Seconds per step", xlim=(0, None))
        seconds.set_yticks(range(len(groups)), list(groups))
        seconds.invert_yaxis()
        seconds.grid(visible=False, axis="y")
        if len(groups) <= len(CYCLE):
            scores.legend(loc="lower right")
        saved(figure, path)


def _deciding(config: dict[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(config))
    return {key: value for key, value in plain.items() if key not in _IDLE}
