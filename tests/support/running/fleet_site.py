"""A site of a `Fleet`: a process that trains a small model and does what the test orders."""

import logging
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from states import Snapshot, small_model, snapshot, train
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


class World(NamedTuple):
    rank: int
    size: int
    rendezvous: str
    shards: bool


def serve(
    name: str,
    own: World,
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
