"""What a checkpoint can hold, and how it becomes a file, which `torch.load(…, weights_only=True)` reads.

Reading one never runs code that the file names.
"""

import logging
import os
import stat
import zipfile
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn import Parameter

from ..logs import Progress

_logger = logging.getLogger(__name__)
_FILE = "state.pt"
_DEEPEST = 100  # dicts, lists and tuples in each other
Open = Callable[[str], BinaryIO]  # of a checkpoint's file, by name
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


def write(tree: Any, folder: Path) -> None:
    sizes: list[int] = []
    mapped(tree, lambda _, value: sizes.append(value.nbytes if isinstance(value, Tensor) else 0))
    with (
        (folder / _FILE).open("wb") as file,
        Progress(_logger, f"writing {folder}", sum(sizes), lambda: os.fstat(file.fileno()).st_size),
    ):
        try:
            torch.save(tree, file)
        except RuntimeError as error:
            raise error.__context__ or error from None  # why the file could not be written


def opened(path: Path) -> BufferedReader:
    """A file in a rank's folder, to be read. Reading a pipe or a device might never end, and a link can lead
    to one.

    Raises:
        ValueError, OSError: it is no regular file, or one of the two folders around it is a link.
    """
    for folder in path.parents[:2]:
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link, not the folder that was written: copy that there")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def loaded(file: BinaryIO) -> Any:
    """What torch.save has written. Compressed data, or its older format, could take any amount of memory."""
    with zipfile.ZipFile(file) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise ValueError("its data are compressed, which torch.save does not do")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def check_tree(tree: Any, device: str = "cpu", *, depth: int = 0, seen: set[int] | None = None) -> None:
    """Of what was read: a ValueError if a walk through it could take long, or a copy much memory."""
    seen = set() if seen is None else seen
    if isinstance(tree, Tensor):
        if tree.device.type != device:
            raise ValueError(f"it holds a tensor on {tree.device}")
        is_dense = tree.layout == torch.strided
        if is_dense and tree.numel() * tree.element_size() > tree.untyped_storage().nbytes():
            raise ValueError(f"it holds a tensor of shape {tuple(tree.shape)} whose elements share memory")
    elif isinstance(tree, dict | list | tuple) and tree:
        if depth == _DEEPEST or id(tree) in seen:
            raise ValueError(f"it nests more than {_DEEPEST} deep, or holds a list or dict in two places")
        seen.add(id(tree))
        for value in tree.values() if isinstance(tree, dict) else tree:
            check_tree(value, device, depth=depth + 1, seen=seen)


def read(open: Open) -> Any:
    with open(_FILE) as file:
        return loaded(file)
