"""Reads DCP files (torch.distributed.checkpoint) of earlier versions, without running code that they name.

DCP writes its metadata, and everything that is not a tensor, as pickles, and its own reader runs what they
name. Here metadata may name only the types of a fixed list, and each item is read with `weights_only=True`. A
rank has written all of its tensors whole, so an item is a tensor.
"""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata

from .formats import Open, check_tree, loaded, mapped

_TREE = "loco.tree"  # everything that is not a tensor, and where the tensors belong


def read(open: Open) -> Any:
    """A rank's state. A pickle.UnpicklingError if a file names code, or a file elsewhere."""
    with open(".metadata") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError(".metadata does not hold metadata")
    items: dict[str, Any] = {}
    ends: dict[str, int] = {}  # of what was read, by file
    for index, stored in sorted(metadata.storage_data.items(), key=lambda item: item[1].offset):
        name, start, length = stored.relative_path, stored.offset, stored.length
        if Path(name).name != name or stored.transform_descriptors:
            raise pickle.UnpicklingError(".metadata names a file outside its folder")
        with open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if not ends.get(name, 0) <= start <= start + length <= size:
                raise ValueError(
                    f".metadata places {length} bytes of {index.fqn} at byte {start} of {name}: outside of "
                    f"its {size} bytes, or where other data are"
                )
            ends[name] = start + length
            file.seek(start)
            items[index.fqn] = loaded(io.BytesIO(file.read(length)))
    check_tree(items[_TREE], "meta")
    return _with_tensors(items[_TREE], lambda name, _: items[name])


def _with_tensors(tree: Any, replacement: Callable[[str, Tensor], Tensor]) -> Any:
    """The tree, with each tensor replaced by `replacement(name, tensor)`. A name is the tensor's path; of
    tensors with one path, as tree["a"]["b"] and tree["a.b"], the later ones have it with a prime."""
    taken = {_TREE}

    def replaced(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        while name in taken:
            name += "'"
        taken.add(name)
        return replacement(name, value)

    return mapped(tree, replaced)


class _MetadataUnpickler(pickle.Unpickler):
    _ALLOWED = frozenset(
        [(dcp_metadata.__name__, name) for name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING")]
        + [(dcp_files.__name__, "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size")]
        + [
            ("torch", str(t).removeprefix("torch."))
            for t in vars(torch).values()
            if isinstance(t, torch.dtype)
        ]
        # The type of the path it was written to, under its name in different versions of Python.
        + [(module, PosixPath.__name__) for module in ("pathlib", "pathlib._local")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(
                f"the metadata names {module}.{name}, which no metadata needs: it was not run"
            )
        return super().find_class(module, name)
