"""Results for people and for programs: the table, the sentences below it, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments import machine
from experiments.config import RunConfig, to_yaml
from experiments.results import RATES, Result, ddp_of, diloco_of

_NONE = "-"


def folder_of(config: RunConfig, *, default: str) -> Path:
    folder = Path("runs") / (config.name or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def print_table(results: Sequence[Result]) -> None:
    """The comparison on stdout, with what a reader needs to know to read it right."""
    first = results[0]
    print(
        f"\n{first.ranks} ranks, {first.parameters:,} parameters, {first.steps} steps from the same warm "
        f"start: loss {first.first_loss:.4f} nats per byte on held-out text\n"
    )
    print(table(results))
    print()
    for sentence in sentences(results):
        print(sentence)


_COLUMNS = (  # (group, column)
    ("", "method"),
    ("loss", "final"),
    ("", "gain"),
    ("", "- DiLoCo's"),
    ("bytes sent per rank", "MB"),
    ("", "below DDP"),
    ("", "below DiLoCo"),
    ("rounds", "density"),
    ("", "exchange s"),
    ("projected hours at", "100 Mbit/s"),
    ("", "1 Gbit/s"),
    ("", "10 Gbit/s"),
)


def table(results: Sequence[Result]) -> str:
    """One row per run; numbers line up on the right."""
    rows = [[column for _, column in _COLUMNS]]
    step = typical_step_seconds(results)
    for result in results:
        ddp, diloco = ddp_of(results), diloco_of(result, results)
        compared = diloco if diloco is not result else None
        rows.append(
            [
                str(result.method),
                f"{result.final_loss:.4f}",
                f"{result.gain:.4f}",
                f"{result.final_loss - compared.final_loss:+.5f}" if compared else _NONE,
                f"{result.sent_bytes / 1e6:.2f}",
                f"{ddp.sent_bytes / result.sent_bytes:.1f}x" if ddp else _NONE,
                f"{diloco.sent_bytes / result.sent_bytes:.1f}x" if diloco else _NONE,
                f"{result.density:.1%}" if result.density is not None else _NONE,
                f"{result.exchange_seconds:.1f}",
                *(f"{result.projected_hours(rate, step_seconds=step):.4f}" for rate in RATES.values()),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    groups = ""
    for column, (group, _) in enumerate(_COLUMNS):
        if group:  # above its first column's figures
            start = sum(widths[:column]) + 2 * column
            groups = groups.ljust(start + widths[column] - len(rows[0][column])) + group
    return "\n".join([groups, lines[0], "─" * len(lines[0]), *lines[1:]])


def sentences(results: Sequence[Result]) -> list[str]:
    """How far PULSELoCo is from DiLoCo, how far the byte counts are from the kernel's, and the notes."""
    said = []
    for result in results:
        diloco = diloco_of(result, results)
        if result.method.name == "pulseloco" and diloco is not None:
            gap = result.final_loss - diloco.final_loss
            share = f", {result.gain / diloco.gain:.1%} of its gain" if diloco.gain > 0 else ""
            side = "above" if gap >= 0 else "below"
            said.append(
                f"PULSELoCo's loss ends {abs(gap):.5f} {side} DiLoCo's with {result.method.outer}{share}, "
                f"for {result.sent_bytes / diloco.sent_bytes:.1%} of its bytes."
            )
    said += [_agreement(results), ""]
    if any(result.density is not None for result in results):
        said.append(
            "density: share of the entries that a round sends, mean over the second half of the rounds; "
            "the first ones are\n  sparser, because the warm start's weights are BF16 values."
        )
    momentum = [r.method for r in results if r.method.name != "ddp" and r.method.outer_momentum > 0]
    if ddp_of(results) is not None and momentum:
        outer = momentum[0]
        reach = outer.outer_lr / (1 - outer.outer_momentum)
        said.append(
            f"DDP: {outer.outer} moves the weights up to α/(1-μ) = {reach:.0f} times as far as the inner "
            f"steps do; a lead over\n  DDP at the same inner rate is that reach, not better training."
        )
    said += [
        "exchange s: measured here, waiting for the other ranks (which share this machine's cores) included.",
        "hours: this run's compute as measured here plus its bytes at that rate; bandwidth only, no latency.",
    ]
    return said


