"""report.html: a comparison in one file that can be sent on. No scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from experiments.findings import headline, notes
from experiments.plots import Plot
from experiments.summary import Comparison, Group, shared
from experiments.table import NONE, columns_of

_NOT_OF_THE_METHOD = ("name", "seed", "port", "timeout_s")
_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --soft: #5c5c5c; --back: #ffffff; --line: #dcdcdc;
  --mark: #fdf1e7; --link: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --soft: #a6a6a6; --back: #16181b;
  --line: #3a3d42; --mark: #33271c; --link: #6db7e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1280px; background: var(--back);
  color: var(--text); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; text-wrap: balance; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; padding-top: .6rem; border-top: 1px solid var(--line);
  break-after: avoid; }
p, li { max-width: 80ch; }
.soft { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .42rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; white-space: normal; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
tr.main td { background: var(--mark); font-weight: 600; }
table.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.settings th { text-align: left; }
figure { margin: 1.6rem 0; break-inside: avoid; }
figure img { width: 100%; max-width: 1000px; height: auto; display: block; background: #ffffff;
  padding: .5rem; border-radius: 6px; border: 1px solid var(--line); }
figcaption { margin-top: .5rem; color: var(--soft); font-size: .92rem; max-width: 80ch; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; }
pre { padding: .8rem 1rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
code, pre { font: .88rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } .wide { overflow: visible; }
  table { font-size: 6.6pt; } th, td { padding: .12rem .22rem; }
  details::details-content { content-visibility: visible; } }
"""


def page(comparison: Comparison, plots: Sequence[Plot], *, name: str, commands: Sequence[str]) -> str:
    """`commands` are what trains these runs anew."""
    title = headline(comparison)
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(name)}: {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(what(comparison))}</p>',
        "<h2>Results</h2>",
        _results(comparison),
        _items(notes(comparison)),
        "<h2>Plots</h2>",
        *(_figure(plot) for plot in plots),
        "<h2>What the columns say</h2>",
        _meanings(comparison),
        "<h2>Settings</h2>",
        *_settings(comparison),
        "<h2>Measured on</h2>",
        _machines(comparison),
    ]
    if commands:
        lines = escape("\n".join(commands))
        parts += [
            "<h2>Again</h2>",
            f"<p>From a checkout of the commit named above; runs that are stored are not trained again.</p>\n"
            f"<pre>{lines}</pre>",
        ]
    return "\n".join([*parts, "</body>\n</html>\n"])


def what(comparison: Comparison) -> str:
    """What was compared, in a line."""
    one = comparison.one
    first = f"{one.first:.1%}" if one.metric == "pass@1" else f"{one.first:.4f} nats per byte"
    seeds = comparison.seeds
    sizes = sorted(
        {result.ranks for result in comparison.results if result.method != "single"} or {one.ranks}
    )
    steps = sorted({result.steps for result in comparison.results})
    return (
        f"{one.config['task'].capitalize()} task, {' or '.join(map(str, sizes))} "
        f"{'rank' if sizes == [1] else 'ranks'}, {one.parameters:,} parameters, "
        f"{' or '.join(map(str, steps))} steps from a warm start with {one.metric} {first}; "
        f"{len(comparison.groups)} {'label' if len(comparison.groups) == 1 else 'labels'}, "
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}."
    )


def _results(comparison: Comparison) -> str:
    columns = columns_of(comparison)
    lines = ["".join(f"<th>{escape(column.title)}</th>" for column in columns)]
    rows = [f"<thead><tr>{lines[0]}</tr></thead>", "<tbody>"]
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        mark = ' class="main"' if group in comparison.main else ""
        cells = "".join(f"<td>{escape(column.text(row))}</td>" for column in columns)
        rows.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(rows)}</tbody></table></div>'


def _items(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.path.read_bytes()).decode("ascii")
    caption = escape(plot.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"/>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _meanings(comparison: Comparison) -> str:
    said = [(column.title, column.meaning) for column in columns_of(comparison) if column.meaning]
    return f"<dl>{''.join(f'<dt>{escape(title)}</dt><dd>{escape(text)}</dd>' for title, text in said)}</dl>"


def _settings(comparison: Comparison) -> list[str]:
    """What differs by label, and below it what is the same for all."""
    flat = [_flat(group) for group in comparison.groups]
    common = shared(flat)
    differing = list(dict.fromkeys(key for one in flat for key in one if key not in common))
    parts = []
    if differing:
        head = "".join(f"<th>{escape(key)}</th>" for key in ["label", *differing])
        body = "".join(
            f"<tr><td>{escape(group.label)}</td>"
            + "".join(f"<td>{escape(_value(one.get(key)))}</td>" for key in differing)
            + "</tr>"
            for group, one in zip(comparison.groups, flat, strict=True)
        )
        parts.append(
            f'<div class="wide"><table class="settings"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(_value(value))}</td></tr>" for key, value in common.items()
    )
    parts.append(
        f"<details><summary>The same for all labels: {len(common)} settings</summary>"
        f'<table class="settings"><tbody>{rows}</tbody></table></details>'
    )
    return parts


def _flat(group: Group) -> dict[str, Any]:
    """Nested keys with dots, as a command line takes them."""
    found: dict[str, Any] = {}
    for key, value in group.config.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": item for inner, item in value.items()}
        elif key not in _NOT_OF_THE_METHOD:
            found[key] = value
    return found


def _value(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)


def _machines(comparison: Comparison) -> str:
    """Each property once, with all the values it had."""
    machines = [result.machine for result in comparison.results]
    said = []
    for key in dict.fromkeys(key for machine in machines for key in machine):
        values = sorted({machine[key] for machine in machines if key in machine}, key=str)
        if key == "load":  # a figure of the moment, and of each run another
            text = f"{min(values)} to {max(values)} when runs ended" if len(values) > 1 else f"{values[0]}"
        else:
            text = ", ".join(map(str, values))
        said.append(f"<tr><td>{escape(key)}</td><td>{escape(text)}</td></tr>")
    seeds = ", ".join(map(str, comparison.seeds))
    said.append(f"<tr><td>seeds</td><td>{seeds}</td></tr>")
    return f'<table class="settings"><tbody>{"".join(said)}</tbody></table>'
