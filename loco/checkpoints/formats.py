"""How a state becomes files, and is read back without running anything that a file says.

"torch" is one file of torch.save's, which `torch.load(…, weights_only=True)` reads anywhere. "dcp" is what
torch.distributed.checkpoint writes. They take the same time; DCP needs room for its largest tensor once more
while it loads, half a second to be imported, and a list of what its own pickles may name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

_FILE = "state.pt"


class _File:
    """A file that remembers why it could not be written: torch makes another error of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write_torch(tree: Any, folder: Path) -> None:
    with (folder / _FILE).open("wb") as raw:
        file = _File(raw)
        try:
            torch.save(tree, file)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:
            raise file.failed or error from error


def _read_torch(folder: Path) -> Any:
    return torch.load(folder / _FILE, map_location="cpu", weights_only=True)


def _write_dcp(tree: Any, folder: Path) -> None:
    from . import dcp_format

    dcp_format.write(tree, folder)


def _read_dcp(folder: Path) -> Any:
    from . import dcp_format

    return dcp_format.read(folder)


FORMATS: dict[str, tuple[Callable[[Any, Path], None], Callable[[Path], Any]]] = {
    "torch": (_write_torch, _read_torch),
    "dcp": (_write_dcp, _read_dcp),
}
