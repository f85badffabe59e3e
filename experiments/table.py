"""The table of a comparison: its columns, as text for a terminal, cells for a page and figures for CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.results import RATES
from experiments.statistics import Interval
from experiments.summary import SECOND, Comparison, Row

NONE = "–"


@dataclass(frozen=True)
class Scale:
    """How a score is written: pass@1 in percent and points, a loss as it is."""

    percent: bool

    @staticmethod
    def of(comparison: Comparison) -> Scale:
        return Scale(comparison.one.metric == "pass@1")

    def score(self, found: Interval) -> str:
        return _with_half(found, "{:.1%}", "{:.1%}") if self.percent else _with_half(found, "{:.4f}")

    def difference(self, found: Interval | None, *, sign: bool = True) -> str:
        if found is None:
            return NONE
        plus = "+" if sign else ""
        if self.percent:
            return _with_half(found.times(100), f"{{:{plus}.1f}}", "{:.1f}")
        return _with_half(found, f"{{:{plus}.4f}}", "{:.4f}")

    def amount(self, difference: float) -> str:
        """An absolute difference with its unit, within a sentence."""
        size = abs(difference)
        return f"{100 * size:.1f} points" if self.percent else f"{size:.4f} nats per byte"


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    meaning: str  # said below the page's table; empty where the title does
    text: Callable[[Row], str]
    terminal: int | None = None  # the lower, the longer it stays when a terminal is narrow; None: never there


def columns_of(comparison: Comparison) -> list[Column]:
    """Those in which at least one row has something to say."""
    scale, metric = Scale.of(comparison), comparison.one.metric
    deciding = "greedy pass@1" if metric == "pass@1" else metric
    unit = "points" if scale.percent else "nats per byte"
    everything = [
        Column("label", "label", "", lambda r: r.label, 0),
        Column("seeds", "seeds", "", lambda r: str(len(r.seeds)), 8 if len(comparison.seeds) > 1 else None),
        Column("final", metric, "Score at the end, on held-out data.", lambda r: scale.score(r.final), 0),
        Column(
            "gain",
            "gain",
            f"Improvement over the warm start, in {unit}.",
            lambda r: scale.difference(r.gain),
            4,
        ),
        Column(
            "minus",
            "− reference",
            f"The score minus the reference's, in {unit}"
            + ("." if comparison.one.higher_is_better else ": less is better."),
            lambda r: scale.difference(r.minus),
            5,
        ),
        Column(
            "share",
            "gain kept",
            f"Share of the reference's gain, by {deciding}.",
            lambda r: _share(r.share),
            2,
        ),
        Column(
            "share_second",
            f"gain kept, {SECOND}",
            "Share of the reference's gain by the probability of a right answer when one is sampled at "
            "temperature 1: computed exactly, and so with less noise than a count of right answers.",
            lambda r: _share(r.share_second),
            2,
        ),
        Column("sent", "MB sent", "Per rank, for the whole run.", lambda r: f"{r.sent_bytes / 1e6:,.2f}", 1),
        Column(
            "below_ddp", "below DDP", "DDP's sent bytes ÷ this label's.", lambda r: _times(r.below_ddp), 3
        ),
        Column(
            "below_diloco",
            "below DiLoCo",
            "The reference DiLoCo's sent bytes ÷ this label's: all that is sent, headers and what the "
            "exchange adds up for others included.",
            lambda r: _times(r.below_diloco),
        ),
        Column(
            "below_fp32",
            "payload below FP32",
            "4 bytes ÷ the bytes per parameter that all of a site's coded entries take in a round.",
            lambda r: _times(r.below_fp32),
            2,
        ),
        Column(
            "density",
            "density",
            "Share of the entries that a site sends in a round.",
            lambda r: _percent(r.density),
            4,
        ),
        Column(
            "union_density",
            "union density",
            "Share of the entries that at least one site sends.",
            lambda r: _percent(r.union_density),
        ),
        Column(
            "residual_norm",
            "residual norm",
            "L2 norm of what is withheld after a round, root mean square over the sites.",
            lambda r: NONE if not r.residual_norm else f"{r.residual_norm:.2g}",
        ),
        Column(
            "age",
            "age of withheld",
            "Rounds since the withheld was last sent, weighted by its size.",
            lambda r: NONE if r.age is None else f"{r.age:.1f}",
        ),
    ]
    everything += [
        Column(
            rate,
            f"h at {rate}",
            "Hours: compute as measured here plus the bytes at that rate; bandwidth only, no latency, "
            "nothing overlapped."
            if rate == next(iter(RATES))
            else "",
            lambda r, rate=rate: f"{r.hours[rate]:,.{4 if r.hours[rate] < 1 else 2}f}",
            7 if rate == next(iter(RATES)) else None,
        )
        for rate in RATES
    ]
    return [c for c in everything if any(c.text(row) != NONE for row in comparison.rows)]


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
        if key == "seeds":
            found["seeds"] = " ".join(map(str, value))
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
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
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
    return NONE if found is None else f"{found:.1%}"
