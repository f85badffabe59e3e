"""Ctrl-C at a line that a test chooses."""

import linecache
import re
import sys
from types import FrameType
from typing import Any


class Interruption:
    """Raises KeyboardInterrupt before the `number`-th line, within what the pattern matches, that this thread
    comes to. Where a `with` is left its line comes again, before its lock is released: no signal is handled
    there, so the interruption comes at the line after it."""

    def __init__(self, number: int, within: str) -> None:
        self.number, self.within = number, within
        self.where = ""
        self._line: dict[FrameType, int] = {}  # the latest

    def __enter__(self) -> "Interruption":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not re.match(self.within, f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"):
            return None
        if event == "return":
            self._line.pop(frame, None)
        if event == "line":
            before, self._line[frame] = self._line.get(frame, 0), frame.f_lineno
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            leaves = before > frame.f_lineno and text.lstrip().startswith("with ")
            self.number -= not leaves
            if self.number == 0 and not leaves:
                self.where = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace
