"""A state as files of torch.distributed.checkpoint (DCP), read without running any code that they name.

DCP writes its metadata, and everything that is not a tensor, as pickles. Here metadata may name only the
types of a fixed list, and the rest is read with `weights_only=True`.
"""

import io
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from .formats import mapped

_TREE = "loco.tree"  # everything that is not a tensor, and where the tensors belong


def write(tree: Any, folder: Path) -> None:
    """Write what `dcp.save(…, no_dist=True)` writes, without the warning that it gives each time."""
    tensors: dict[str, Tensor] = {}

    def take_out(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors[_unique(path, tensors)] = value
        return value.to("meta")

    skeleton = mapped(tree, take_out)
    planner, writer = DefaultSavePlanner(False, False), FileSystemWriter(folder)
    planner.set_up_planner({_TREE: skeleton, **tensors}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def read(folder: Path) -> Any:
    reader, planner = _SafeReader(folder), _SafePlanner(False, False)
    metadata = reader.read_metadata()
    target: dict[str, Any] = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        if isinstance(kept, dcp_metadata.TensorStorageMetadata)
        else None
        for name, kept in metadata.state_dict_metadata.items()
    }
    planner.set_up_planner(target, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan(
        planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    )
    reader.read_data(planner.finish_plan(plan), planner).wait()
    loaded, taken = planner.state_dict, set()

    def put_back(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = _unique(path, taken)
        taken.add(name)
        return loaded[name]

    return mapped(loaded[_TREE], put_back)


def _unique(name: str, taken: Any) -> str:
    """Distinguishes the tensors tree["a"]["b"] and tree["a.b"], whose paths are both "a.b"."""
    while name in taken or name == _TREE:
        name += "'"
    return name


class _SafePlanner(DefaultLoadPlanner):
    """DCP's planner reads bytes with `weights_only=False`, which runs code that they name."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _SafeReader(FileSystemReader):
    """DCP's reader reads its metadata with pickle, which runs code that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"{self.path}/.metadata does not hold metadata")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path or stored.transform_descriptors:
                raise pickle.UnpicklingError(f"{self.path}/.metadata names a file outside its folder")
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    _ALLOWED = frozenset(
        [(dcp_metadata.__name__, name) for name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING")]
        + [(dcp_files.__name__, "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size")]
        + [
            ("torch", str(dtype).removeprefix("torch."))
            for dtype in vars(torch).values()
            if isinstance(dtype, torch.dtype)
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
