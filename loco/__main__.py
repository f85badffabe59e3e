"""The command line: python -m loco COMMAND …"""

import importlib
import sys
from collections.abc import Sequence

from .commands.ended import WRONG

# Imported when it is asked for: a machine that serves weights needs nothing of rounds.
_COMMANDS = {
    "doctor": (
        "loco.commands.doctor.command",
        "before a training: versions, ports, links and clocks of all sites, and what a round will take",
    ),
    "meet": (
        "loco.commands.meet",
        "host the store at which sites meet, so that none of them has to",
    ),
    "sync": (
        "loco.commands.sync",
        "weights for inference workers: serve them over HTTP, or ls, stat, verify, export, pull",
    ),
}
_USAGE = "usage: python -m loco COMMAND …; each has --help\n\n" + "\n".join(
    f"  {name:6}  {what}" for name, (_, what) in _COMMANDS.items()
)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if given[0] not in _COMMANDS:
        print(f"python -m loco: there is no command {given[0]!r}\n{_USAGE}", file=sys.stderr)
        return WRONG
    module, _ = _COMMANDS[given[0]]
    return importlib.import_module(module).main(given[1:])


if __name__ == "__main__":
    sys.exit(main())
