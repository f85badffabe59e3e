"""What a checkpoint can hold, and how it becomes files. Reading one never runs code that a file names.

"torch" is one file of torch.save's, which `torch.load(…, weights_only=True)` reads anywhere. "dcp" is what
torch.distributed.checkpoint writes. Both take the same time; while it loads, DCP needs memory for a second
copy of its largest tensor, and importing it takes half a second.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_FILE = "state.pt"
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def mapped(tree: Any, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    """The same dicts, lists and tuples, with every other value replaced by `leaf(path, value)`.

    A path is like "a.0.b". Subclasses become the plain types.
    """
    if isinstance(tree, dict):
        return {
            leaf(path, key): mapped(value, leaf, f"{path}.{key}" if path else str(key))
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        items = [mapped(value, leaf, f"{path}.{k}" if path else str(k)) for k, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return leaf(path, tree)


def host_copy(tree: Any) -> Any:
    """A copy in host memory, which training does not change.

    Raises:
        ValueError: it holds something other than plain data; names its path.
    """
    return mapped(tree, _copied)


def _copied(path: str, value: Any) -> Any:
    if type(value) in (Tensor, Parameter):
        return value.detach().to("cpu", copy=True)
    if type(value) in _PLAIN_TYPES:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # a numpy.float64 is a float, and an IntEnum's member an int
    raise ValueError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, "
        f"strings, tensors, and dicts, lists and tuples of them, so that reading one never runs code"
    )


def _write_torch(tree: Any, folder: Path) -> None:
    with (folder / _FILE).open("wb") as file:
        try:
            torch.save(tree, file)
        except RuntimeError as error:
            raise error.__context__ or error from None  # why the file could not be written


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
