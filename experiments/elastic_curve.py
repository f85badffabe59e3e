"""The loss of each site over time and over rounds, with the moments at which one dies and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.look import LOOK
from experiments.marks import CYCLE

_LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))


def draw(disturbed: list[dict[str, Any]], undisturbed: list[dict[str, Any]], path: Path) -> None:
    with plt.rc_context(LOOK):
        figure, (by_time, by_sites, by_round) = plt.subplots(
            3, 1, figsize=(8.5, 9.5), height_ratios=(3, 1, 3)
        )
        start = min(event["time"] for event in disturbed if event["event"] == "joined")
        sites = sorted({event["site"] for event in disturbed})
        for k, site in enumerate(sites):
            style = {"color": CYCLE[k % len(CYCLE)], "linestyle": _LINES[k % len(_LINES)], "label": site}
            for part, life in enumerate(_lives(disturbed, site)):
                label = {"label": site if part == 0 else None}
                by_time.plot([e["time"] - start for e in life], [e["loss"] for e in life], **(style | label))
        _mark(by_time, disturbed, lambda event: event["time"] - start)
        by_time.set_title("Training loss of each site, mean of a round, by time")
        by_time.set_ylabel("nats per byte")
        by_time.legend(loc="upper right")

        rounds = sorted(_rounds(disturbed), key=lambda event: event["time"])
        by_sites.step(
            [e["time"] - start for e in rounds], [e["sites"] for e in rounds], where="post", color="#4D4D4D"
        )
        _mark(by_sites, disturbed, lambda event: event["time"] - start, words=False)
        by_sites.set_ylim(0, len(sites) + 0.5)
        by_sites.set_title("R, the sites of a round")
        by_sites.set_xlabel("seconds")
        by_sites.sharex(by_time)

        for events, label, style in (
            (undisturbed, "undisturbed", {"color": "#6B6B6B", "linewidth": 4, "alpha": 0.35}),
            (disturbed, "a site dies and comes back", {"color": CYCLE[0], "linewidth": 1.4}),
        ):
            found = {e["round"]: e["held_out"] for e in _rounds(events)}
            by_round.plot(sorted(found), [found[k] for k in sorted(found)], label=label, **style)
        _mark(by_round, disturbed, lambda event: event["round"])
        by_round.set_title("Held-out loss of θ, by round")
        by_round.set_xlabel("rounds")
        by_round.set_ylabel("nats per byte")
        by_round.legend(loc="upper right")
        figure.savefig(path)
        plt.close(figure)


def _rounds(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "round"]


def _lives(events: list[dict[str, Any]], site: str) -> list[list[dict[str, Any]]]:
    """The rounds of each of a site's processes."""
    started = [event["time"] for event in events if event["event"] == "started" and event["site"] == site]
    own = [event for event in _rounds(events) if event["site"] == site]
    if not started:
        return [own]
    return [[e for e in own if e["time"] < started[0]], [e for e in own if e["time"] > started[0]]]


def _mark(axes: Axes, events: list[dict[str, Any]], where: Any, *, words: bool = True) -> None:
    """Lines at what happened; the joining of the site that was started again is the one that counts."""
    started = next(event for event in events if event["event"] == "started")
    back = next(e for e in events if e["event"] == "joined" and e["time"] > started["time"])
    killed = next(event for event in events if event["event"] == "killed")
    for event, word in ((killed, "killed"), (back, "back, with the others' θ")):
        axes.axvline(where(event), color="#333333", linewidth=1, linestyle=":")
        if words:
            axes.annotate(
                f"{event['site']} {word}",
                (where(event), 0.5),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=9,
            )
