"""Runs the benchmarks named on the command line, or all of them."""

from __future__ import annotations

import importlib
import signal
import sys

# "projection" reads what "wire" and "link" have written.
PARTS = ("kernels", "wire", "link", "projection")
APART = ("large",)  # needs all of a machine's memory, so it runs only by name


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        for part in PARTS:
            _run(part, arguments)
    elif arguments[0] in PARTS + APART:
        _run(arguments[0], arguments[1:])
    else:
        print(
            f"there is no benchmark {arguments[0]!r}; there is: {', '.join(PARTS + APART)}", file=sys.stderr
        )
        return 2
    return 0


def _run(part: str, arguments: list[str]) -> None:
    # Only what is asked for is imported: a part may need what another can do without.
    importlib.import_module(f"experiments.bench.{part}").main(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
