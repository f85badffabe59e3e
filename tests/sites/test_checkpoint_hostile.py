"""Files made to hang, to fill memory or to lead elsewhere are damage: all load the checkpoint before."""

import json
import logging
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_checkpoints import save_as_dcp
from hypothesis import example, given
from hypothesis import strategies as st
from selection import CHECKPOINTS
from sites import error_of, run_ranks
from states import assert_same, snapshot, train
from test_checkpoint import built

import loco
from loco.checkpoints.rank_manifest import read_manifest, sha256

GIB = 1 << 30


def data_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix in (".pt", ".distcp"))


def told(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def listed(folder: Path, path: Path) -> None:
    """The manifest says of a file what is true."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    told(folder, files=files | {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}})


def pipe(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zeros(folder: Path) -> None:
    """Whose size is what the manifest says."""
    path = data_of(folder)
    path.unlink()
    path.symlink_to("/dev/zero")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    told(folder, files=files | {path.name: files[path.name] | {"bytes": 0}})


def link(path: Path) -> None:
    root = next(folder for folder in path.parents if not folder.name.startswith(("round", "rank")))
    other = root / f"elsewhere-{path.name}"
    path.rename(other)
    path.symlink_to(other)


def large(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 8 * GIB)


def deep(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def nested(folder: Path) -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
    told(folder, settings={"sync_every": value})


def infinite(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": Infinity, "x": ', 1))


ANY: dict[str, Callable[[Path], object]] = {
    "a pipe for the data": lambda folder: pipe(data_of(folder)),
    "a pipe for the manifest": lambda folder: pipe(folder / "manifest.json"),
    "a pipe for the folder": pipe,
    "a folder for the data": lambda folder: (data_of(folder).unlink(), (folder / "state.pt").mkdir()),
    "endless zeros": zeros,
    "a link to the data": lambda folder: link(data_of(folder)),
    "a link to the manifest": lambda folder: link(folder / "manifest.json"),
    "a link to the folder": link,
    "a link to the round's folder": lambda folder: link(folder.parent),
    "a manifest of 8 GiB": large,
    "deep JSON": deep,
    "settings that nest": nested,
    "an infinite size": infinite,
    "a negative size": lambda folder: told(folder, files={"state.pt": {"bytes": -1, "sha256": ""}}),
    "endless sites": lambda folder: told(folder, num_sites=10**19, world=10**19),
    "more sites than ranks": lambda folder: told(folder, num_sites=10**6),
    "no sites": lambda folder: told(folder, num_sites=0, world=0),
    "parameters that are numbers": lambda folder: told(folder, parameters=[1, 2]),
    "files that are a list": lambda folder: told(folder, files=["state.pt"]),
    "no files": lambda folder: (told(folder, files={}), pipe(data_of(folder))),
}


def saved_anew(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        path = folder / "state.pt"
        tree = torch.load(path, weights_only=True)
        change(tree)
        torch.save(tree, path)
        listed(folder, path)

    return save


def compressed(folder: Path) -> None:
    path, other = folder / "state.pt", folder / "other"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    other.rename(path)
    listed(folder, path)


def shared_lists(tree: Any) -> None:
    """2^60 leaves."""
    value: Any = [1, 2]
    for _ in range(60):
        value = [value, value]
    tree["extra"] = value


def deep_lists(tree: Any) -> None:
    for _ in range(150):
        tree["extra"] = [tree["extra"]]


def expanded(tree: Any) -> None:
    tree["optimizer"]["loco"]["anchor"] = torch.zeros(1).expand(1 << 40)


TORCH: dict[str, Callable[[Path], object]] = {
    "compressed data": compressed,
    "lists that are shared": saved_anew(shared_lists),
    "lists that nest": saved_anew(deep_lists),
    "an expanded tensor": saved_anew(expanded),
    "a tensor without data": saved_anew(lambda tree: tree.update(extra=torch.zeros(9, device="meta"))),
    "another round": saved_anew(lambda tree: tree["optimizer"]["loco"].update(round=1 << 70)),
}


def placed(**changes: Any) -> Callable[[Path], None]:
    """The metadata say that the anchor lies elsewhere."""

    def rewrite(folder: Path) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        (index,) = (one for one in metadata.storage_data if "anchor" in one.fqn)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)
        path.write_bytes(pickle.dumps(metadata))
        listed(folder, path)

    return rewrite


def placed_at(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        make(folder / "more")
        placed(relative_path="more", offset=0, length=GIB)(folder)

    return rewrite


DCP: dict[str, Callable[[Path], object]] = {
    "a pipe that is not listed": placed_at(pipe),
    "zeros that are not listed": placed_at(lambda path: path.symlink_to("/dev/zero")),
    "a file that is not listed": placed_at(lambda path: path.write_bytes(bytes(10))),
    "a file outside": placed(relative_path="../more"),
    "data behind the end": placed(offset=GIB),
    "data before the beginning": placed(offset=-1),
    "more data than there are": placed(length=GIB),
    "the data of others": placed(offset=0),
    "metadata of which a part is missing": lambda folder: (
        os.truncate(folder / ".metadata", 100),
        listed(folder, folder / ".metadata"),
    ),
}
CASES = [("torch", how) for how in (*ANY, *TORCH)] + [("dcp", how) for how in (*ANY, *DCP)]


@contextmanager
def little_memory() -> Iterator[None]:
    """This process may have a GiB more than it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + GIB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def resumed_after(rank: int, folder: str, format: str) -> Any:
    """Two checkpoints; the newer one of rank 1 is spoilt in each way, and put right again."""
    kept, root = {}, Path(folder)
    net, optimizer = built()
    with loco.Checkpoints(root) as checkpoints:
        for step in range(8):
            train(net, optimizer, rank, range(step, step + 1))
            if step in (3, 7):
                checkpoints.save(optimizer)
                kept[optimizer.round] = snapshot(optimizer)
    if format == "dcp":
        save_as_dcp(root, rank)
    torch.distributed.barrier()
    rounds = root / "round-00000002"
    found, warned = {}, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("loco").addHandler(handler)
    for how in [one for of, one in CASES if of == format]:
        spoil = (ANY | TORCH | DCP)[how]
        warned.clear()
        if rank == 0:
            shutil.copytree(rounds, root / "whole")
            spoil(rounds / "rank-00001")
        torch.distributed.barrier()
        other = built(60 + rank)[1]
        with little_memory():
            error = error_of(loco.Checkpoints(root).load, other)
        assert error[0] or snapshot(other)["anchor"].tobytes() == kept[other.round]["anchor"].tobytes()
        found[how] = other.round, error, "\n".join(warned)
        torch.distributed.barrier()
        if rank == 0:
            for path in (rounds, *root.glob("elsewhere*")):
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
            (root / "whole").rename(rounds)
        torch.distributed.barrier()
    other = built(60 + rank)[1]
    loco.Checkpoints(root).load(other)
    assert_same(snapshot(other), kept[2])
    return found


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_all_ranks_go_on_from_the_checkpoint_before(tmp_path: Path, format: str) -> None:
    both = run_ranks(2, resumed_after, str(tmp_path), format, timeout=120)
    for how in both[0]:
        for found in both:
            round, error, _ = found[how]
            assert (round, error[0]) == (1, ""), f"{how}: {error}"
        assert "round-00000002/rank-00001" in both[1][how][2], how


MANIFEST: dict[str, Any] = {
    "round": 2,
    "local_step": 0,
    "save": "a",
    "world": 4,
    "num_sites": 2,
    "ranks_per_site": 2,
    "site": 1,
    "rank_in_site": 0,
    "name": "",
    "settings": {"kind": "DiLoCo"},
    "parameters": [["w", [2], "torch.float32"]],
    "digest": "d",
    "format": "torch",
    "files": {},
    "loco": "0.1",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from([*MANIFEST, "x"]), JSON, max_size=3))
@example({"num_sites": 10**19, "world": 2 * 10**19})
@example({"round": True})
@example({"files": {"..": {"bytes": 0, "sha256": ""}}})
@example({"files": {"a\0b": {"bytes": 0, "sha256": ""}}})
def test_a_manifest_is_read_or_refused_whatever_it_says(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("rank")
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | changes))
    kind, text = error_of(read_manifest, folder)
    if kind:
        assert kind in ("ValueError", "OSError", "FileNotFoundError")
        assert str(folder) in text
    else:
        assert read_manifest(folder).rank < read_manifest(folder).world <= 1 << 20
