"""The pictures of a comparison: loss by steps, loss by bytes, density and residual by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from experiments.look import LOOK
from experiments.methods import Method
from experiments.results import Result, ddp_of, diloco_of

# Okabe and Ito's palette, told apart with any colour vision; the shape of the marker repeats it.
_COLOURS = {"ddp": "#6B6B6B", "diloco": "#0072B2", "pulseloco": "#D55E00"}
_MARKERS = {"ddp": "s", "diloco": "o", "pulseloco": "^"}
_LINES: tuple[Any, ...] = ("-", "--", ":", "-.")  # one for each outer optimizer
_PLAIN_AVERAGING = Method(name="diloco", outer_lr=1.0, outer_momentum=0.0).outer
_LOSS = "loss on held-out text (nats per byte)"


def draw_all(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the PNG files into `folder`; returns their paths."""
    paths = []
    with plt.rc_context(LOOK):
        figures = {"loss_by_steps": loss_by_steps(results), "loss_by_bytes": loss_by_bytes(results)}
        if any(_sparse(result) for result in results):
            figures["rounds"] = rounds(results)
        for name, figure in figures.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1])
            plt.close(figure)
    return paths


def loss_by_steps(results: Sequence[Result]) -> Figure:
    """A panel for each outer optimizer, DDP in all of them as the reference."""
    outers = _outers(results) or [""]
    figure, axes = plt.subplots(
        1, len(outers), figsize=(5.0 * len(outers) + 0.4, 4.2), sharey=True, squeeze=False
    )
    for axis, outer in zip(axes[0], outers, strict=True):
        shown = [r for r in results if r.method.outer == outer or r.method.name == "ddp"]
        for result in shown:
            pulse = result.method.name == "pulseloco"
            axis.plot(
                [point.step for point in result.evaluations],
                [point.loss for point in result.evaluations],
                # Curves that coincide must both be seen: a broad line below a dashed one.
                linewidth=1.8 if pulse else 3.2,
                linestyle=(0, (4, 2)) if pulse else "-",
                color=_COLOURS[result.method.name],
                zorder=3 if pulse else 2,
                label=f"{result.method.title}, ends at {result.final_loss:.4f}",
            )
        axis.set_title("\n".join(filter(None, [_outer_name(outer), _gap(shown)])))
        axis.set_xlabel("step")
        axis.set_xlim(0, shown[0].steps)
        axis.legend(loc="lower left")  # the curves fall: this corner stays free
    axes[0][0].set_ylabel(_LOSS)
    return figure


def loss_by_bytes(results: Sequence[Result]) -> Figure:
    """How much each byte on the network buys; the bytes span orders of magnitude."""
    figure, axis = plt.subplots(figsize=(8.4, 4.8))
    for result in results:
        points = [point for point in result.evaluations if point.sent_bytes > 0]
        axis.plot(
            [point.sent_bytes / 1e6 for point in points],
            [point.loss for point in points],
            **_look_of(result, results),
        )
    axis.axhline(results[0].first_loss, color="#AAAAAA", linewidth=1)
    axis.annotate(
        "warm start",
        (1, results[0].first_loss),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=_COLOURS["ddp"],
    )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("sent per rank so far (MB, logarithmic)")
    axis.set_ylabel(_LOSS)
    axis.set_title(_bytes_finding(results))
    key = [Line2D([], [], **_look_of(r, results), label=r.method.title) for r in _per_method(results)]
    key += [Line2D([], [], color="black", linestyle=_line(o, results), label=o) for o in _outers(results)]
    figure.legend(handles=key, loc="outside lower center", ncols=len(key), fontsize=10)
    return figure


def rounds(results: Sequence[Result]) -> Figure:
    """What PULSELoCo's gate lets through, and the norm of what it holds back."""
    figure, (density, residual) = plt.subplots(1, 2, figsize=(10.4, 4.0))
    shown = [result for result in results if _sparse(result)]
    for result in shown:
        look = _look_of(result, results) | {"label": result.method.outer}
        numbers = [point.round for point in result.rounds]
        density.plot(numbers, [point.density for point in result.rounds], **look)
        residual.plot(numbers, [point.residual_norm for point in result.rounds], **look)
    steady = sorted({f"{result.density or 0.0:.0%}" for result in shown}, key=lambda text: float(text[:-1]))
    density.set_title(
        f"PULSELoCo sends {' to '.join(steady[:: max(1, len(steady) - 1)])} of the entries in a round\n"
        "(mean of the second half; DiLoCo sends all)"
    )
    density.set_ylabel("density: entries sent ÷ all entries")
    density.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    residual.set_title("Withheld for later rounds\n(root mean square over the sites)")
    residual.set_ylabel("L2 norm of the residual")
    for axis in (density, residual):
        axis.set_xlabel("round")
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="lower right", title="outer optimizer")
    return figure


def _sparse(result: Result) -> bool:
    return result.method.name == "pulseloco" and bool(result.rounds)


def _outers(results: Sequence[Result]) -> list[str]:
    """The outer optimizers, in the order of the runs."""
    return list(dict.fromkeys(result.method.outer for result in results if result.method.outer))


def _outer_name(outer: str) -> str:
    if outer == _PLAIN_AVERAGING:
        return f"plain averaging ({outer})"
    return f"outer optimizer {outer}" if outer else ""


def _per_method(results: Sequence[Result]) -> list[Result]:
    """The first run of each method."""
    return list({result.method.name: result for result in reversed(results)}.values())[::-1]


def _line(outer: str, results: Sequence[Result]) -> Any:
    return _LINES[_outers(results).index(outer) % len(_LINES)] if outer else "-"


def _look_of(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """Colour and marker tell the method, the line's style (and a hollow marker) the outer optimizer."""
    line = _line(result.method.outer, results)
    colour = _COLOURS[result.method.name]
    return {
        "linestyle": line,
        "marker": _MARKERS[result.method.name],
        "color": colour,
        "markerfacecolor": colour if line == "-" else "white",
    }


def _gap(shown: Sequence[Result]) -> str:
    for result in shown:
        diloco = diloco_of(result, shown)
        if result.method.name == "pulseloco" and diloco is not None:
            gap = result.final_loss - diloco.final_loss
            return f"PULSELoCo ends {abs(gap):.4f} {'above' if gap >= 0 else 'below'} DiLoCo"
    return ""


def _bytes_finding(results: Sequence[Result]) -> str:
    pulse = [result for result in results if result.method.name == "pulseloco"]
    if not pulse:
        return "Loss by bytes sent"
    sent = fmean(result.sent_bytes for result in pulse)
    diloco = diloco_of(pulse[0], results)
    others = [("DiLoCo", diloco), ("DDP", ddp_of(results))]
    parts = [f"{other.sent_bytes / sent:.2g}x fewer bytes than {name}" for name, other in others if other]
    return f"PULSELoCo sends {' and '.join(parts)}" if parts else "Loss by bytes sent"