def typical_step_seconds(results: Sequence[Result]) -> float:
    """One figure for all methods, whose inner steps are the same work: their differences are noise."""
    return median(result.step_seconds for result in results)


def write(folder: Path, config: RunConfig, results: Sequence[Result]) -> None:
    """config.yaml, results.json (everything) and results.csv (the table's figures)."""
    rows = [_row(result, results) for result in results]
    document = {
        "machine": machine.describe(),
        "projection": "steps x step_seconds + round_seconds + 8 x max(sent, received) / rate; no latency",
        "step_seconds": typical_step_seconds(results),
        "runs": [
            row | {"evaluations": _plain(result.evaluations), "rounds": _plain(result.rounds)}
            for row, result in zip(rows, results, strict=True)
        ],
    }
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _row(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    ddp, diloco = ddp_of(results), diloco_of(result, results)
    has_outer = result.method.name != "ddp"
    step = typical_step_seconds(results)
    return {
        "method": result.method.name,
        "outer_lr": result.method.outer_lr if has_outer else None,
        "outer_momentum": result.method.outer_momentum if has_outer else None,
        "ranks": result.ranks,
        "sites": result.sites,
        "parameters": result.parameters,
        "steps": result.steps,
        "first_loss": result.first_loss,
        "final_loss": result.final_loss,
        "gain": result.gain,
        "loss_minus_diloco": result.final_loss - diloco.final_loss if diloco else None,
        "sent_bytes": result.sent_bytes,
        "received_bytes": result.received_bytes,
        "bytes_source": result.bytes_source,
        "kernel_sent_bytes": result.kernel_sent_bytes,
        "accounted_bytes": result.accounted_bytes,
        "ddp_bytes_ratio": ddp.sent_bytes / result.sent_bytes if ddp else None,
        "diloco_bytes_ratio": diloco.sent_bytes / result.sent_bytes if diloco else None,
        "density": result.density,
        "one_step_density": result.one_step_density,
        "exchange_seconds": result.exchange_seconds,
        "round_seconds": result.round_seconds,
        "step_seconds": result.step_seconds,
        **{
            f"projected_hours_{rate.replace(' ', '_').replace('/', '_per_')}": result.projected_hours(
                bits, step_seconds=step
            )
            for rate, bits in RATES.items()
        },
    }


def _agreement(results: Sequence[Result]) -> str:
    """The bytes accounted for beside the kernel's own count of what left each process."""
    apart: dict[bool, list[float]] = {True: [], False: []}
    for result in results:
        # With several ranks per site the kernel sees the site's inner traffic too.
        if result.kernel_sent_bytes and result.sites == result.ranks:
            beyond = result.kernel_sent_bytes / result.accounted_bytes - 1
            apart[result.method.name == "ddp"].append(beyond)
    beside = {True: "the ring formula (DDP)", False: "what loco counted"}
    checks = [f"{beside[ddp]} by {_range(found)}" for ddp, found in apart.items() if found]
    if checks:
        return f"Bytes checked with the kernel's TCP counters, which exceed {' and '.join(checks)}."
    if any(result.bytes_source == "computed" for result in results):
        return "DDP's bytes are computed (ring all-reduce): TCP counters cannot tell them here."
    return "The bytes are loco's own count: TCP counters cannot check them here."


def _range(values: Sequence[float]) -> str:
    ends = sorted({f"{min(values):.2%}", f"{max(values):.2%}"})
    return " to ".join(ends)


def _plain(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(item) for item in items]
