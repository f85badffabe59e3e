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
import os
import sys
from dataclasses import replace
from pathlib import Path

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.plan import memory
from experiments.pipeline.plan.against import hold, runs_in
from experiments.pipeline.plan.config import PlanConfig
from experiments.pipeline.plan.measuring import measured
from experiments.pipeline.plan.prediction import Layout, predict
from experiments.pipeline.plan.rates import Rates, worked_out
from experiments.pipeline.plan.splits import Row, draw, sentence, splits, table
from experiments.settings.checks import require
from experiments.settings.merging import derive

_ROUNDS = 12  # of the runs that measure
_NOT_BUILT = (
    "The pipeline can't run this plan yet: its parts compute on CPUs. What loco itself does is built: rounds "
    "of sharded sites, and updates of vLLM."
)


def plan(config: PlanConfig, folder: Path) -> str:
    """-> what to print. The table, the rates and a plot go into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if config.against is not None:
        runs = runs_in(Path(config.against))
        rates = measure(config, folder)
        _keep(rates, folder)
        return hold(runs, rates, config, _cores(), folder)
    if config.gpus:
        rates = worked_out(config)
        rows = splits(config, rates)
        said = f"{config.gpus} GPUs, {config.sites} sites; by what is known of such a GPU, not measured. "
        said += f"{memory.sentence(config)}\n{_NOT_BUILT}"
    else:
        rates, cores = measure(config, folder), _cores()
        shares = itertools.product(range(1, cores + 1), range(1, cores + 1))
        layouts = [
            Layout.of(replace(config, sites=sites, workers=workers), cores=cores, link=config.link)
            for sites, workers in shares
        ]
        rows = [Row(layout, predict(rates, layout)) for layout in layouts]
        said = f"{cores} cores, which all parts share; measured here by two short runs:"
    _keep(rates, folder)
    draw(rows, config.max_staleness, folder / "plan.png")
    best = max(rows, key=lambda row: row.expected.answers_s)
    text = table(rows, best)
    (folder / "table.md").write_text(text, encoding="utf-8")
    return f"{said}\n\n{text}\nbest: {sentence(best, config.max_staleness)}\n"


def measure(config: PlanConfig, folder: Path) -> Rates:
    """By two short runs on this machine, of three parts: on two cores, they tell what sharing costs, too."""
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
            "save_every": 0,
            "ranks_per_site": 1,
            "max_staleness": 2,
            "steps": _ROUNDS * config.sync_every,
            "eval_every": _ROUNDS * config.sync_every,
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
            layout = Layout.of(one, cores=_cores(), link=None)
            found.append((layout, run(one, folder / "measured")))
    return measured(found)


def _keep(rates: Rates, folder: Path) -> None:
    (folder / "rates.json").write_text(json.dumps(vars(rates), indent=1) + "\n", encoding="utf-8")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
