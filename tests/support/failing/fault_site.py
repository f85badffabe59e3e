"""A rank of the fault harness: it trains by a script, fails as it is told to, and tells what it sees."""

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import faulty
import numpy as np
import torch
import torch.distributed as dist
from faulty import Fault
from scripted import Scripted, parameters
from states import Snapshot, snapshot
from torch._C._distributed_c10d import PrefixStore, TCPStore

import loco
from experiments.processes.namespaces import leave_network
from experiments.processes.orphans import die_with_parent
from loco.coordination.hosted_store import host_at
from loco.coordination.store_client import host_and_port
from loco.round.overlap import overlapped
from loco.wire import framing

NUMEL = 1003
STEPS = 2  # inner steps per round


@dataclass(frozen=True)
class Setup:
    world: int = 3
    ranks_per_site: int = 1
    rounds: int = 3
    dead_after: float = 2.0
    patience: float = 40.0
    timeout: float = 40.0
    outlier_factor: float | None = None
    networks: bool = False  # every process in a network namespace of its own
    repeats: int = 0  # so that each error is to be seen
    worlds: bool = False  # every site has a world of its own: `loco.Sites`, whose store the first one hosts
    overlap: bool = False  # rounds travel beside the inner steps


@dataclass(frozen=True)
class Raised:
    """An error of a rank."""

    at: float  # by the machine's monotonic clock, which all processes share
    kind: str
    text: str
    round: int  # which was attempted
    unchanged: bool  # θ, m, e and w are what they were before it


