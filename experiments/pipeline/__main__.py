"""Train by reinforcement, with samples that others make meanwhile.

    python -m experiments.pipeline
    python -m experiments.pipeline sites=2 workers=3 max_staleness=4 steps=480
    python -m experiments.pipeline max_staleness=0 name=synchronous

Ray starts on this machine, or address=HOST:PORT joins a cluster. Results go to runs/<name>/, by default
runs/pipeline/.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.merging import load, to_yaml
from experiments.pipeline.config import PipelineConfig


def main() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nKeys and their defaults:\n\n{to_yaml(PipelineConfig())}")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    try:
        config = load(PipelineConfig, arguments)
        folder = Path("runs") / (config.name or "pipeline")
        from experiments.pipeline.run import run  # Ray takes a second to import

        found = run(config, folder)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: all parts were stopped, and no results were written", file=sys.stderr)
        return 130
    last = found["evaluations"][-1]["scores"]
    shares = found["shares"].items()
    print(f"{found['seconds_per_step']:.3f} s a step, pass@1 {last['pass@1']:.4f}")
    print(f"staleness of tokens: {found['mean_staleness']:.2f} versions; {found['counts']}")
    for part, by in shares:
        print(f"  {part}: " + ", ".join(f"{what} {share:.0%}" for what, share in by.items()))
    print(f"results: {folder}/pipeline.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
