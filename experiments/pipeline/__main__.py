"""Train by reinforcement learning while other processes sample.

    python -m experiments.pipeline
    python -m experiments.pipeline sites=2 workers=3 max_staleness=4 steps=480
    python -m experiments.pipeline max_staleness=0 name=synchronous
    python -m experiments.pipeline compare preset=pipeline_modes        several, one after the other
    python -m experiments.pipeline plan gpus=64                         how to split devices
    python -m experiments.pipeline links mbit=100                       over slow links, on this machine

Ray starts on this machine, or address=HOST:PORT joins a cluster. Results go to runs/<name>/, by default
runs/pipeline/.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.pipeline.compare import PipelineCompareConfig, compare
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.links import LinksConfig, links
from experiments.pipeline.plan.config import PlanConfig
from experiments.pipeline.plan.planning import plan
from experiments.settings.merging import load, to_yaml


def main() -> int:
    arguments = sys.argv[1:]
    programs = {"compare": _compare, "plan": _plan, "links": _links}
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nKeys and their defaults:\n\n{to_yaml(PipelineConfig())}")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    try:
        if arguments and arguments[0] in programs:
            programs[arguments[0]](arguments[1:])
        else:
            _run(arguments)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: all parts were stopped, and no results were written", file=sys.stderr)
        return 130
    return 0


def _run(arguments: list[str]) -> None:
    config = load(PipelineConfig, arguments)
    folder = Path("runs") / (config.name or "pipeline")
    from experiments.pipeline import cluster  # Ray takes a second to import
    from experiments.pipeline.run import run

    try:
        with cluster.started(config, config.processes):
            found = run(config, folder)
    except KeyboardInterrupt:
        from experiments.pipeline.learning.saving import newest_round

        if (newest := newest_round(folder / "checkpoints")) is not None:
            print(f"\nresume=true goes on from the checkpoints of round {newest}", file=sys.stderr)
        raise
    last = found["evaluations"][-1]["score"]
    print(f"{found['seconds_per_step']:.3f} s a step, {found['metric']} {last:.4f}")
    print(f"staleness of tokens: {found['mean_staleness']:.2f} versions; {found['counts']}")
    for part, by in found["shares"].items():
        print(f"  {part}: " + ", ".join(f"{what} {share:.0%}" for what, share in by.items()))
    print(f"results: {folder}/report.html, and pipeline.json and pipeline.png beside it")


def _compare(arguments: list[str]) -> None:
    config = load(PipelineCompareConfig, arguments)
    folder = Path("runs") / (config.name or "pipelines")
    print(compare(config, folder), end="")
    print(f"results: {folder}/table.md and compared.png")


def _plan(arguments: list[str]) -> None:
    config = load(PlanConfig, arguments)
    folder = Path("runs") / (config.name or "pipeline-plan")
    print(plan(config, folder), end="")
    print(f"results: {folder}")


def _links(arguments: list[str]) -> None:
    config = load(LinksConfig, arguments)
    folder = Path("runs") / (config.name or "pipeline-links")
    print(links(config, folder), end="")
    print(f"results: {folder}/table.md and links.png")


if __name__ == "__main__":
    sys.exit(main())
