"""The columns of a comparison, for a terminal and for a page; `figures` is a row in full, for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.reporting.results import RATES
from experiments.reporting.statistics import Interval
from experiments.reporting.summary import INTERVALS, SECOND, Comparison, Row

NONE = "–"
TABLES = ("Scores", "Bytes and hours", "Rounds")  # of the page: all columns side by side are too wide for it
# Shown below the page's tables, where a title does not say it.
MEANINGS = {
    "gain": "Improvement of the score over the warm start, in points or nats per byte.",
    "− reference": "The score minus the reference's, in points or nats per byte.",
    "gain kept": "Share of the reference's gain. None is shown where that gain can't be told from noise: it "
    "must exceed the 95% interval over the seeds, or that of the held-out set's size (of a loss: 0.1%).",
    f"gain kept, {SECOND}": "The same by the probability that an answer sampled at temperature 1 is right: "
    "it is computed exactly, and so has less noise than a count of right answers.",
    "reference": "The DiLoCo it is compared with.",
    "differs in": "Conditions in which it differs from its reference: compare with care.",
    "MB sent": "Per rank, for the whole run.",
    "below DDP": "DDP's sent bytes ÷ this label's.",
    "below DiLoCo": "The reference's sent bytes ÷ this label's, headers and sums for other sites included.",
    "payload below FP32": "4 bytes ÷ the bytes per parameter of all of a site's coded entries in a round.",
    "kernel's count": "The kernel's TCP bytes beside loco's count (for DDP: beside the ring formula); gloo's "
    "framing is more. DDP's MB are the kernel's where it counts, and else the formula's.",
    f"h at {next(iter(RATES))}": "Hours: compute as measured here plus the bytes at that rate; no latency, "
    "nothing overlapped.",
    "density": "Share of the entries that a site sends. Figures of rounds are means over the second half of "
    "them: the first ones are sparser, because the warm start's weights are BF16 values.",
    "union density": "Share of entries that at least one site sends.",
    "casts changed": "Share of the weights whose BF16 cast a round's inner steps change.",
    "by one step": "Share of the weights whose BF16 cast one late inner step changes.",
    "residual norm": "L2 norm of what is withheld after a round, root mean square over the sites.",
    "age of withheld": "Rounds since the withheld was last sent, weighted by its size.",
}


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Row], str]
    table: int = 0  # which of TABLES it is in
    terminal: int | None = None  # the higher, the sooner a narrow terminal drops it; None: only on the page


def columns_of(comparison: Comparison) -> list[Column]:
    """Those in which at least one row has a value."""
    percent = comparison.one.metric == "pass@1"
    several = len({row.reference for row in comparison.rows}) > 1

    def difference(found: Interval) -> str:
        if percent:
            return _with_half(found.times(100), "{:+.1f}", "{:.1f}")
        return _with_half(found, "{:+.4f}", "{:.4f}")

    def optional(form: Callable[[Any], str], name: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            value = getattr(row, name)
            return NONE if value is None else form(value)

        return text

    def hours(rate: str) -> Callable[[Row], str]:
        return lambda r: f"{r.hours[rate]:,.{4 if r.hours[rate] < 1 else 2}f}"

    score, first, *other_rates = "{:.1%}" if percent else "{:.4f}", *RATES
    columns = [
        Column("label", lambda r: r.label, terminal=0),
        Column("seeds", lambda r: str(len(r.seeds)), terminal=8 if len(comparison.seeds) > 1 else None),
        Column(comparison.one.metric, lambda r: _with_half(r.final, score), terminal=0),
        Column("gain", lambda r: difference(r.gain), terminal=4),
        Column("− reference", optional(difference, "minus"), terminal=5),
        Column("gain kept", optional(_share, "share"), terminal=2),
        Column(f"gain kept, {SECOND}", optional(_share, "share_second"), terminal=2),
        Column("reference", lambda r: (r.reference if several else None) or NONE),
        Column("differs in", lambda r: ", ".join(r.differs_in) or NONE),
        Column("MB sent", lambda r: f"{r.sent_bytes / 1e6:,.2f}", 1, 1),
        Column("below DDP", optional("{:.1f}x".format, "below_ddp"), 1, 3),
        Column("below DiLoCo", optional("{:.1f}x".format, "below_diloco"), 1),
        Column("payload below FP32", optional("{:.1f}x".format, "below_fp32"), 1, 2),
        Column("kernel's count", optional("{:+.2%}".format, "kernel_beyond"), 1),
        Column(f"h at {first}", hours(first), 1, 7),
        *(Column(f"h at {rate}", hours(rate), 1) for rate in other_rates),
        Column("density", optional(_percent, "density"), 2, 4),
        Column("union density", optional(_percent, "union_density"), 2),
        Column("casts changed", optional(_percent, "visible"), 2),
        Column("by one step", optional(_percent, "one_step_density"), 2),
        Column("residual norm", lambda r: f"{r.residual_norm:.2g}" if r.residual_norm else NONE, 2),
        Column("age of withheld", optional("{:.1f}".format, "age"), 2),
    ]
    return [c for c in columns if any(c.text(row) != NONE for row in comparison.rows)]


def as_text(comparison: Comparison, *, width: int) -> str:
    """One line per label, with as many columns as fit into `width`; numbers line up on the right."""
    columns = [column for column in columns_of(comparison) if column.terminal is not None]
    while True:
        text = _lines(columns, comparison.rows)
        last = max(columns, key=lambda column: column.terminal or 0)
        if len(text[1]) <= width or not last.terminal:
            return "\n".join(text)
        columns.remove(last)


def figures(row: Row) -> dict[str, Any]:
    """A row of the CSV file: every figure in full, an interval in two columns."""
    found: dict[str, Any] = {}
    for key, value in vars(row).items():
        if key in ("seeds", "differs_in"):
            found[key] = " ".join(map(str, value))
        elif key == "hours":
            names = (f"projected_hours_{rate.replace(' ', '_').replace('/', '_per_')}" for rate in value)
            found |= zip(names, value.values(), strict=True)
        elif key in INTERVALS:
            found |= {key: value and value.mean, f"{key}_half": value and value.half}
        else:
            found[key] = value
    return found


def _lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """A title of two words or more is broken before its last, so that columns stay narrow."""
    titles = [c.title.rpartition(" ") for c in columns]
    cells = [[t[0] for t in titles], [t[2] for t in titles]] + [[c.text(r) for c in columns] for r in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return [*lines[:2], "─" * len(lines[1]), *lines[2:]]


def _with_half(found: Interval, form: str, half_form: str | None = None) -> str:
    mean = form.format(found.mean)
    return mean if found.half is None else f"{mean} ± {(half_form or form).format(found.half)}"


def _share(found: Interval) -> str:
    return _with_half(found, "{:.0%}")


def _percent(found: float) -> str:
    """With two significant digits: 11%, 1.6%, 0.23%."""
    if not found:
        return "0%"
    return f"{100 * found:.{max(0, 1 - math.floor(math.log10(100 * found)))}f}%"
