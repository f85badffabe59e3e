"""Results for people and for programs: a table, plots, a page to send on, JSON and CSV.

    python -m experiments.report runs/demo                      anew from the runs that are stored there
    python -m experiments.report runs/a runs/b out=runs/both    several comparisons as one

A folder holds runs/*.json, or else a results.json. Its config.yaml, where there is one, says which of the
runs count, and in which order.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from experiments.reporting.page import page, summary_line
from experiments.reporting.plots import draw_all
from experiments.reporting.results import Result, fields_of, of_fields, read
from experiments.reporting.summary import Comparison, shared
from experiments.reporting.table import as_text, figures
from experiments.settings.config import METHODS, CompareConfig, RunConfig, TrainConfig
from experiments.settings.merging import load, to_yaml
from experiments.settings.plan import runs_of
from experiments.training.session import results_of

_NOT_TRAINED_WITH = ("name", "seed", "port", "timeout_s")  # of a configuration: may differ within a label
_SHARED = ("config", "machine")  # in results.json: what all runs have in common stands once


def write_all(folder: Path, config: RunConfig, results: Sequence[Result]) -> None:
    """What a comparison or a single run ends with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    _write(folder, results, commands=[_command(folder, config)])


def rebuild(folders: Sequence[Path], out: Path) -> None:
    """Everything anew from what `folders` hold, into `out`.

    Raises:
        ExperimentError: a folder that holds no runs, or runs that can't be shown together.
    """
    found, commands = [], []
    for folder in folders:
        config = _config_of(folder)
        found.append((folder.name, stored_in(folder, config)))
        if config is not None:
            commands.append(_command(folder, config))
    out.mkdir(parents=True, exist_ok=True)
    _write(out, merged(found), commands=commands)


def stored_in(folder: Path, config: RunConfig | None) -> list[Result]:
    """The runs that a folder holds: as its configuration plans them, or else all, by method and name."""
    if isinstance(config, CompareConfig) and (planned := results_of(runs_of(config), folder)):
        return planned
    results = []
    for path in sorted((folder / "runs").glob("*.json")):
        try:
            results.append(read(path))
        except (OSError, ValueError, TypeError, KeyError):
            print(f"{path} is not a run of this version: left out", file=sys.stderr)
    if not results and (folder / "results.json").is_file():
        try:
            return read_document(folder / "results.json")
        except (ValueError, TypeError, KeyError):
            raise ExperimentError(f"{folder}/results.json is not of this version") from None
    if not results:
        raise ExperimentError(f"{folder} holds no finished runs: neither runs/*.json nor results.json")
    return sorted(results, key=lambda result: METHODS.index(result.method))


def merged(found: Sequence[tuple[str, Sequence[Result]]]) -> list[Result]:
    """Several folders' runs as one comparison, by (name of the folder, its runs).

    Runs of the same label and configuration are one label's, a seed's first run counting; a label that stands
    for another configuration elsewhere gets its folder's name.
    """
    everything: dict[str, dict[int, Result]] = {}
    for name, results in found:
        for result in results:
            label = result.label
            if label in everything and _deciding(next(iter(everything[label].values()))) != _deciding(result):
                label = f"{label} ({name})"
            everything.setdefault(label, {}).setdefault(result.seed, replace(result, label=label))
    return [result for seeds in everything.values() for result in seeds.values()]


def write_document(comparison: Comparison, path: Path) -> None:
    """results.json: every run, small enough to keep with the code."""
    runs = [fields_of(result) for result in comparison.results]
    common = {name: shared([run[name] for run in runs]) for name in _SHARED}
    for run in runs:
        for name in _SHARED:
            run[name] = {k: v for k, v in run[name].items() if k not in common[name]}
    document = {
        **common,
        "reference": comparison.reference.label if comparison.reference is not None else None,
        "projection": "steps x step + rollout + round seconds, + 8 x max(sent, received) / rate",
        "step_seconds": comparison.step_seconds,
    }
    # A line for each run: a repository shows which of them changed.
    head = json.dumps(document, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(run, separators=(",", ":")) for run in runs)
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read_document(path: Path) -> list[Result]:
    """The runs in a file that `write_document` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return [
        of_fields(run | {name: document[name] | run[name] for name in _SHARED}) for run in document["runs"]
    ]


def _write(folder: Path, results: Sequence[Result], *, commands: Sequence[str]) -> None:
    comparison = Comparison.of(results)
    write_document(comparison, folder / "results.json")
    rows = [figures(row) for row in comparison.rows]
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plots = draw_all(comparison, folder)
    text = page(comparison, plots, name=folder.name, commands=commands)
    (folder / "report.html").write_text(text, encoding="utf-8")

    print(f"\n{summary_line(comparison)}\n")
    print(as_text(comparison, width=shutil.get_terminal_size((120, 40)).columns))
    names = ", ".join(["results.json", "results.csv", *(plot.path.name for plot in plots)])
    print(f"\n{folder}/report.html has more columns, and says what they mean; beside it are {names}")


def _command(folder: Path, config: RunConfig) -> str:
    module = "compare" if isinstance(config, CompareConfig) else "train"
    return f"python -m experiments.{module} preset={folder}/config.yaml"


def _config_of(folder: Path) -> RunConfig | None:
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    for kind in (TrainConfig, CompareConfig):  # a comparison has keys that a single run does not
        try:
            return load(kind, [f"preset={path}"])
        except ExperimentError:
            continue
    print(f"{path} is not a configuration of this version: all stored runs are shown", file=sys.stderr)
    return None


def _deciding(result: Result) -> dict[str, Any]:
    return {key: value for key, value in result.config.items() if key not in _NOT_TRAINED_WITH}


def main(arguments: Sequence[str]) -> int:
    outs = [argument.removeprefix("out=") for argument in arguments if argument.startswith("out=")]
    folders = [Path(argument) for argument in arguments if not argument.startswith("out=")]
    try:
        if not folders or any(argument in ("-h", "--help") for argument in arguments):
            print(__doc__)
            return 0 if arguments else 1
        if len(folders) > 1 and not outs:
            raise ExperimentError("several folders are shown together in a folder of their own: add out=…")
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise ExperimentError(f"there is no folder {missing[0]}")
        rebuild(folders, Path(outs[-1]) if outs else folders[0])
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
