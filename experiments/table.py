"""The columns of a comparison, for a terminal and for a page; `figures` is a row in full, for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.results import RATES
from experiments.statistics import Interval
from experiments.summary import SECOND, Comparison, Row

NONE = "–"
TABLES = ("Scores", "Bytes and hours", "Rounds")  # of the page: all columns side by side are too wide for it


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Row], str]
    meaning: str = ""  # shown below the page's tables; empty where the title says it
    table: int = 0  # which of TABLES it is in
    terminal: int | None = None  # the higher, the sooner a narrow terminal drops it; None: only on the page


def columns_of(comparison: Comparison) -> list[Column]:
    """Those in which at least one row has a value."""
    percent = comparison.one.metric == "pass@1"
    metric, unit = comparison.one.metric, "points" if percent else "nats per byte"
    several = len({row.reference for row in comparison.rows}) > 1
    better = "" if comparison.one.higher_is_better else ": less is better"
    first, *other_rates = RATES

    def score(found: Interval) -> str:
        return _with_half(found, "{:.1%}" if percent else "{:.4f}")

    def difference(found: Interval | None) -> str:
        if found is None:
            return NONE
        return (
            _with_half(found.times(100), "{:+.1f}", "{:.1f}")
            if percent
            else _with_half(found, "{:+.4f}", "{:.4f}")
        )

    def hours(rate: str) -> Callable[[Row], str]:
        return lambda r: f"{r.hours[rate]:,.{4 if r.hours[rate] < 1 else 2}f}"

    columns = [
        Column("label", lambda r: r.label, terminal=0),
        Column("seeds", lambda r: str(len(r.seeds)), terminal=8 if len(comparison.seeds) > 1 else None),
        Column(metric, lambda r: score(r.final), "Score at the end, on held-out data.", terminal=0),
        Column(
            "gain", lambda r: difference(r.gain), f"Improvement over the warm start, in {unit}.", terminal=4
        ),
        Column(
            "− reference",
            lambda r: difference(r.minus),
            f"The score minus the reference's, in {unit}{better}.",
            terminal=5,
        ),
        Column(
            "gain kept",
            lambda r: _share(r.share),
            f"Share of the reference's gain, by {'greedy ' * percent}{metric}. None is shown where that gain "
            "can't be told from noise: it must exceed the 95% interval over the seeds, or the one that the "
            "size of the held-out set leaves (of a loss: 0.1% of it).",
            terminal=2,
        ),
        Column(
            f"gain kept, {SECOND}",
            lambda r: _share(r.share_second),
            "Share of the reference's gain by the probability that an answer sampled at temperature 1 is "
            "right. It is computed exactly, and so has less noise than a count of right answers.",
            terminal=2,
        ),
        Column(
            "reference",
            lambda r: (r.reference if several else None) or NONE,
            "The DiLoCo it is compared with.",
        ),
        Column(
            "differs in",
            lambda r: ", ".join(r.differs_in) or NONE,
            "Conditions in which it differs from its reference: compare with care.",
        ),
        Column("MB sent", lambda r: f"{r.sent_bytes / 1e6:,.2f}", "Per rank, for the whole run.", 1, 1),
        Column("below DDP", lambda r: _times(r.below_ddp), "DDP's sent bytes ÷ this label's.", 1, 3),
        Column(
            "below DiLoCo",
            lambda r: _times(r.below_diloco),
            "The reference's sent bytes ÷ this label's: all that is sent, headers and sums for other sites "
            "included.",
            1,
        ),
        Column(
            "payload below FP32",
            lambda r: _times(r.below_fp32),
            "4 bytes ÷ the bytes per parameter of all of a site's coded entries in a round.",
            1,
            2,
        ),
        Column(
            "kernel's count",
            lambda r: NONE if r.kernel_beyond is None else f"{r.kernel_beyond:+.2%}",
            "The kernel's TCP bytes beside loco's count (for DDP: beside the ring formula). What it has more "
            "is gloo's framing. DDP's MB are the kernel's where it counts, and else the formula's.",
            1,
        ),
        Column(
            f"h at {first}",
            hours(first),
            "Hours: compute as measured here plus the bytes at that rate; no latency, nothing overlapped.",
            1,
            7,
        ),
        *(Column(f"h at {rate}", hours(rate), table=1) for rate in other_rates),
        Column(
            "density",
            lambda r: _percent(r.density),
            "Share of the entries that a site sends. Figures of rounds are means over the second half of the "
            "rounds: the first ones are sparser, because the warm start's weights are BF16 values.",
            2,
            4,
        ),
        Column(
            "union density",
            lambda r: _percent(r.union_density),
            "Share of entries that at least one site sends.",
            2,
        ),
        Column(
            "casts changed",
            lambda r: _percent(r.visible),
            "Share of the weights whose BF16 cast a round's inner steps change.",
            2,
        ),
        Column(
            "residual norm",
            lambda r: NONE if not r.residual_norm else f"{r.residual_norm:.2g}",
            "L2 norm of what is withheld after a round, root mean square over the sites.",
            2,
        ),
        Column(
            "age of withheld",
            lambda r: NONE if r.age is None else f"{r.age:.1f}",
            "Rounds since the withheld was last sent, weighted by its size.",
            2,
        ),
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
            for rate, hours in value.items():
                found[f"projected_hours_{rate.replace(' ', '_').replace('/', '_per_')}"] = hours
        elif key in ("final", "gain", "minus", "share", "share_second"):
            found[key] = value.mean if value is not None else None
            found[f"{key}_half"] = value.half if value is not None else None
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


def _share(found: Interval | None) -> str:
    return NONE if found is None else _with_half(found, "{:.0%}")


def _times(found: float | None) -> str:
    return NONE if found is None else f"{found:.1f}x"


def _percent(found: float | None) -> str:
    """With two significant digits: 11%, 1.6%, 0.23%."""
    if not found:
        return NONE if found is None else "0%"
    return f"{100 * found:.{max(0, 1 - math.floor(math.log10(100 * found)))}f}%"