def live(rank: int, setup: Setup, faults: tuple[Fault, ...], folder: str, end: Connection) -> None:
    """The whole life of a process; rank −1 hosts the store."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if setup.networks:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            leave_network()
            end.send(None)
            end.recv()
        if rank < 0:
            store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
            end.send(store.port)
            time.sleep(3600)
        host, port, meeting = end.recv()
        store = TCPStore(host, port, setup.world, False, timedelta(seconds=60))
        site, rank_in_site = divmod(rank, setup.ranks_per_site)
        if setup.worlds:
            of_site = PrefixStore(f"world {site}", store)
            dist.init_process_group("gloo", store=of_site, rank=rank_in_site, world_size=setup.ranks_per_site)
            topology = _joined(setup, site, f"{host}:{meeting}", store)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=setup.world)
            topology = loco.Topology(ranks_per_site=setup.ranks_per_site, **_limits(setup))
        Site(rank, topology, setup, faults, folder, port, end).train()
    except SystemExit:
        raise
    except BaseException:
        with suppress(OSError):
            end.send(("failed", traceback.format_exc()))
        raise


def _joined(setup: Setup, site: int, at: str, store: TCPStore) -> loco.Sites:
    """The first site hosts the store at which all meet: the others wait until it does."""
    if site > 0:
        store.wait(["the first site is there"], timedelta(seconds=60))
    sites = setup.world // setup.ranks_per_site
    if site == 0 and dist.get_rank() == 0:
        host_at(*host_and_port(at))
        store.set("the first site is there", "")
    return loco.Sites(sites, site="abc"[site], at=at, **_limits(setup))


def _limits(setup: Setup) -> dict[str, Any]:
    return {
        "dead_after": setup.dead_after,
        "patience": setup.patience,
        "timeout": setup.timeout,
        "repeats": setup.repeats,
    }


class Site:
    """One rank. It waits for a word of the harness after each error, and before it ends."""

    def __init__(
        self,
        rank: int,
        topology: loco.SiteTopology,
        setup: Setup,
        faults: tuple[Fault, ...],
        folder: str,
        port: int,
        end: Connection,
    ) -> None:
        framing.LEAST = framing.MOST = 256  # a payload of several frames
        self.setup = setup
        self.end = end
        self._port = port
        self._folder = f"{folder}/{rank}"
        self._mends: list[Callable[[], object]] = []
        mine = [fault for fault in faults if fault.rank == rank]
        early = [fault for fault in mine if fault.at == "construction"]
        self._built = early[0].what if early else ""
        self._may_refuse = any(fault.at == "construction" for fault in faults)
        self.inner = Scripted(parameters(3, NUMEL), 3, topology.site)
        self.optimizer = self._build(topology)
        self.checkpoints = loco.Checkpoints(self._folder) if folder else None
        if self.checkpoints is not None:
            self.checkpoints.load(self.optimizer)
            self.inner.count = STEPS * self.optimizer.round + self.optimizer.local_step
        for fault in mine:
            if fault.at != "construction":
                faulty.arm(fault, lambda: self.optimizer.round, lambda fault=fault: self._do(fault))
        self.states = [snapshot(self.optimizer)]
        self.reports: list[Any] = []
        self.history: list[str] = []

    def train(self) -> None:
        if self.setup.overlap:
            self._train_overlapped()
        else:
            self._train()
        self._say_goodbye()
        if self.end.recv() != "end":
            raise AssertionError("an unknown word")

    def _train_overlapped(self) -> None:
        """An error is raised at the boundary after the one at which its round was sent off, and the next step
        crosses that one again. The history tells what came after what."""
        outer = self.optimizer.outer_state
        self.inner.count += STEPS * (outer.on_its_way > 0)
        note(self.history, self.inner, "step")
        for event in ("cross", "land", "take_back"):
            note(self.history, overlapped, event)
        while not self.optimizer.is_synced or self.optimizer.round < self.setup.rounds:
            is_sent = self.optimizer.round + (outer.on_its_way > 0) >= self.setup.rounds
            try:
                (self.optimizer.sync if is_sent else self.optimizer.step)()
            except loco.LocoError as error:
                self._tell(error, self.optimizer.round + 1, snapshot(self.optimizer))
            else:
                if self.checkpoints is not None and self.optimizer.local_step == 0:
                    self._save()
        self.states.append(snapshot(self.optimizer))

    def _train(self) -> None:
        while self.optimizer.round < self.setup.rounds:
            for _ in range(STEPS - 1):
                self.optimizer.step()
            self._through(self.optimizer.round + 1)
            if self.checkpoints is not None:
                self._save()

    def _through(self, number: int) -> None:
        """The last inner step and the round, which is repeated until it is done."""
        before: list[Snapshot] = []
        rounds = self.optimizer._loop
        sync = rounds.run_round

        def noted() -> Any:
            before.append(snapshot(self.optimizer))
            return sync()

        rounds.run_round = noted
        attempt: Callable[[], Any] = self.optimizer.step
        while self.optimizer.round < number:
            try:
                attempt()
            except loco.LocoError as error:
                self._tell(error, number, before[0])
            attempt = sync
        rounds.run_round = sync
        self.states.append(snapshot(self.optimizer))
        self.reports.append(self.optimizer.last_report)

    def _save(self) -> None:
        assert self.checkpoints is not None
        before, saved = snapshot(self.optimizer), False
        while not saved:
            try:
                self.checkpoints.save(self.optimizer, blocking=True)
                saved = True
            except loco.LocoError as error:
                self._tell(error, self.optimizer.round, before)

    def _tell(self, error: loco.LocoError, number: int, before: Snapshot) -> None:
        now, after = time.monotonic(), snapshot(self.optimizer)
        same = all(np.array_equal(before[name], after[name]) for name in before)
        self.end.send(("raised", Raised(now, type(error).__name__, str(error), number, same)))
        if self.end.recv() == "end":
            self._say_goodbye()
            raise SystemExit(0)
        while self._mends:
            self._mends.pop()()

    def _say_goodbye(self) -> None:
        """θ, and how many rounds it has seen, tell whether all agreed on the last one."""
        last = (
            self.optimizer.round,
            self.optimizer.outer_state.start,
            snapshot(self.optimizer)["anchor"].tobytes(),
        )
        self.end.send(("ended", (self.states, self.reports, last, self.history)))

    def _build(self, topology: loco.SiteTopology) -> loco.PulseLoCo:
        options: dict[str, Any] = {"sync_every": STEPS, "outlier_factor": self.setup.outlier_factor}
        options["overlap"] = self.setup.overlap
        if self._built:
            self.end.send(("struck", (time.monotonic(), self._built)))
            options["outer_lr"] = 0.5
        before = _flat(self.inner)
        try:
            return loco.PulseLoCo(self.inner, topology=topology, **options)
        except loco.LocoError as error:
            if not self._may_refuse:
                raise
            same = np.array_equal(before, _flat(self.inner))
            self.end.send(("raised", Raised(time.monotonic(), type(error).__name__, str(error), 0, same)))
            self.end.recv()
            self.end.send(("ended", ([], [], None, [])))
            raise SystemExit(0) from None

    def _do(self, fault: Fault) -> None:
        self.end.send(("struck", (time.monotonic(), fault.what)))
        if fault.what in ("cut", "site killed"):  # by the harness
            self.end.recv()
        elif fault.what == "closed":
            faulty.close_links(self._port)
        elif fault.what == "late":
            time.sleep(fault.seconds)
        elif fault.what == "full disk":
            self._mends.append(faulty.fill(self._folder))
        else:
            mend = faulty.DEEDS[fault.what](self.optimizer)
            if mend is not None:
                self._mends.append(mend)


def _flat(inner: Scripted) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in inner.param_groups[0]["params"]]).numpy()


def note(history: list[str], owner: Any, name: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on the history has the name of this function each time that it has returned.

    Args:
        put: a monkeypatch's, if it is to end.
    """
    plain = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        history.append(name)
        return result

    put(owner, name, noted)
