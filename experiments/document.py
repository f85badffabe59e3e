"""results.json: what every run of a comparison measured, in one file small enough to keep with the code.

What all runs share of their configuration and machine stands once; rounds are columns, to six digits.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from experiments.results import Evaluation, Result, Round
from experiments.summary import Comparison, shared
from experiments.table import figures

_SHARED = ("config", "machine")


def write_document(comparison: Comparison, path: Path) -> None:
    runs = [dataclasses.asdict(result) for result in comparison.results]
    common = {name: shared([run[name] for run in runs]) for name in _SHARED}
    for run in runs:
        for name in _SHARED:
            run[name] = {k: v for k, v in run[name].items() if k not in common[name]}
        run["rounds"] = _columns(run["rounds"])
        run["evaluations"] = [[e["step"], e["scores"], _short(e["sent_bytes"])] for e in run["evaluations"]]
        run["rewards"] = [_short(reward) for reward in run["rewards"]]
    document = {
        **common,
        "reference": comparison.reference.label if comparison.reference is not None else None,
        "projection": "steps x step + rollout + round seconds, + 8 x max(sent, received) / rate",
        "step_seconds": comparison.step_seconds,
        "labels": [figures(row) for row in comparison.rows],
    }
    # A line for each run: a repository shows which of them changed.
    head = json.dumps(document, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(run, separators=(",", ":")) for run in runs)
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read_document(path: Path) -> list[Result]:
    """The runs in a file that `write_document` wrote."""
    document = json.loads(path.read_text(encoding="utf-8"))
    found = []
    for run in document["runs"]:
        for name in _SHARED:
            run[name] = document[name] | run[name]
        columns = run["rounds"]
        run["rounds"] = tuple(
            Round(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)
        )
        run["evaluations"] = tuple(
            Evaluation(step=step, scores=scores, sent_bytes=sent) for step, scores, sent in run["evaluations"]
        )
        run["rewards"] = tuple(run["rewards"])
        found.append(Result(**run))
    return found


def _columns(rounds: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = list(rounds[0]) if rounds else []
    return {name: [_short(one[name]) for one in rounds] for name in names}


def _short(value: Any) -> Any:
    """Bytes are whole as long as they have no more than nine digits."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.9g}") if abs(value) >= 1e3 else float(f"{value:.6g}")
    return int(short) if short.is_integer() else short
