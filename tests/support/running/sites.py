"""Run a function on several ranks, each a process of its own: of one world, or of one world for each site."""

import logging
import multiprocessing as mp
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import poison
import torch
import torch.distributed as dist

# Processes are forked from a server that has torch loaded, and torch._dynamo, which the first optimizer of
# a process would import: a rank starts in a tenth of a second. The server passes over frameworks that are not
# installed; without its own requirements `experiments` would end it.
context = mp.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "numpy",
        "pytest",
        "hypothesis",
        "loco.attached",
        "loco.checkpoints.checkpoints",
        "loco.members.sites",
        "loco.optimizer",
        *(["experiments.compare"] if find_spec("omegaconf") else []),
        "trl",
        "trl.trainer.grpo_trainer",
        "lightning",
    ]
)


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """`function(rank, *args)` on every rank of a fresh process group -> results by rank.

    An exception on any rank ends all of them and is raised here with that rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        starts = [_Start(f"rank {k}", _as_one_of(k, world), rendezvous, (k, *args)) for k in range(world)]
        return _run(starts, function, timeout)


def run_worlds(
    names: Sequence[str],
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    at: str = "",
    timeout: float = 180.0,
) -> list[list[Any]]:
    """`function(rank, *args)` on every rank of every site, each site a world of its own with variables for
    `loco.Sites` -> results by site and rank. A site of one rank needs no process group, and has none.

    at: where they meet; by default at a free port.
    """
    with tempfile.TemporaryDirectory() as folder:
        starts = [
            _Start(
                f"rank {rank} of {name}",
                site | _as_one_of(rank, ranks),
                f"file://{folder}/rendezvous-{name}" if ranks > 1 else None,
                (rank, *args),
            )
            for name, site in _as_sites(names, at)
            for rank in range(ranks)
        ]
        return _by_site(_run(starts, function, timeout), ranks)


def launch_worlds(
    function: Callable[..., Any],
    *args: Any,
    names: Sequence[str] = ("berlin", "paris"),
    ranks: int = 1,
    timeout: float = 180.0,
) -> list[list[Any]]:
    """As `run_worlds`, but joining is left to `function(*args)`, or to a framework in it: a rank has the
    variables that its site's `torchrun` would give it, and a lone rank none of them."""
    starts = []
    for name, site in _as_sites(names):
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks):
            told = world | {"LOCAL_RANK": str(rank)} | _as_one_of(rank, ranks) if ranks > 1 else {}
            starts.append(_Start(f"rank {rank} of {name}", site | told, None, args))
    return _by_site(_run(starts, function, timeout), ranks)


def free_port() -> int:
    """One that nobody else takes meanwhile: the system gives connections and other listeners higher ones."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class _Start(NamedTuple):
    name: str
    variables: Mapping[str, str]
    rendezvous: str | None  # where it joins a process group before the function runs
    args: tuple[Any, ...]


def _as_one_of(rank: int, world: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world)}


def _as_sites(names: Sequence[str], at: str = "") -> list[tuple[str, dict[str, str]]]:
    told = {"LOCO_SITES": str(len(names)), "LOCO_AT": at or f"127.0.0.1:{free_port()}"}
    return [(name, told | {"LOCO_SITE": name}) for name in names]


def _by_site(results: list[Any], ranks: int) -> list[list[Any]]:
    return [results[k : k + ranks] for k in range(0, len(results), ranks)]


def _run(starts: Sequence[_Start], function: Callable[..., Any], timeout: float) -> list[Any]:
    ends: dict[Connection, int] = {}
    processes = []
    try:
        for k, start in enumerate(starts):
            ours, theirs = context.Pipe(duplex=False)
            args = (start, poison.are_tensors_filled(), theirs, function)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            ends[ours] = k
            processes.append(process)
        return _collect(ends, [start.name for start in starts], timeout)
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


def _collect(ends: Mapping[Connection, int], names: Sequence[str], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        waiting = [end for end, k in ends.items() if k not in results]
        ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
        if not ready:
            late = ", ".join(names[ends[end]] for end in waiting)
            raise TimeoutError(f"{late} did not end within {timeout:g} s")
        for end in ready:
            assert isinstance(end, Connection)
            k = ends[end]
            try:
                ok, result = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RuntimeError(f"{names[k]} died without a word") from None
            if not ok:
                raise RuntimeError(f"{names[k]} failed:\n{result}")
            results[k] = result
    return [results[k] for k in range(len(ends))]


def _rank(start: _Start, filled: bool, results: Connection, function: Callable[..., Any]) -> None:
    poison.fill_tensors(filled)
    torch.set_num_threads(1)
    os.environ.update(start.variables)
    try:
        if start.rendezvous is not None:
            # Ranks of a test meet by a file. Heartbeats then need the interpreter lock, which is warned of.
            logging.getLogger("loco.members.fixed").addFilter(lambda one: "FileStore" not in one.getMessage())
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=start.rendezvous, rank=rank, world_size=world)
        message = True, function(*start.args)
    except BaseException:
        message = False, traceback.format_exc()
    results.send_bytes(pickle.dumps(message))
    results.close()
    # A rank that leaves early would close its links while others still use theirs; all are ended by
    # the parent when the last result is in.
    time.sleep(3600)
