"""Sites as processes, each with an object of its own that does what it is told, in a `Network`."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from experiments.bench.namespaces import Network, leave_network
from experiments.orphans import die_with_parent

# Forked from a server that has torch loaded, a site starts in a tenth of a second.
_context = mp.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "loco"]


class Sites:
    """`count` processes with a link each, joined by gloo; in each of them `actor(site, *args)`.

    `with Sites(4, Actor, …) as sites: results = sites.call("method", …)` calls the method on all sites at
    once and returns what it returned, by site. On leaving, all processes are ended.
    """

    def __init__(self, count: int, actor: Callable[..., Any], *args: Any, timeout: float = 120.0) -> None:
        self.count = count
        self._actor = actor
        self._args = args
        self._timeout = timeout
        self.network = Network()
        self.processes: list[Any] = []
        self._ends: list[Connection] = []

    def __enter__(self) -> Sites:
        _start_server()
        self._folder = tempfile.TemporaryDirectory()
        self.network.__enter__()
        try:
            meeting = str(Path(self._folder.name) / "meeting")
            for site in range(self.count):
                ours, theirs = _context.Pipe()
                process = _context.Process(
                    target=_live,
                    args=(site, self.count, meeting, theirs, self._actor, self._args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ends.append(ours)
                self.processes.append(process)
            for site, pid in enumerate(self._answers(self._timeout)):
                self.network.attach(pid)
                self._ends[site].send_bytes(b"attached")
            self._answers(self._timeout)
        except BaseException:
            self._close()
            raise
        return self

    def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """
        Raises:
            RuntimeError: a site failed, with its traceback, or died.
            TimeoutError: some have not answered in time.
        """
        message = pickle.dumps((method, args))
        for end in self._ends:
            end.send_bytes(message)
        return self._answers(self._timeout if timeout is None else timeout)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        # A second Ctrl-C must not keep the processes alive.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
            for end in self._ends:
                end.close()
            self.network.__exit__(None, None, None)
            self._folder.cleanup()
        finally:
            signal.signal(signal.SIGINT, before)

    def _answers(self, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.count:
            waiting = {end: site for site, end in enumerate(self._ends) if site not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"no answer from sites {sorted(waiting.values())} within {timeout:g} s")
            for end in ready:
                assert isinstance(end, Connection)
                site = waiting[end]
                try:
                    fine, answer = pickle.loads(end.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise RuntimeError(f"site {site} died without a word") from None
                if not fine:
                    raise RuntimeError(f"site {site} failed:\n{answer}")
                answers[site] = answer
        return [answers[site] for site in range(self.count)]


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


def _live(
    site: int, count: int, meeting: str, end: Connection, actor: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    die_with_parent()
    # A core is shared by several sites as it is: one thread each.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    try:
        leave_network()
        _answer(end, os.getpid())
        end.recv_bytes()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=site, world_size=count)
        me = actor(site, *args)
        _answer(end, None)
        while True:
            method, arguments = pickle.loads(end.recv_bytes())
            _answer(end, getattr(me, method)(*arguments))
    except (EOFError, ConnectionError):
        os._exit(0)  # who started it has gone
    except BaseException:
        with suppress(OSError):
            end.send_bytes(pickle.dumps((False, traceback.format_exc())))
        time.sleep(3600)  # its links would break, and the others' errors hide this one


def _answer(end: Connection, answer: Any) -> None:
    end.send_bytes(pickle.dumps((True, answer)))
