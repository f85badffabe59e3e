"""report.html: a comparison in one file that can be sent on. No scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from experiments.plan import flat
from experiments.plots import Plot
from experiments.summary import Comparison, Group, shared
from experiments.table import NONE, TABLES, columns_of

_NOT_OF_THE_METHOD = ("name", "seed", "port", "timeout_s")
_STYLE = """
:root { color-scheme: light dark;
  --text: #1c1c1c; --soft: #5c5c5c; --back: #fff; --line: #dcdcdc; --mark: #fdf1e7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --soft: #a6a6a6; --back: #16181b; --line: #3a3d42; --mark: #33271c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1280px; background: var(--back);
  color: var(--text); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h2, h3 { break-after: avoid; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { max-width: 80ch; }
.soft { color: var(--soft); font-size: .92rem; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; max-width: 100%; }
th, td { padding: .3rem .42rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; font-weight: 600; }
td { white-space: nowrap; }
th:first-child, td:first-child, .settings th, .settings td { text-align: left; white-space: normal; }
.settings td { overflow-wrap: anywhere; }
tr.main td { background: var(--mark); font-weight: 600; }
figure { margin: 1.6rem 0; break-inside: avoid; }
figure img { width: 100%; max-width: 1000px; height: auto; display: block; background: #fff; padding: .5rem;
  border-radius: 6px; border: 1px solid var(--line); }
figcaption { margin-top: .5rem; color: var(--soft); font-size: .92rem; max-width: 80ch; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; max-width: 80ch; }
pre { padding: .8rem 1rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px;
  font: .88rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } table { font-size: 7pt; }
  details::details-content { content-visibility: visible; } }
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
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(summary_line(comparison))}</p>\n<h2>Results</h2>',
        *_results(comparison),
        f'<p class="soft">{escape(READING)}</p>',
        "<h2>Plots</h2>",
        *(_figure(plot) for plot in plots),
        "<h2>Columns</h2>",
        _meanings(comparison),
        "<h2>Settings</h2>",
        *_settings(comparison),
        "<h2>Measured on</h2>",
        _table(_machines(comparison)),
    ]
    if commands:
        parts += [
            "<h2>Run it again</h2>\n<p>From a checkout of the commit above; stored runs are not trained "
            "again.</p>",
            f"<pre>{escape(chr(10).join(commands))}</pre>",
        ]
    return "\n".join([*parts, "</body>\n</html>\n"])


def summary_line(comparison: Comparison) -> str:
    """Task, size, steps, start, labels and seeds."""
    one, results = comparison.one, comparison.results
    form = "{:.1%}" if one.metric == "pass@1" else "{:.4f} nats per byte"
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


def _table(
    rows: Iterable[Sequence[str]],
    *,
    head: Sequence[str] = (),
    main: Sequence[int] = (),
    kind: str = "settings",
) -> str:
    """`main`: the numbers of rows to stand out."""
    marked = ' class="main"'
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr{marked * (k in main)}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for k, row in enumerate(rows)
    )
    return f'<table class="{kind}">{top}<tbody>{body}</tbody></table>'


def _results(comparison: Comparison) -> Iterable[str]:
    label, *columns = columns_of(comparison)
    main = [k for k, group in enumerate(comparison.groups) if group in comparison.main]
    for number, heading in enumerate(TABLES):
        shown = [label, *(column for column in columns if column.table == number)]
        if len(shown) > 1:
            rows = [[column.text(row) for column in shown] for row in comparison.rows]
            yield f"<h3>{heading}</h3>"
            yield _table(rows, head=[column.title for column in shown], main=main, kind="results")


def _figure(plot: Plot) -> str:
    data, caption = base64.b64encode(plot.path.read_bytes()).decode("ascii"), escape(plot.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"/>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _meanings(comparison: Comparison) -> str:
    said = [(column.title, column.meaning) for column in columns_of(comparison) if column.meaning]
    return f"<dl>{''.join(f'<dt>{escape(title)}</dt><dd>{escape(text)}</dd>' for title, text in said)}</dl>"


def _settings(comparison: Comparison) -> Iterable[str]:
    """What differs by label, and below it what is the same for all."""
    settings = [_of_the_method(group) for group in comparison.groups]
    common = shared(settings)
    differing = list(dict.fromkeys(key for one in settings for key in one if key not in common))
    if differing:
        rows = [
            [group.label, *(_value(one.get(key)) for key in differing)]
            for group, one in zip(comparison.groups, settings, strict=True)
        ]
        yield _table(rows, head=["label", *differing])
    yield f"<details><summary>The same for all labels: {len(common)} settings</summary>"
    yield _table([key, _value(value)] for key, value in common.items())
    yield "</details>"


def _of_the_method(group: Group) -> dict[str, Any]:
    return {key: value for key, value in flat(group.config).items() if key not in _NOT_OF_THE_METHOD}


def _value(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)


def _machines(comparison: Comparison) -> Iterable[tuple[str, str]]:
    """Each property once, with all the values it had."""
    machines = [result.machine for result in comparison.results]
    for key in dict.fromkeys(key for machine in machines for key in machine):
        values = sorted({machine[key] for machine in machines if key in machine}, key=str)
        many = key == "load" and len(values) > 1  # a figure of the moment at which a run ended
        yield key, f"{min(values)} to {max(values)}" if many else ", ".join(map(str, values))
