"""Runs the benchmarks named on the command line, or all of them."""

from __future__ import annotations

import importlib
import signal
import sys

PARTS = ("kernels", "wire", "peers", "sync", "overlap", "link")  # the last one ends here without root


def main(arguments: list[str]) -> int:
    parts = list(PARTS)
    if arguments and not arguments[0].startswith("-"):
        parts, arguments = arguments[:1], arguments[1:]
    if parts[0] not in PARTS:
        print(f"there is no benchmark {parts[0]!r}; there is: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for part in parts:
        # Only what is asked for is imported: a part may need what another can do without.
        module = importlib.import_module(f"experiments.bench.{'peers' if part == 'link' else part}")
        module.main([*(module.OVER_LINKS if part == "link" else []), *arguments])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
