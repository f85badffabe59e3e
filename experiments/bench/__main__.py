"""Runs the benchmarks named on the command line, or all of them."""

from __future__ import annotations

import importlib
import signal
import sys

# "projection" reads what "wire" and "link" have written.
PARTS = ("kernels", "wire", "link", "projection", "peers", "sync")
APART = ("large", "shards")  # run only by name: one needs all of a machine's memory, the other many processes


def main(arguments: list[str]) -> int:
    parts = PARTS
    if arguments and not arguments[0].startswith("-"):
        parts, arguments = (arguments[0],), arguments[1:]
    if parts[0] not in PARTS + APART:
        known = ", ".join(PARTS + APART)
        print(f"there is no benchmark {parts[0]!r}; there is: {known}", file=sys.stderr)
        return 2
    for part in parts:
        # Only what is asked for is imported: a part may need what another can do without.
        importlib.import_module(f"experiments.bench.{part}").main(arguments)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
