"""A run's curves while it goes on, and its plot and report.html at the end: who did what and when, how old
the tokens were, and the bytes of each flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from experiments.pipeline.diary import Notes
from experiments.reporting.charts import CYCLE, LOOK, plt, saved
from experiments.reporting.page import document, figure, table
from experiments.reporting.plots import Plot
from experiments.reporting.tracking import writer_in
from experiments.settings.plan import flat

DOINGS = (
    *("training", "sampling", "exchanging", "publishing", "writing", "receiving"),
    *("evaluating", "saving", "waiting"),
)
_FLOWS = {
    "round bytes": "between the sites: their rounds, as sent by all of them",
    "published bytes": "from the sites into the store: patches, anchors and manifests",
    "patch bytes": "from the store to the workers: patches",
    "sample bytes": "from the workers to the trainers: samples",
}


def page(found: dict[str, Any], plot: Path) -> str:
    config, counts = found["config"], found["counts"]
    last = found["evaluations"][-1]["score"]
    caption = "What each part did; the age of tokens when they were learned from; what was learned."
    parts = [
        f"<p>{config['sites']} sites, {config['workers']} workers, {config['steps']} steps, at most "
        f"{config['max_staleness']} versions between sampling and training: "
        f"{found['seconds_per_step']:.3f} s a step, {found['metric']} {last:.3f}.</p>",
        figure(Plot(plot, caption)),
        "<h2>Shares of the time</h2>",
        table(_shares(found), head=["part", *_doings(found)], kind="results"),
        "<h2>Bytes of every flow</h2>",
        table([about, f"{counts.get(name, 0):,}"] for name, about in _FLOWS.items()),
        "<h2>Counted</h2>",
        table([name, f"{count:,}"] for name, count in counts.items() if name not in _FLOWS),
    ]
    if found["said"]:
        parts.append(f"<h2>What went wrong</h2><pre>{escape(chr(10).join(found['said']))}</pre>")
    parts.append("<details><summary>Settings</summary>")
    parts.append(table([key, str(value)] for key, value in flat(config).items()))
    parts.append("</details><h2>Measured on</h2>")
    parts.append(table([key, str(value)] for key, value in found["machine"].items()))
    return document("A pipeline's run", parts)


def _doings(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(what for by in found["shares"].values() for what in by))


def _shares(found: dict[str, Any]) -> Iterable[list[str]]:
    doings = _doings(found)
    for part, by in found["shares"].items():
        yield [part, *(f"{by[what]:.0%}" if what in by else "" for what in doings)]


def draw(found: dict[str, Any], path: Path) -> None:
    """Who did what and when; how old the tokens were that were learned from; the score."""
    parts = list(found["shares"])
    colors = dict(zip(DOINGS, (*CYCLE[:4], CYCLE[7], CYCLE[4], CYCLE[5], CYCLE[6], "#E6E6E6"), strict=True))
    with plt.rc_context(LOOK):
        figure, (timeline, ages, learned) = plt.subplots(3, 1, figsize=(9, 8.5), height_ratios=(3, 2, 2))
        for doing in reversed(DOINGS):  # waiting lies below
            for row, part in enumerate(parts):
                bars = [
                    (e["from"] - found["begun"], e["to"] - e["from"])
                    for e in found["events"]
                    if e["part"] == part and e["what"] == doing
                ]
                timeline.broken_barh(bars, (row - 0.4, 0.8), facecolors=colors[doing])
            timeline.barh(0, 0, color=colors[doing], label=doing)
        timeline.set(title="Who did what", xlabel="seconds", xlim=(0, found["ended"] - found["begun"]))
        timeline.set_yticks(range(len(parts)), parts)
        timeline.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.08))
        timeline.grid(visible=False)
        total = max(1, sum(found["staleness"].values()))
        ages.bar(list(found["staleness"]), [n / total for n in found["staleness"].values()], color=CYCLE[1])
        ages.set(title="Staleness of the tokens that were learned from", xlabel="versions", ylabel="share")
        ages.xaxis.get_major_locator().set_params(integer=True)
        times = [one["time"] - found["begun"] for one in found["evaluations"]]
        learned.plot(times, [one["score"] for one in found["evaluations"]], marker="o")
        learned.set(title="On held-out problems", xlabel="seconds", ylabel=found["metric"])
        saved(figure, path)


class Curves:
    """What the parts do, for TensorBoard during the run."""

    def __init__(self, folder: Path) -> None:
        self._writer = writer_in(folder)
        self._leases: Counter[str] = Counter()  # by worker

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def add(self, notes: Notes, version: int) -> None:
        """
        Args:
            version: the trainers' current one.
        """
        for event in notes.events:
            self._add_event(event)
        tokens = sum(notes.staleness.values())
        if tokens:
            age = sum(age * count for age, count in notes.staleness.items()) / tokens
            self._writer.add_scalar("staleness of tokens", age, version)
        self._writer.flush()

    def _add_event(self, event: dict[str, Any]) -> None:
        part, what, seconds = event["part"], event["what"], event["to"] - event["from"]

        def put(name: str, value: float, step: int) -> None:
            self._writer.add_scalar(name, value, step, walltime=event["to"])

        if what == "evaluating":
            for name, score in event.get("scores", {}).items():
                put(f"score/{name}", score, event["step"])
        elif what == "sampling":
            self._leases[part] += 1
            put(f"tokens per second/{part}", event["tokens"] / max(seconds, 1e-9), self._leases[part])
        elif what == "writing" and "bytes" in event:
            put("bytes/of a version", event["bytes"], event["version"])
        elif "step" in event:
            put(f"seconds of {what}/{part}", seconds, event["step"])
