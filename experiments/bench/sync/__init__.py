"""What it costs to keep inference workers at the trainer's weights (`loco.sync`).

    python -m experiments.bench sync
    python -m experiments.bench sync --quick
    python -m experiments.bench sync --only sizes speed

sizes        bytes of a changed weight, beside the entropy and other people's formats
speed        finding, coding, decoding and writing changes, beside a plain copy
memory       what a publisher and a subscriber take beside the model
links        from `publish` to live weights over shaped links; needs root
engine       the pause of a vLLM that generates; needs vLLM, see below
projection   the same for 10^12 parameters, by arithmetic from the tables above

Every part checks that what a subscriber ends up with are the publisher's weights, bit for bit, before it says
what that took. Rows go to experiments/results/bench/sync_<part>.csv, with a plot beside most of them.

vLLM has an environment of its own, which `make vllm` makes and tests; elsewhere its part is left out:

    .venv-vllm/bin/python -m experiments.bench sync --only engine
"""

from __future__ import annotations

import importlib
import time

from experiments.bench.measuring import RESULTS, arguments_of

# The last one reads what the others have written.
PARTS = ("sizes", "speed", "memory", "links", "engine", "projection")


def main(arguments: list[str]) -> None:
    parser = arguments_of("sync", __doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    options = parser.parse_args(arguments)
    run = {"run": int(time.time())}
    for part in PARTS:
        if part in options.only:
            print(f"-- {part}")
            importlib.import_module(f"experiments.bench.sync.{part}").measure(
                options.out, run, quick=options.quick
            )
