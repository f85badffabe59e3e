"""Run a function at several sites, each a world of its own: only LOCO_* variables join them."""

import multiprocessing as mp
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

# Forked from a server that has imported the frameworks, a site starts in a tenth of a second.
context = mp.get_context("forkserver")
context.set_forkserver_preload(
    ["pytest", "torch._dynamo", "loco", "trl", "trl.trainer.grpo_trainer", "lightning"]
)


def run_worlds(
    function: Callable[..., Any],
    *args: Any,
    names: Sequence[str] = ("berlin", "paris"),
    ranks: int = 1,
    timeout: float = 180.0,
) -> list[list[Any]]:
    """`function(*args)` on every rank of every site -> results by site and rank.

    Every rank has the variables that its site's `torchrun` would give it; a lone rank has none of them.
    An exception on any rank ends all of them and is raised here with that rank's traceback.
    """
    at = f"127.0.0.1:{free_port()}"
    ends: dict[Connection, tuple[int, int]] = {}
    processes = []
    try:
        for site, name in enumerate(names):
            port = str(free_port())
            for rank in range(ranks):
                variables = {"LOCO_SITES": str(len(names)), "LOCO_SITE": name, "LOCO_AT": at}
                if ranks > 1:
                    variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                    variables |= {
                        "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    }
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(variables, theirs, function, args), daemon=True, name=f"{name} {rank}"
                )
                process.start()
                theirs.close()
                ends[ours] = site, rank
                processes.append(process)
        return _collect(ends, names, ranks, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _collect(
    ends: dict[Connection, tuple[int, int]], names: Sequence[str], ranks: int, timeout: float
) -> list[list[Any]]:
    results: list[list[Any]] = [[None] * ranks for _ in names]
    deadline = time.monotonic() + timeout
    waiting = set(ends)
    while waiting:
        ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
        if not ready:
            late = sorted(ends[end] for end in waiting)
            raise TimeoutError(f"sites and ranks {late} have not ended within {timeout:g} s")
        for end in ready:
            assert isinstance(end, Connection)
            site, rank = ends[end]
            try:
                ok, result = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} of {names[site]} died without a word") from None
            if not ok:
                raise RuntimeError(f"rank {rank} of {names[site]} failed:\n{result}")
            results[site][rank] = result
            waiting.discard(end)
    return results


def _rank(
    variables: dict[str, str], results: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # A suite that was started in the background of a shell has SIGINT ignored, and so would its ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(variables)
    try:
        import torch

        torch.set_num_threads(1)
        message = True, function(*args)
    except BaseException:
        message = False, traceback.format_exc()
    results.send_bytes(pickle.dumps(message))
    results.close()
    # A rank that leaves early would close its links while others still use theirs; all are ended by
    # the parent when the last result is in.
    time.sleep(3600)
