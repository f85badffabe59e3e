"""What each rank prints, logs and dies of, in a file of its own: the console shows one sentence for all."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO


class RankLog:
    """`runs/<name>/logs/rank-3.log`, from now until the process ends; a restart goes on below."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank}.log").open("a", encoding="utf-8", buffering=1)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._file.write(
            f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}, restart {restart}\n"
        )
        # Where it stood when it crashed, or when the launcher stopped it because another rank had failed.
        faulthandler.enable(self._file)
        faulthandler.register(signal.SIGTERM, self._file, all_threads=False, chain=True)
        lines = logging.StreamHandler(self._file)
        lines.setLevel(logging.INFO)
        lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        console = logging.StreamHandler(sys.stderr)
        console.setLevel(logging.WARNING)
        logging.getLogger().addHandler(lines)
        logging.getLogger().addHandler(console)
        for name in ("loco", "experiments"):
            logging.getLogger(name).setLevel(logging.INFO)
        sys.stdout, sys.stderr = _Tee(sys.stdout, self._file), _Tee(sys.stderr, self._file)

    def ended(self, sentence: str) -> None:
        """By the exception that is being handled, if there is one."""
        if sys.exc_info()[0] is not None:
            self._file.write(traceback.format_exc())
        self._file.write(f"error: {sentence}\n")
        self._file.flush()


class _Tee:
    """A stream that a file gets, too, but for a progress bar's strokes."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        if "\r" not in text:
            self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
