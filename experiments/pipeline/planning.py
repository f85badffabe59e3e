"""How to split devices between training and sampling, before a run.

    python -m experiments.pipeline plan                          this machine, by two short runs
    python -m experiments.pipeline plan gpus=64 sites=2          GPUs, by what is known of them
    python -m experiments.pipeline plan gpus=64 target.token_ms=11 target.trained_tokens_s=3200
    python -m experiments.pipeline plan against=runs/pipeline-layouts

Two invariants decide. Tokens that are sampled are learned from: the slower side sets the pace of both. And
no sample is older than max_staleness versions: the longest answer must not take longer than so many rounds,
which limits how many answers a device may sample at once, and so its throughput.

The last form holds predictions for runs of `compare` against what those runs took.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.config import require
from experiments.errors import ExperimentError
from experiments.merging import derive
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.rates import Rates, measured, worked_out
from experiments.plots import CYCLE, LOOK, plt, saved

_PAIRS = 10  # of layouts, of which the better one is predicted
_ROUNDS = 12  # of the runs that measure
_BATCHES = sorted({round(1.1**k) for k in range(90)})  # answers that a device samples at once


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """The defaults are an H100's."""

    memory_gb: float = 80.0
    bandwidth_gb: float = 3350.0  # of its memory, a second
    tflops: float = 990.0  # BF16, the data sheet's
    utilisation: float = 0.4  # the share of it that training reaches

    def __post_init__(self) -> None:
        _positive(self, "gpu.")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The model and the answers to plan for; the defaults are Llama 3.1 8B's, and long answers."""

    parameters: float = 8.03e9
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    prompt_tokens: float = 300.0
    answer_tokens: float = 1500.0  # the mean
    longest_tokens: float = 8192.0
    answers: int = 512  # that a site learns from in a step
    round_bytes: float = 0.19  # of a parameter, that a site sends in a round; docs/frontier.md
    token_ms: float | None = None  # of a forward pass for one token; None: worked out
    trained_tokens_s: float | None = None  # that one GPU learns from; None: worked out

    def __post_init__(self) -> None:
        _positive(self, "target.")
        require(
            self.longest_tokens >= self.answer_tokens,
            f"target.longest_tokens must be at least target.answer_tokens, got {self.longest_tokens}",
        )


def _positive(config: Any, part: str) -> None:
    for name, value in vars(config).items():
        require(value is None or value > 0, f"{part}{name} must be > 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(PipelineConfig):
    gpus: int = 0  # to be split; 0: the cores of this machine
    gpu: GpuConfig = field(default_factory=GpuConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    link_mbit: float | None = None  # of a site's link to the others; None: no bound
    against: str | None = None  # folder of a comparison that has been run

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gpus >= 0, f"gpus must be at least 0, got {self.gpus}")
        require(
            self.gpus == 0 or self.gpus > self.sites,
            f"gpus={self.gpus} can't be split: {self.sites} sites need one GPU each, and sampling one more. "
            f"Set gpus={self.sites + 1} or more, or fewer sites",
        )
        require(
            not (self.gpus and self.against), "runs on this machine are predicted without gpus: leave it out"
        )
        link = self.link_mbit
        require(link is None or link > 0, f"link_mbit must be > 0, got {link}")


@dataclass(frozen=True)
class Layout:
    """Who works beside whom, and at what."""

    sites: int
    ranks: int  # of a site
    samplers: int
    batch: float  # answers that a sampler works on at once
    step_answers: float  # that a rank learns from in a step
    sync_every: int
    max_staleness: int
    cores: int | None = None  # that all of them share; None: each has a device of its own
    link: float | None = None  # bytes a second, between a site and the others

    @staticmethod
    def of(config: PipelineConfig, *, cores: int | None, link: float | None) -> Layout:
        group = config.grpo.group
        return Layout(
            sites=config.sites,
            ranks=config.ranks_per_site,
            samplers=config.workers,
            batch=min(config.lease, config.quota) * group,
            step_answers=config.grpo.prompts * group,
            sync_every=config.sync_every,
            max_staleness=config.max_staleness,
            cores=cores,
            link=link,
        )

    @property
    def answers(self) -> float:
        """That a round learns from."""
        return self.sync_every * self.sites * self.ranks * self.step_answers


@dataclass(frozen=True)
class Prediction:
    round_s: float
    bounds: dict[str, float]  # seconds a round that each of them alone would allow
    bound: str  # which of them decides
    answers_s: float  # that are sampled, and learned from, in a second
    staleness: float  # versions, of the longest answer


def predict(rates: Rates, layout: Layout) -> Prediction:
    link_s = rates.round_bytes / layout.link if layout.link else 0.0
    training = layout.sync_every * (rates.step_s + rates.answer_s * layout.step_answers) + rates.round_s
    batches = layout.answers / layout.batch
    batch_s = rates.of_batch(layout.batch)
    most = (1 + layout.max_staleness) * layout.answers / layout.batch  # batches out at once
    at_work = min(layout.samplers, most)
    work = layout.sites * layout.ranks * training + rates.publish_s + batches * batch_s
    bounds = {
        "training": training + link_s + rates.publish_s,
        "sampling": batches * batch_s / at_work,
    }
    if layout.cores is not None:
        bounds["cores"] = work / min(layout.cores, layout.sites * layout.ranks + layout.samplers)
    if link_s > training:
        bounds["links"] = bounds.pop("training")
    bound = max(bounds, key=lambda name: bounds[name])
    round_s = bounds[bound]
    if layout.max_staleness == 0:  # the first batch is there before training begins, then both go on
        waves = math.ceil(batches / at_work) * batch_s
        between = link_s + rates.publish_s + rates.write_s
        in_turn = {
            "training": batch_s + training + between,
            "sampling": waves + training / layout.sync_every + between,
        }
        bound = max(in_turn, key=lambda name: in_turn[name])
        if in_turn[bound] > round_s:
            round_s, bounds, bound = in_turn[bound], bounds | in_turn, f"turns, {bound}"
    return Prediction(
        round_s=round_s,
        bounds=bounds,
        bound=bound,
        answers_s=layout.answers / round_s,
        staleness=rates.of_longest(layout.batch) / round_s if layout.max_staleness else 0.0,
    )


@dataclass(frozen=True)
class Row:
    """A layout, and what is to be expected of it."""

    layout: Layout
    expected: Prediction
    limit: str = ""  # what keeps its samplers from a larger batch


def plan(config: PlanConfig, folder: Path) -> str:
    """-> what to print. The table, the rates and a plot go into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if config.against is not None:
        return _against(config, Path(config.against), folder)
    if config.gpus:
        rates, rows = worked_out(config), splits(config, worked_out(config))
        said = f"{config.gpus} GPUs, {config.sites} sites; by what is known of such a GPU, not measured:"
    else:
        rates, cores = measure(config, folder), _cores()
        shares = itertools.product(range(1, cores + 1), range(1, cores + 1))
        layouts = [
            Layout.of(replace(config, sites=sites, workers=workers), cores=cores, link=_link(config))
            for sites, workers in shares
        ]
        rows = [Row(layout, predict(rates, layout)) for layout in layouts]
        said = f"{cores} cores, which all parts share; measured here by two short runs:"
    _keep(rates, folder)
    draw(rows, config.max_staleness, folder / "plan.png")
    best = max(rows, key=lambda row: row.expected.answers_s)
    text = table(rows, best)
    (folder / "table.md").write_text(text, encoding="utf-8")
    return f"{said}\n\n{text}\nbest: {_sentence(best, config.max_staleness)}\n"


def splits(config: PlanConfig, rates: Rates) -> list[Row]:
    """Each way to split the GPUs into equal sites and samplers, with the batch that gives most."""
    rows, oldest = [], math.inf
    if rates.most_answers is not None and rates.most_answers < 1:
        raise ExperimentError(
            f"{config.target.parameters:.3g} parameters and one answer do not fit into gpu.memory_gb="
            f"{config.gpu.memory_gb:g}: a GPU here is a whole sampler. Count "
            f"several as one, with their memory, bandwidth_gb and tflops together"
        )
    for ranks in range(1, (config.gpus - 1) // config.sites + 1):
        layout = Layout(
            sites=config.sites,
            ranks=ranks,
            samplers=config.gpus - config.sites * ranks,
            batch=1,
            step_answers=config.target.answers / ranks,
            sync_every=config.sync_every,
            max_staleness=config.max_staleness,
            link=_link(config),
        )
        found: list[Row] = []
        for batch in _BATCHES:
            tried = replace(layout, batch=batch)
            expected = predict(rates, tried)
            oldest = min(oldest, expected.staleness)
            limit = ""
            if rates.most_answers is not None and batch > rates.most_answers:
                limit = "memory"
            elif expected.staleness > config.max_staleness:
                limit = "staleness"
            if limit:
                found = [replace(row, limit=limit) if row is found[-1] else row for row in found]
                break
            found.append(Row(tried, expected))
        if found:
            rows.append(max(found, key=lambda row: (row.expected.answers_s, -row.layout.batch)))
    if not rows:
        raise ExperimentError(
            f"no split keeps the longest answer within max_staleness={config.max_staleness}: it takes "
            f"{oldest:.1f} rounds at least. Set max_staleness={math.ceil(oldest)}, or "
            f"sync_every={config.sync_every * math.ceil(oldest / max(1, config.max_staleness))}"
        )
    return rows


def measure(config: PlanConfig, folder: Path) -> Rates:
    """Two short runs on this machine, with as many parts as it has cores or more."""
    from experiments.pipeline import cluster  # Ray takes a second to import
    from experiments.pipeline.run import run

    task = config.task
    many = derive(
        PipelineConfig,
        config,
        {
            "sites": 2,
            "workers": 1,
            "elastic": True,
            "ranks_per_site": 1,
            "max_staleness": 2,
            "steps": _ROUNDS * config.sync_every,
            "eval_every": _ROUNDS * config.sync_every,
            "evaluate_last": True,
        },
        where="the run that measures",
    )
    smaller = replace(config.grpo, prompts=max(1, config.grpo.prompts // 4))
    few = replace(many, lease=max(1, many.lease // 4), **{task: smaller})
    require(
        few.lease < many.lease and smaller.prompts < config.grpo.prompts,
        f"a fourth of a batch is measured, too: lease and {task}.prompts must be 2 or more",
    )
    found = []
    with cluster.started(many, many.processes):
        for number, one in enumerate((few, many), 1):
            print(f"[{number}/2] a short run that measures", file=sys.stderr, flush=True)
            found.append(run(one, folder / "measured"))
    return measured(*found)


def _against(config: PlanConfig, runs: Path, folder: Path) -> str:
    """Predictions, and what came of them."""
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(runs.glob("runs/*.json"))]
    if len(stored) < 2:
        raise ExperimentError(f"against={runs}: two runs or more are needed there, of `compare`")
    rates = measure(config, folder)
    _keep(rates, folder)
    by_label: dict[str, list[float]] = {}
    expected: dict[str, float] = {}
    for path, one in zip(sorted(runs.glob("runs/*.json")), stored, strict=True):
        label = path.name.split(".seed")[0]
        its = derive(PipelineConfig, config, one["config"], where=str(path))
        layout = Layout.of(its, cores=_cores(), link=None)
        expected[label] = predict(rates, layout).answers_s
        by_label.setdefault(label, []).append(layout.answers / (one["seconds_per_step"] * its.sync_every))
    seen = {label: median(values) for label, values in by_label.items()}
    text = held_against(expected, seen)
    (folder / "against.md").write_text(text, encoding="utf-8")
    draw_against(expected, seen, folder / "against.png")
    return text


def held_against(expected: dict[str, float], seen: dict[str, float]) -> str:
    """Markdown: answers per second of every layout, and of ten pairs which is the faster one."""
    lines = ["| layout | answers/s, expected | measured | off by |", "|---|---|---|---|"]
    for label in seen:
        off = expected[label] / seen[label] - 1
        lines.append(f"| {label} | {expected[label]:.0f} | {seen[label]:.0f} | {off:+.0%} |")
    pairs = list(itertools.combinations(sorted(seen), 2))
    chosen = random.Random(0).sample(pairs, min(_PAIRS, len(pairs)))
    right = sum((expected[a] > expected[b]) == (seen[a] > seen[b]) for a, b in chosen)
    worst = max(abs(expected[label] / seen[label] - 1) for label in seen)
    lines.append(f"\nThe better of two was predicted in {right} of {len(chosen)} pairs, chosen by a seed.")
    lines.append(f"The largest error: {worst:.0%}.")
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row], best: Row) -> str:
    lines = [
        "| | training | sampling | answers at once | answers/s | longest staleness | bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        layout, expected = row.layout, row.expected
        lines.append(
            f"| {'→' if row is best else ''} | {layout.sites} × {layout.ranks} | {layout.samplers} "
            f"| {layout.batch:.0f} | {expected.answers_s:.1f} | {expected.staleness:.2f} "
            f"| {expected.bound}{f', {row.limit}' if row.limit and expected.bound == 'sampling' else ''} |"
        )
    return "\n".join(lines) + "\n"


def _sentence(row: Row, max_staleness: int) -> str:
    layout, expected = row.layout, row.expected
    return (
        f"sites={layout.sites} of {layout.ranks}, workers={layout.samplers}, {layout.batch:.0f} answers at "
        f"once: {expected.answers_s:.1f} answers/s, a round in {expected.round_s:.2f} s, bound by "
        f"{expected.bound}; the longest answer is {expected.staleness:.2f} versions old, at most "
        f"{max_staleness}"
    )


def draw(rows: Sequence[Row], max_staleness: int, path: Path) -> None:
    """Throughput, and the age of the longest answer, over the split."""
    names = [f"{row.layout.sites * row.layout.ranks}:{row.layout.samplers}" for row in rows]
    places = range(len(rows))
    marked = {"marker": "." if len(rows) < 30 else ""}
    with plt.rc_context(LOOK):
        figure, (speed, age) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
        for k, bound in enumerate(("training", "sampling", "cores", "links")):
            alone = [
                row.layout.answers / row.expected.bounds[bound] if bound in row.expected.bounds else math.nan
                for row in rows
            ]
            if not all(math.isnan(one) for one in alone):
                speed.plot(places, alone, "--", color=CYCLE[k + 1], label=f"{bound} alone", **marked)
        both = [row.expected.answers_s for row in rows]
        speed.plot(places, both, color=CYCLE[0], linewidth=2.5, label="expected", **marked)
        speed.set(title="Answers per second", ylim=(0, 1.5 * max(both)))
        speed.legend(loc="upper left")
        age.plot(places, [row.expected.staleness for row in rows], color=CYCLE[0], **marked)
        age.axhline(max_staleness, color=CYCLE[3], linestyle="--", label="max_staleness")
        age.set(
            title="Age of the longest answer", xlabel="devices that train : that sample", ylabel="versions"
        )
        age.set_ylim(bottom=0)
        age.legend()
        every = max(1, math.ceil(len(rows) / 16))
        age.set_xticks(list(places)[::every], names[::every])
        saved(figure, path)


def draw_against(expected: dict[str, float], seen: dict[str, float], path: Path) -> None:
    with plt.rc_context(LOOK):
        figure, axis = plt.subplots(figsize=(9, 0.45 * len(seen) + 2))
        for k, label in enumerate(seen):
            axis.plot([expected[label], seen[label]], [k, k], color="#B0B0B0", zorder=1)
        axis.plot(list(seen.values()), range(len(seen)), "o", color=CYCLE[0], label="measured")
        axis.plot(
            [expected[label] for label in seen], range(len(seen)), "D", color=CYCLE[1], label="expected"
        )
        axis.set_yticks(range(len(seen)), list(seen))
        axis.set(title="Answers per second", xlim=(0, None))
        axis.invert_yaxis()
        axis.legend()
        saved(figure, path)


def _keep(rates: Rates, folder: Path) -> None:
    (folder / "rates.json").write_text(json.dumps(vars(rates), indent=1) + "\n", encoding="utf-8")


def _link(config: PlanConfig) -> float | None:
    return None if config.link_mbit is None else config.link_mbit * 1e6 / 8


def _cores() -> int:
    return len(os.sched_getaffinity(0))
