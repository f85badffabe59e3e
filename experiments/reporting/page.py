"""report.html: a comparison in one file that can be sent on. No scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from experiments.reporting.plots import Plot
from experiments.reporting.summary import Comparison, shared
from experiments.reporting.table import MEANINGS, NONE, TABLES, columns_of
from experiments.settings.plan import flat

_NOT_OF_THE_METHOD = ("name", "seed", "port", "timeout_s")
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1280px;
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; padding-top: .6rem; border-top: 1px solid #8886; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, dd, figcaption { max-width: 80ch; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; max-width: 100%; }
th, td { padding: .3rem .42rem; text-align: right; border-bottom: 1px solid #8886; }
th { vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child, .settings th, .settings td { text-align: left; white-space: normal; }
.settings td { overflow-wrap: anywhere; }
tr.main td { background: #e8730022; font-weight: 600; }
figure { margin: 1.6rem 0; break-inside: avoid; }
figure img { width: 100%; max-width: 1000px; display: block; background: #fff; padding: .5rem; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem 1.2rem; }
pre { overflow-x: auto; }
@media print { table { font-size: 7pt; } details::details-content { content-visibility: visible; } }
"""
READING = (
    "± is a 95% interval. Where a label has several seeds it is a t-interval over them, and differences and "
    "shares are paired by seed. Where it has one, it is the interval that the size of the held-out set "
    "leaves (Wilson's), which does not say how far another seed would end up; a loss of one seed has none. "
    "The reference is the first DiLoCo that sends FP32 and has outer momentum, or one trained under a "
    "label's own conditions where there is one. Its outer step moves the weights up to α/(1−μ) times as far "
    "as the inner steps do, so a lead over DDP at the same inner learning rate is mostly effective step "
    "size."
)


def page(comparison: Comparison, plots: Sequence[Plot], *, name: str, commands: Sequence[str]) -> str:
    """`commands` are what trains these runs anew."""
    title = f"{name}: {comparison.one.metric} and bytes"
    parts = [
        f"<p>{escape(summary_line(comparison))}</p>\n<h2>Results</h2>",
        *_results(comparison),
        f"<p>{escape(READING)}</p>\n<h2>Plots</h2>",
        *(figure(plot) for plot in plots),
        f"<h2>Columns</h2>\n{_meanings(comparison)}\n<h2>Settings</h2>",
        *_settings(comparison),
        f"<h2>Measured on</h2>\n{table(_machines(comparison))}",
    ]
    if commands:
        lines = escape("\n".join(commands))
        parts.append(
            "<h2>Run it again</h2>\n<p>From a checkout of the commit above; stored runs are not trained"
        )
        parts.append(f"again.</p>\n<pre>{lines}</pre>")
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    head = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
    ]
    return "\n".join([*head, *parts, "</body>\n</html>\n"])


def summary_line(comparison: Comparison) -> str:
    """Task, size, steps, start, labels and seeds."""
    one, results = comparison.one, comparison.results
    form = {"pass@1": "{:.1%}", "loss": "{:.4f} nats per byte"}.get(one.metric, "{:.4f}")
    starts = sorted({form.format(result.first) for result in results})
    sizes = sorted({result.ranks for result in results if result.method != "single"} or {one.ranks})
    steps = sorted({result.steps for result in results})
    return (
        f"Task {one.config['task']}; ranks: {_or(sizes)}; parameters: {one.parameters:,}; steps: "
        f"{_or(steps)}; {one.metric} of the warm start: {_or(starts)}; labels: {len(comparison.groups)}; "
        f"seeds: {', '.join(map(str, comparison.seeds))}."
    )


def _or(values: Iterable[Any]) -> str:
    return " or ".join(map(str, values))


def table(
    rows: Iterable[Sequence[str]],
    *,
    head: Sequence[str] = (),
    main: Sequence[int] = (),
    kind: str = "settings",
) -> str:
    """`main`: the numbers of rows to stand out."""
    lines = [f'<table class="{kind}">']
    if head:
        lines.append(f"<thead><tr>{_cells(head, 'th')}</tr></thead>")
    for k, row in enumerate(rows):
        start = '<tr class="main">' if k in main else "<tr>"
        lines.append(f"{start}{_cells(row, 'td')}</tr>")
    return "\n".join([*lines, "</table>"])


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _results(comparison: Comparison) -> Iterable[str]:
    label, *columns = columns_of(comparison)
    main = [k for k, group in enumerate(comparison.groups) if group in comparison.main]
    for number, heading in enumerate(TABLES):
        shown = [label, *(column for column in columns if column.table == number)]
        if len(shown) > 1:
            rows = [[column.text(row) for column in shown] for row in comparison.rows]
            yield f"<h3>{heading}</h3>"
            yield table(rows, head=[column.title for column in shown], main=main, kind="results")


def figure(plot: Plot) -> str:
    data, caption = base64.b64encode(plot.path.read_bytes()).decode("ascii"), escape(plot.caption)
    image = f'<img src="data:image/png;base64,{data}" alt="{caption}"/>'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _meanings(comparison: Comparison) -> str:
    titles = [column.title for column in columns_of(comparison) if column.title in MEANINGS]
    return f"<dl>{''.join(_cells([t], 'dt') + _cells([MEANINGS[t]], 'dd') for t in titles)}</dl>"


def _settings(comparison: Comparison) -> Iterable[str]:
    """What differs by label, and below it what is the same for all."""
    settings = [
        {key: value for key, value in flat(group.config).items() if key not in _NOT_OF_THE_METHOD}
        for group in comparison.groups
    ]
    common = shared(settings)
    differing = list(dict.fromkeys(key for one in settings for key in one if key not in common))
    if differing:
        pairs = zip(comparison.groups, settings, strict=True)
        rows = [[group.label, *(_value(one.get(key)) for key in differing)] for group, one in pairs]
        yield table(rows, head=["label", *differing])
    yield f"<details><summary>The same for all labels: {len(common)} settings</summary>"
    yield table([key, _value(value)] for key, value in common.items())
    yield "</details>"


def _value(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)


def _machines(comparison: Comparison) -> Iterable[tuple[str, str]]:
    """Each property once, with all the values it had."""
    machines = [result.machine for result in comparison.results]
    for key in dict.fromkeys(key for machine in machines for key in machine):
        values = sorted({machine[key] for machine in machines if key in machine}, key=str)
        many = key == "load" and len(values) > 1  # a figure of the moment at which a run ended
        yield key, f"{min(values)} to {max(values)}" if many else ", ".join(map(str, values))
