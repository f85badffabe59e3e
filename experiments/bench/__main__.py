"""Runs the benchmarks named on the command line, or all of them."""

from __future__ import annotations

import importlib
import signal
import sys

# A part is a module and the arguments that come before those of the command line.
PARTS = {
    "kernels": ("kernels", []),
    "wire": ("wire", []),
    "peers": ("peers", []),
    "sync": ("sync", []),
    "link": ("peers", ["--over-links"]),  # last, because it ends here without root
}


def main(arguments: list[str]) -> int:
    parts = list(PARTS)
    if arguments and not arguments[0].startswith("-"):
        parts, arguments = arguments[:1], arguments[1:]
    if parts[0] not in PARTS:
        print(f"there is no benchmark {parts[0]!r}; there is: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for part in parts:
        module, own = PARTS[part]
        # Only what is asked for is imported: a part may need what another can do without.
        importlib.import_module(f"experiments.bench.{module}").main([*own, *arguments])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
