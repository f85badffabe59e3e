"""Real processes that train, fail as they are told to, and tell when they noticed and what they hold.

The store is hosted by a process of its own, as torchrun's agent does, which outlives every site.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from fault_site import Raised, Setup, live
from faulty import Fault
from sites import context, free_port
from states import Snapshot
from switch import Switch

from experiments.processes.namespaces import Network

# multiprocessing looks after all children whenever one is started, and two threads can't ask for one's end.
_one_at_a_time = threading.Lock()


@dataclass
class Told:
    """What a run of several ranks came to, by rank."""

    struck: dict[int, float] = field(default_factory=dict)  # when the last fault befell a rank
    raised: dict[int, list[Raised]] = field(default_factory=dict)
    states: dict[int, list[Snapshot]] = field(default_factory=dict)  # after each round
    reports: dict[int, list[Any]] = field(default_factory=dict)
    last: dict[int, Any] = field(default_factory=dict)  # rounds done, where its slice begins, its θ
    history: dict[int, list[str]] = field(default_factory=dict)  # where rounds overlap: what came after what
    codes: dict[int, int | None] = field(default_factory=dict)  # exit codes

    def within(self, rank: int, victims: Sequence[int]) -> float:
        """Seconds from the fault to the rank's first error since."""
        return self.since(rank, victims)[0].at - min(self.struck[victim] for victim in victims)

    def since(self, rank: int, victims: Sequence[int]) -> list[Raised]:
        began = min(self.struck[victim] for victim in victims)
        return [error for error in self.raised[rank] if error.at >= began]


class Run:
    """`with Run(setup, faults) as run:` the processes are there, and gone afterwards, whatever happens.

    Args:
        faults: what befalls which rank; each strikes once, in the order given for one rank.
        folder: where checkpoints are, and are saved after each round.
        limit: seconds, after which the run counts as a hang.
        switch: the network, if it is to be one of these.
    """

    def __init__(
        self,
        setup: Setup,
        faults: Sequence[Fault] = (),
        *,
        folder: str = "",
        limit: float = 120.0,
        switch: Switch | None = None,
    ) -> None:
        self.setup = setup
        self._switch = switch
        self.told = Told(raised={r: [] for r in range(setup.world)})
        self.waiting: set[int] = set()  # ranks that have raised, and wait to be told what to do
        self.done: set[int] = set()
        self._arguments = setup, tuple(faults), folder
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        self._deadline = time.monotonic() + limit
        self._stack = ExitStack()

    def __enter__(self) -> "Run":
        try:
            self.network = None
            if self.setup.networks:
                self.network = self._stack.enter_context(self._switch or Network())
            for rank in range(-1, self.setup.world):  # the first one hosts the store
                ours, theirs = context.Pipe()
                process = context.Process(target=live, args=(rank, *self._arguments, theirs), daemon=True)
                with _one_at_a_time:
                    process.start()
                theirs.close()
                self._ends.append(ours)
                self._processes.append(process)
            if self.network is not None:
                for process, end in zip(self._processes, self._ends, strict=True):
                    _receive(end)
                    self.network.attach(process.pid)
                    end.send("attached")
            host = "10.0.0.1" if self.network else "127.0.0.1"
            address = host, _receive(self._ends[0]), free_port()
            for end in self._ends[1:]:
                end.send(address)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            _joined(process, 10.0)
        for end in self._ends:
            end.close()
        self._stack.close()

    def all_raised(self, ranks: Sequence[int]) -> None:
        """Until these ranks have raised an error, or have nothing left to do."""
        self.until(lambda: self.waiting | self.done >= set(ranks))

    def until(self, enough: Callable[[], bool]) -> None:
        """Hear what the ranks tell until it is enough; a rank that dies tells no more."""
        while not enough():
            listening = {end: k - 1 for k, end in enumerate(self._ends) if k and not end.closed}
            ready = wait(list(listening), max(self._deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"a hang: {self.told}, done {self.done}, waiting {self.waiting}")
            for end in ready:
                assert isinstance(end, Connection)
                self._hear(listening[end], end)

    def again(self, ranks: Sequence[int] | None = None) -> None:
        """These ranks, or all that wait, repeat what failed."""
        for rank in sorted(self.waiting if ranks is None else ranks):
            self._ends[rank + 1].send("again")
            self.waiting.remove(rank)

    def finish(self) -> None:
        """All repeat what failed until they are through, and end."""
        all_ranks = set(range(self.setup.world))
        while self.done != all_ranks:
            self.again()
            self.until(lambda: bool(self.waiting) or self.done == all_ranks)
        self.end()

    def end(self) -> None:
        """All that are left end, as a program does."""
        for end in self._ends[1:]:
            with suppress(OSError):
                end.send("end")
        self.until(lambda: all(end.closed for end in self._ends[1:]))
        for rank in range(self.setup.world):
            process = self._processes[rank + 1]
            self.told.codes[rank] = _joined(process, max(self._deadline - time.monotonic(), 0.0))

    def send(self, rank: int, number: signal.Signals) -> None:
        """A signal to a rank, or to the store's host, which is −1."""
        os.kill(self._processes[rank + 1].pid, number)

    def link_is_back(self, rank: int) -> None:
        assert self.network is not None
        self.network.cut(rank + 1, back=True)

    def _hear(self, rank: int, end: Connection) -> None:
        try:
            what, value = end.recv()
        except (EOFError, ConnectionResetError):
            end.close()
            return
        if what == "struck":
            self.told.struck[rank], fault = value
            if fault == "cut":
                assert self.network is not None
                self.network.cut(rank + 1)
                end.send("cut")
            if fault == "site killed":
                each = self.setup.ranks_per_site
                for other in range(rank - rank % each, rank - rank % each + each):
                    self.told.struck[other] = self.told.struck[rank]
                    self.send(other, signal.SIGKILL)
        elif what == "raised":
            self.told.raised[rank].append(value)
            self.waiting.add(rank)
        elif what == "ended":
            self.told.states[rank], self.told.reports[rank], self.told.last[rank], self.told.history[rank] = (
                value
            )
            self.done.add(rank)
        else:
            raise RuntimeError(f"rank {rank} failed:\n{value}")


def _joined(process: Any, limit: float) -> int | None:
    wait([process.sentinel], limit)
    with _one_at_a_time:
        process.join(0.0)
        return process.exitcode


def _receive(end: Connection) -> Any:
    if not end.poll(30.0):
        raise TimeoutError("a process did not start")
    return end.recv()
