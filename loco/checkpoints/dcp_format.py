"""A state as files of torch.distributed.checkpoint (DCP), read without running anything that they say.

DCP keeps a pickle beside its data, and pickles among them. What it names is held against a list here.
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

from .plain_tree import mapped

_TREE = "loco.tree"  # all that is not a tensor, and where the tensors belong


def write(tree: Any, folder: Path) -> None:
    """What `dcp.save(…, no_dist=True)` writes, which warns each time that it was meant."""
    tensors: dict[str, Tensor] = {}

    def taken_out(where: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors[_free(where, tensors)] = value
        return value.to("meta")

    skeleton = mapped(tree, taken_out)
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

    def put_back(where: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = _free(where, taken)
        taken.add(name)
        return loaded[name]

    return mapped(loaded[_TREE], put_back)


def _free(name: str, taken: Any) -> str:
    """A name of its own for a tensor at "a.b", be it a["a"]["b"] or a["a.b"]."""
    while name in taken or name == _TREE:
        name += "'"
    return name


class _SafePlanner(DefaultLoadPlanner):
    """DCP's own reads bytes with `weights_only=False`, which runs what they say."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _SafeReader(FileSystemReader):
    """DCP's own reads its metadata with pickle, which runs what it says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"{self.path}/.metadata holds something else than metadata")
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path or place.transform_descriptors:
                raise pickle.UnpicklingError(f"{self.path}/.metadata leads out of its folder")
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
        # The folder it was written to, by its name in different Pythons.
        + [(module, PosixPath.__name__) for module in ("pathlib", "pathlib._local")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(
                f"the metadata asks for {module}.{name}, which no metadata needs: nothing of it was run"
            )
        return super().find_class(module, name)
