"""How loco's commands end: 130 by Ctrl-C, and 2 with a sentence after a mistake."""

import sys
from collections.abc import Callable

from ..errors import LocoError

WRONG, INTERRUPTED = 2, 130


def ended(program: str, run: Callable[[], int]) -> int:
    """The exit status of a command.

    Args:
        program: its name, before the sentence.
        run: the command -> its exit status; may raise LocoError, ValueError or OSError.
    """
    try:
        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (LocoError, ValueError, OSError) as error:
        where = getattr(error, "filename", None)
        sentence = f"{where}: {error.strerror}" if isinstance(error, OSError) and where else str(error)
        print(f"{program}: {sentence}", file=sys.stderr)
        return WRONG
