"""Sites that come and go: each a process that trains a small model and does what the test orders."""

import json
import logging
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sites import context
from states import Snapshot, assert_same, small_model, snapshot, train
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import loco
from loco import kernels
from loco.coordination import commit
from loco.errors import TransportError
from loco.exchange import EXCHANGES
from loco.members.elastic import quorum_membership
from loco.members.elastic.elastic_sites import ElasticSites
from loco.members.repeats import Repeats
from loco.round.joining import recovery
from loco.round.round import Round

PATIENCE = 90.0  # seconds; no test is about time
HEARTBEAT = 1500
KEY = bytes(range(16))


class TornError(BaseException):
    """As Ctrl-C, which a process of multiprocessing would take for its end."""


@dataclass
class Told:
    """What a site tells after a round.

    before, after: its θ, m, e and w before and after; gave_up: whenever it had given a round up.
    sites: the names of those that took part, in order; empty if this site was given θ.
    came: the names of those that were given θ after the round, or turned away.
    """

    round: int
    sites: tuple[str, ...] = ()
    came: tuple[str, ...] = ()
    before: Snapshot = field(default_factory=dict)
    after: Snapshot = field(default_factory=dict)
    gave_up: list[Snapshot] = field(default_factory=list)
    exchange: str = ""
    error: str = ""
    extra: Any = None  # of the checkpoint that was loaded; after a round, what states saved in doubt say
    warned: str = ""


def lighthouse(liveness: int) -> tuple[Any, str]:
    """A server, and host:port of it.

    liveness: as a `Fleet`'s.
    """
    needed = "needs torchft: pip install '.[elastic]'"
    coordination = pytest.importorskip("torchft.coordination", reason=needed)
    server = coordination.LighthouseServer(
        "127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=liveness
    )
    # It calls itself by the host's name, at which it may not listen.
    return server, f"127.0.0.1:{server.address().rpartition(':')[2]}"


