"""Checkpoints in the format of torch.distributed.checkpoint (DCP), as earlier versions of loco wrote them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from loco.checkpoints.dcp_format import _TREE, _with_tensors
from loco.checkpoints.rank_manifest import read_manifest, sha256
from loco.checkpoints.restore import read_folder


def save_as_dcp(folder: str | Path, rank: int) -> None:
    """The checkpoints that a rank has saved there become those of an earlier version."""
    for path in Path(folder).glob(f"round-*/rank-{rank:05}"):
        manifest, tree = read_manifest(path), read_folder(path)
        for name in manifest.files:
            (path / name).unlink()
        (path / "manifest.json").unlink()
        write(tree, path)
        files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in path.iterdir()}
        replace(manifest, format="dcp", files=files).write(path)


def write(tree: Any, folder: Path) -> None:
    """Write what `dcp.save(…, no_dist=True)` writes, without the warning that it gives each time."""
    tensors: dict[str, Tensor] = {}

    def take_out(name: str, tensor: Tensor) -> Tensor:
        tensors[name] = tensor
        return tensor.to("meta")

    skeleton = _with_tensors(tree, take_out)
    planner, writer = DefaultSavePlanner(False, False), FileSystemWriter(folder)
    planner.set_up_planner({_TREE: skeleton, **tensors}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])
