"""Run a function on several ranks, each a process of its own, joined by gloo over loopback."""

import multiprocessing as mp
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import poison
import torch
import torch.distributed as dist

# Processes are forked from a server that has torch loaded, and torch._dynamo, which the first optimizer of
# a process would import: a rank starts in a tenth of a second.
context = mp.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "numpy",
        "pytest",
        "hypothesis",
        "loco",
        "experiments.compare",
    ]
)


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """`function(rank, *args)` on every rank of a fresh process group -> results by rank.

    An exception on any rank ends all of them and is raised here with that rank's traceback.
    """
    return _run(world, [{}] * world, function, args, timeout, sites=1)


def run_worlds(
    names: Sequence[str], ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0
) -> list[list[Any]]:
    """`function(rank, *args)` on every rank of every site, each site a world of its own with variables for
    `loco.Sites` -> results by site and rank."""
    told = {"LOCO_SITES": str(len(names)), "LOCO_AT": f"127.0.0.1:{free_port()}"}
    variables = [told | {"LOCO_SITE": name} for name in names for _ in range(ranks)]
    results = _run(ranks, variables, function, args, timeout, sites=len(names))
    return [results[k : k + ranks] for k in range(0, len(results), ranks)]


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def _run(
    world: int,
    variables: Sequence[Mapping[str, str]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    *,
    sites: int,
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes = []
        for k in range(sites * world):
            ours, theirs = context.Pipe(duplex=False)
            rendezvous = str(Path(folder) / f"rendezvous-{k // world}")
            ready = _Start(k % world, world, rendezvous, variables[k], poison.are_tensors_filled())
            process = context.Process(target=_rank, args=(ready, theirs, function, args), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def error_of(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """The type's name and the text of what `function` raises, as a picklable pair."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def tell(word: str) -> None:
    """Let ranks go on that `hear` it."""
    dist.distributed_c10d._get_default_store().set(f"tests/{word}", "")


def hear(word: str) -> None:
    """Wait until another rank tells it: a test that slept instead would fail on a machine that is busy."""
    dist.distributed_c10d._get_default_store().wait([f"tests/{word}"], timedelta(seconds=60))


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError(f"only ranks {sorted(results)} of {len(ends)} ended within {timeout:g} s")
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.index(end)
            try:
                ok, result = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


class _Start(NamedTuple):
    rank: int
    world: int
    rendezvous: str
    variables: Mapping[str, str]
    filled: bool


def _rank(start: _Start, results: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A suite that was started in the background of a shell has SIGINT ignored, and so would its ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    poison.fill_tensors(start.filled)
    torch.set_num_threads(1)
    rank, world = start.rank, start.world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), **start.variables)
    try:
        if world > 1 or not start.variables:  # a site of one rank needs no process group
            dist.init_process_group(
                "gloo", init_method=f"file://{start.rendezvous}", rank=rank, world_size=world
            )
        message = True, function(rank, *args)
    except BaseException:
        message = False, traceback.format_exc()
    results.send_bytes(pickle.dumps(message))
    results.close()
    # A rank that leaves early would close its links while others still use theirs; all are ended by
    # the parent when the last result is in.
    time.sleep(3600)