class Fleet:
    """A store or a lighthouse in this process, and the sites that were started. Use it in a `with`.

    by: where the sites meet, "store" or "lighthouse".
    key: of the run.
    ranks: of each site. What several ranks tell is put together, and checked to agree.
    shards: FSDP2 divides the parameters among the ranks of a site.
    liveness: milliseconds without a sign of life after which the lighthouse counts a site as dead. Every
        death costs a test so long; where none dies, it may as well be more than any machine is ever busy.
    """

    def __init__(
        self,
        sites: int,
        *,
        by: str = "store",
        key: bytes | None = KEY,
        ranks: int = 1,
        shards: bool = False,
        liveness: int = HEARTBEAT,
    ) -> None:
        self.sites, self.ranks, self.shards = sites, ranks, shards
        self._folder = tempfile.TemporaryDirectory()
        self._meeting: Any
        self._meet: dict[str, Any]
        if by == "lighthouse":
            self._meeting, where = lighthouse(liveness)
            self._meet = {"lighthouse": f"http://{where}"}
        else:
            self._meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._meet = {"at": f"127.0.0.1:{self._meeting.port}"}
        self._key = key
        self._running: dict[str, tuple[Any, Connection]] = {}  # by rank, "s1/0"
        self._started = 0

    def start(self, *names: str, ranks: int | None = None, **options: Any) -> None:
        """A process for each name; it then waits for the run's θ. `options` are PulseLoCo's, or a `key`.

        "s1 again" is one more process of site s1.
        """
        for name in names:
            self._started += 1
            key = options.pop("key", self._key)
            world = ranks or self.ranks
            for rank in self._ranks_of(name):
                del self._running[rank]
            for rank in range(world):
                ours, theirs = context.Pipe()
                own = _World(rank, world, f"{self._folder.name}/{self._started}", self.shards)
                process = context.Process(
                    target=_site,
                    args=(name.split()[0], own, self._meet, self.sites, key, theirs, options),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._running[f"{name}/{rank}"] = process, ours

    def _ranks_of(self, name: str) -> list[str]:
        """Of "s1" all, of "s1/0" one."""
        return [key for key in self._running if name in (key, key.rpartition("/")[0])]

    def order(self, name: str, *command: Any) -> None:
        for key in self._ranks_of(name):
            self._running[key][1].send(command)

    def hear(self, name: str) -> Told:
        """What a site tells next; what it raised is raised here."""
        return put_together([self._heard(key) for key in self._ranks_of(name)], shards=self.shards)

    def _heard(self, name: str) -> Told:
        end = self._running[name][1]
        if not end.poll(PATIENCE):
            raise TimeoutError(f"{name} told nothing within {PATIENCE:g} s")
        try:
            told = pickle.loads(end.recv_bytes())
        except EOFError:
            raise RuntimeError(f"{name} died without a word") from None
        if isinstance(told, str):
            raise RuntimeError(f"{name} failed:\n{told}")
        return told

    def round(self, *names: str) -> dict[str, Told]:
        """Two inner steps and a round on each of these sites."""
        return self._all(names, "round", 2)

    def boundary(self, *names: str) -> dict[str, Told]:
        """Where rounds overlap: two inner steps and a boundary on each of these sites."""
        return self._all(names, "boundary", 2)

    def _all(self, names: Iterable[str], *command: Any) -> dict[str, Told]:
        for name in names:
            self.order(name, *command)
        return told_by(self, names)

    def rounds_until_joined(self, new: str, *names: str) -> list[dict[str, Told]]:
        """Rounds of the others until a site that comes has been given θ, or turned away."""
        rounds = [self.round(*names)]
        while new not in rounds[-1][names[0]].came:
            rounds.append(self.round(*names))
        return rounds

    def has_told(self, name: str, within: float = 0.1) -> bool:
        return all(self._running[key][1].poll(within) for key in self._ranks_of(name))

    def wait_for_requests(self, count: int) -> None:
        """Until so many processes have asked for the next quorum."""
        deadline = time.monotonic() + PATIENCE
        while self._requests() < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _requests(self) -> int:
        if "at" in self._meet:
            listing = self._meeting.get("sites/roll").decode().rpartition(" ")[0]
            return len(json.loads(listing)["waiting"])
        with urllib.request.urlopen(f"{self._meet['lighthouse']}/status") as answer:
            asked = re.search(r"(\d+)/\d+ participants", answer.read().decode())
        return 0 if asked is None else int(asked[1])

    def send(self, name: str, signum: signal.Signals) -> None:
        for key in self._ranks_of(name):
            os.kill(self._running[key][0].pid, signum)

    def wait_for_death(self, name: str) -> None:
        for key in self._ranks_of(name):
            process, _ = self._running[key]
            process.join(PATIENCE)
            assert process.exitcode == -signal.SIGKILL

    def kill(self, name: str) -> None:
        self.send(name, signal.SIGKILL)
        self.wait_for_death(name)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in self._running.values():
            process.kill()
            process.join()
        if "lighthouse" in self._meet:
            self._meeting.shutdown()
        self._folder.cleanup()


def put_together(ranks: list[Told], *, shards: bool) -> Told:
    """What the ranks of a site tell, each of its part, as if the site had one."""
    if len(ranks) == 1:
        return ranks[0]
    first = ranks[0]
    for told in ranks:
        assert (told.round, told.sites, told.came) == (first.round, first.sites, first.came)
        for state in told.gave_up:
            assert_same(state, told.before)
    before = _whole([told.before for told in ranks], shards=shards)
    return replace(
        first,
        before=before,
        after=_whole([told.after for told in ranks], shards=shards),
        gave_up=[before] if any(told.gave_up for told in ranks) else [],
        error="\n".join(told.error for told in ranks if told.error),
        extra=[told.extra for told in ranks]
        if any(told.extra != first.extra for told in ranks)
        else first.extra,
        warned="\n".join(told.warned for told in ranks if told.warned),
    )


def _whole(parts: list[Snapshot], *, shards: bool) -> Snapshot:
    """θ, m and e of all ranks, and w, which each has whole if it is not divided."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if parts[0] and not shards:
        whole["weights"] = parts[0]["weights"]
        for part in parts:
            np.testing.assert_array_equal(part["weights"], whole["weights"])
    return whole


class _World(NamedTuple):
    rank: int
    size: int
    rendezvous: str
    shards: bool


def _site(
    name: str,
    own: _World,
    meet: dict[str, Any],
    sites: int,
    key: bytes | None,
    parent: Connection,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    try:
        if own.size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{own.rendezvous}", rank=own.rank, world_size=own.size
            )
        topology = _Sites(
            sites=sites,
            name=name,
            key=key,
            timeout=30.0,
            dead_after=6.0,
            connect_timeout=10.0,
            **meet,
        )
        _Site(topology, options, shards=own.shards).obey(parent)
    except BaseException:
        parent.send_bytes(pickle.dumps(traceback.format_exc()))


class _Sites(ElasticSites):
    """As `loco.Sites` that come and go, with a limit of its own for links."""

    def membership(
        self, device: torch.device, setup: Mapping[str, Any]
    ) -> quorum_membership.QuorumMembership:
        return quorum_membership.QuorumMembership(self, device, setup)


class _Site:
    def __init__(self, topology: _Sites, options: dict[str, Any], *, shards: bool) -> None:
        self.topology = topology
        self.seed = int(topology.name[1:])  # "s2"
        self.net = small_model(self.seed)
        if shards:
            fully_shard(self.net, mesh=init_device_mesh("cpu", (topology.ranks_per_site,)))
        inner = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        options = {"sync_every": 10_000, "exchange": "gather", **options}  # a model whose entries are few
        self.optimizer = loco.PulseLoCo(inner, topology=topology, **options)
        self.optimizer.register_round_hook(self._note_members)
        self.optimizer.register_report_hook(lambda report: self.reports.append(report.exchange))
        self.applied: tuple[str, ...] = ()
        self.reports: list[str] = []
        self.gave_up: list[Snapshot] = []
        self.checkpoints: dict[str, loco.Checkpoints] = {}  # by folder
        self.saved_in_doubt: list[Any] = []
        failed = Repeats.failed

        def failed_and_told(*args: Any, **kwargs: Any) -> None:
            with suppress(loco.LocoError):  # the round is applied, and not yet shared inside the site
                own = self.optimizer.state_dict()["loco"]  # which must change nothing
                self.saved_in_doubt.append((own["round"], own["undecided_round"]))
                self.gave_up.append(snapshot(self.optimizer))
            failed(*args, **kwargs)

        Repeats.failed = failed_and_told

    def obey(self, parent: Connection) -> None:
        parent.send_bytes(pickle.dumps(Told(self.optimizer.round, after=snapshot(self.optimizer))))
        while True:
            command, *args = parent.recv()
            told = getattr(self, command)(*args)
            if told is not None:
                parent.send_bytes(pickle.dumps(told))

    def round(self, steps: int) -> Told:
        start = 1000 * self.optimizer.round
        self.net.zero_grad()
        inner = self.optimizer.inner
        train(self.net, inner, self.seed, range(start, start + steps))
        before, self.gave_up[:] = snapshot(self.optimizer), []
        try:
            report = self.optimizer.sync()
        except (loco.LocoError, ValueError) as error:
            return Told(self.optimizer.round, error=f"{type(error).__name__}: {error}")
        took_part = report.exchange != "rejoin"
        plan = self.topology.plan
        names, came = (), ()
        if took_part and plan is not None:
            names = tuple(plan.members[k].name for k in plan.workers)
            came = tuple(m.name for m in (*(plan.members[k] for k in plan.newcomers), *plan.strangers))
        after = snapshot(self.optimizer)
        return Told(
            self.optimizer.round,
            names,
            came,
            before,
            after,
            list(self.gave_up),
            report.exchange,
            extra=self.saved_in_doubt,
        )

    def boundary(self, steps: int) -> Told:
        """What it tells as `sites` took part in the round that this boundary has applied."""
        self.applied, self.reports, self.error = (), [], ""
        start = 1000 * self.optimizer.round
        train(self.net, self, self.seed, range(start, start + steps))  # pyright: ignore[reportArgumentType]
        return Told(
            self.optimizer.round,
            self.applied,
            before=self.before,
            after=snapshot(self.optimizer),
            exchange=self.reports[-1] if self.reports else "",
            error=self.error,
        )

    def await_flight(self) -> Told:
        """Until the round in flight has come."""
        overlapped = self.optimizer._loop._overlapped
        assert overlapped is not None
        overlapped.wait()
        return Told(self.optimizer.round)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        """An inner step; `before` is what it has made, before a boundary changes it."""
        loop = self.optimizer._loop
        loop.before_step()
        self.optimizer.inner.step()
        self.before = snapshot(self.optimizer)
        try:
            loop.after_step()
        except (loco.LocoError, ValueError, TornError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _note_members(self, progress: loco.RoundProgress) -> None:
        if progress.phase == "applied":
            self.applied = progress.view.site_names

    def save(self, path: str) -> Told:
        torch.save(self.optimizer.state_dict(), f"{path} {self.topology.rank_in_site}")
        return Told(self.optimizer.round)

    def load(self, path: str) -> Told:
        self.optimizer.load_state_dict(torch.load(f"{path} {self.topology.rank_in_site}"))
        return Told(self.optimizer.round, after=snapshot(self.optimizer))

    def train(self, begin: int, end: int) -> Told:
        """These inner steps, and the rounds that fall due, as a training loop has them."""
        train(self.net, self.optimizer, self.seed, range(begin, end))
        return Told(self.optimizer.round, after=snapshot(self.optimizer))

    def keep(self, folder: str) -> Told:
        """A checkpoint, by loco.Checkpoints."""
        at = {"round": self.optimizer.round, "local_step": self.optimizer.local_step}
        return self._watched(lambda: self._in(folder).save(self.optimizer, at, blocking=True))

    def resume(self, folder: str) -> Told:
        """Load the newest one."""

        def load() -> Any:
            resumed = self._in(folder).load(self.optimizer)
            return resumed.extra if resumed else None

        return self._watched(load)

    def _in(self, folder: str) -> loco.Checkpoints:
        return self.checkpoints.setdefault(folder, loco.Checkpoints(folder))

    def _watched(self, act: Callable[[], Any]) -> Told:
        """Do it, and tell what it returned, raised or warned of."""
        warned: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: warned.append(record.getMessage())
        logging.getLogger("loco").addHandler(handler)
        extra, error = None, ""
        try:
            extra = act()
        except (loco.LocoError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        logging.getLogger("loco").removeHandler(handler)
        after = snapshot(self.optimizer)
        return Told(self.optimizer.round, after=after, error=error, extra=extra, warned="\n".join(warned))

    def settle(self) -> Told:
        """What the ranks of a site whose last call has failed do before the next step."""

        def settle() -> None:
            self.optimizer.settle()

        return self._watched(settle)

    def evaluate(self) -> Told:
        """θ is shown, and the weights are given back."""
        self.optimizer.eval()
        shown = snapshot(self.optimizer)
        self.optimizer.train()
        return Told(self.optimizer.round, before=shown, after=snapshot(self.optimizer))

    def repeat_none(self) -> None:
        self.topology.repeats = 0

    def tear(self) -> None:
        """Ctrl-C in the next boundary's pass over the state."""

        def cut(*args: Any, cross: Any = kernels.cross, **kwargs: Any) -> Any:
            kernels.cross = cross
            raise TornError

        kernels.cross = cut

    def spoil(self) -> None:
        """A NaN, as from a loss that ran away."""
        with torch.no_grad():
            next(self.net.parameters()).view(-1)[0] = float("nan")

    def spoil_once(self, steps: int) -> None:
        """In the last of so many steps."""
        left = iter(range(steps - 1, -1, -1))

        def spoil(*_: object) -> None:
            if next(left, -1) == 0:
                self.spoil()

        self.optimizer.inner.register_step_post_hook(spoil)

    def spoil_steps(self) -> None:
        self.optimizer.inner.register_step_post_hook(lambda *_: self.spoil())

    def die_when(self, moment: str) -> None:
        """In the next round: while sites send their entries, when they vote on what arrived, or once it
        counts; or when this site has given another one θ and not yet m."""
        if moment == "voting":
            Round.vote = _die
        elif moment == "applying":
            Round.apply = _die
        elif moment == "giving":
            recovery.give = _give_half
        else:
            EXCHANGES.update(dict.fromkeys(EXCHANGES, _die))

    def lose_the_verdict(self) -> None:
        """In the next round: the last vote does not reach this site, nor does the store answer."""
        site, vote, decide = self, Round.vote, commit.decide
        self.lost = False

        def lose(self: Round) -> None:
            vote(self)  # the others do hear this site
            if not site.lost:
                site.lost = True
                raise TransportError("the link is cut")

        def no_answer(*args: Any) -> str:
            if not self.cut:
                return decide(*args)
            self.cut = False
            raise TransportError("the store does not answer")

        self.cut = True
        Round.vote, commit.decide = lose, no_answer


def _give_half(
    link: Any, peer: int, head: Any, tensors: list[torch.Tensor], give: Any = recovery.give
) -> None:
    give(link, peer, head, tensors[:1])
    time.sleep(1.0)  # until it has come
    _die()


def _die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def told_by(fleet: Fleet, names: Iterable[str]) -> dict[str, Told]:
    return {name: fleet.hear(name) for name in names}
