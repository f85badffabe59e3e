"""Sites as processes, each with an object of its own that does what it is told."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.processes.namespaces import Network, leave_network

# Forked from a server that has torch loaded, a site starts in a tenth of a second.
_context = mp.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy"]
_PRELOAD += ["loco.checkpoints.checkpoints", "loco.members.sites", "loco.optimizer"]
_actor: Any = None  # of this process, if it is a site


class Sites:
    """`count` processes, joined by gloo; in each of them `actor(site, *args)`.

    `with Sites(4, Actor, …) as sites: results = sites.call("method", …)` calls the method on all sites at
    once and returns what it returned, by site. On leaving, all processes are ended.

    Args:
        network: in which each has a link of its own; None: they speak over this machine's loopback.
    """

    def __init__(
        self,
        count: int,
        actor: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        network: Network | None = None,
    ) -> None:
        self._count, self._actor, self._args = count, actor, args
        self._timeout = timeout
        self.network = network

    def __enter__(self) -> Sites:
        _start_server()
        with ExitStack() as closing:
            folder = closing.enter_context(tempfile.TemporaryDirectory())
            network = self.network
            if network is not None:
                closing.enter_context(network)
            interface = "lo" if network is None else "eth0"
            self._pools = [
                closing.enter_context(ProcessPoolExecutor(1, _context, _be_alone, (interface,)))
                for _ in range(self._count)
            ]
            for pid in self._answers([pool.submit(os.getpid) for pool in self._pools]):
                closing.callback(_kill, pid)
                if network is not None:
                    network.attach(pid)
            more = (self._count, str(Path(folder) / "meeting"), self._actor, self._args)
            self._answers([pool.submit(_begin, site, *more) for site, pool in enumerate(self._pools)])
            self._closing = closing.pop_all()
        return self

    def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """
        Raises:
            RuntimeError: a site failed, with its traceback, or died.
            TimeoutError: some have not answered in time.
        """
        asked = [pool.submit(_call, method, args) for pool in self._pools]
        return self._answers(asked, timeout)

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not keep the processes alive.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._closing.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def _answers(self, asked: Sequence[Future[Any]], timeout: float | None = None) -> list[Any]:
        timeout = timeout or self._timeout
        done, waiting = wait(asked, timeout, FIRST_EXCEPTION)
        for site, one in enumerate(asked):
            if one in done and (error := one.exception()) is not None:
                raise RuntimeError(f"site {site} failed: {error}") from error
        if waiting:
            late = [site for site, one in enumerate(asked) if one in waiting]
            raise TimeoutError(f"no answer from sites {late} within {timeout:g} s")
        return [one.result() for one in asked]


def _start_server() -> None:
    """Ctrl-C reaches every process of a terminal: keep it from the server, and so from the sites, which would
    report it one by one."""
    _context.set_forkserver_preload(_PRELOAD)
    resource_tracker.ensure_running()  # which would let it through again, if the server had to start it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---- in a site's process ----


def _be_alone(interface: str) -> None:
    if interface != "lo":
        leave_network()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A core is shared by several sites as it is: one thread each.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def _end_with_parent() -> None:
    """When the program that started the site has ended, however it did."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _begin(site: int, count: int, meeting: str, actor: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _actor
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=site, world_size=count)
    _actor = actor(site, *args)


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_actor, method)(*args)
