"""Sites that each have a world of their own find each other by name, at a store that one of them hosts.

One process speaks for each site. The store holds one roll: who has come, and whether it is complete. A site
is on it once, so that two runs never both believe to be the whole.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..errors import AgreementError, TransportError, first_line
from ..logs import SAY_SOON, Waiting
from .authentication import StoreSeals
from .heartbeats import Loss
from .liveness import Liveness
from .register import Register
from .store_client import RemoteStore, StoreClient

BEATS = "sites"  # the name of the heartbeats by which sites know who on the roll is alive
_POLL = 0.1  # seconds
_ANSWERS = 30.0  # seconds: a store that looks up the name of each host that connects may take long at first
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A site, as it comes.

    sites: how many it expects.
    ranks: that it has itself.
    process: a number of the process that speaks for it, which no other process has.
    where: that process, for people.
    """

    site: str
    sites: int
    ranks: int
    process: int
    where: str


@dataclass(frozen=True)
class _Roll:
    """refused: why those who are here can't train together; "" if they can."""

    here: tuple[Arrival, ...] = ()
    is_complete: bool = False
    refused: str = ""

    @classmethod
    def of(cls, value: str) -> "_Roll":
        try:
            found = json.loads(value) if value else {}
            return cls(tuple(Arrival(**one) for one in found.pop("here", [])), **found)
        except (ValueError, TypeError, AttributeError) as error:
            raise AgreementError(
                f"the store at which the sites meet holds something else under their key ({value[:80]!r}): "
                f"all sites need the same version of loco, and a store of their own"
            ) from error

    def __str__(self) -> str:
        here = [asdict(one) for one in self.here]
        return json.dumps({"here": here, "is_complete": self.is_complete, "refused": self.refused})


@dataclass
class Gathering:
    """One site's way to the others.

    Args:
        store: clients clone it.
        mine: this site.
        patience: seconds to wait for the others.
        dead_after: seconds after which a site that gives no sign of life does not count as here.
    """

    store: RemoteStore
    mine: Arrival
    patience: float
    dead_after: float
    _gone: set[int] = field(default_factory=set)  # processes

    def __post_init__(self) -> None:
        try:
            self._client = StoreClient(self.store, limit=max(self.dead_after, _ANSWERS))
            self._liveness = Liveness(self.store, BEATS, self.mine.process, dead_after=self.dead_after)
        except RuntimeError as error:
            raise TransportError(
                f"what listens at {self.store.host}:{self.store.port} does not answer as the sites' store "
                f"does ({first_line(error)}): if it is another program, choose another port (LOCO_AT)",
                lasting=True,
            ) from error
        self._register = Register(self._client, "roll", StoreSeals())

    def gather(self) -> list[Arrival]:
        """Wait until all sites are here -> they, in the order of their names.

        Raises:
            AgreementError: they do not fit together, or this site's name is taken by one that is alive.
            TransportError: not all came within `patience`.
            RuntimeError: the store is gone.
        """
        self._liveness.say("waiting for the other sites")
        try:
            return self._gather()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave: another process may have this site's name now."""
        self._liveness.close()
        self._client.close()

    def _gather(self) -> list[Arrival]:
        deadline, roll = time.monotonic() + self.patience, _Roll()
        with Waiting(_logger, lambda: f"the run's sites: {self._missing(roll)}", first=SAY_SOON):
            while True:
                roll = _Roll.of(self._register.change(self._enter))
                if self.mine not in roll.here:
                    self._clear_the_way(roll)
                elif roll.refused:
                    raise AgreementError(roll.refused)
                elif roll.is_complete:
                    return sorted(roll.here, key=lambda one: one.site)
                elif time.monotonic() > deadline:
                    self._register.change(self._withdraw)
                    raise TransportError(f"{self._missing(roll)} after {self.patience:g} s", lasting=True)
                else:
                    others = [one for one in roll.here if one != self.mine]
                    self._watch(others, roll, deadline - time.monotonic())

    def _enter(self, value: str) -> str | None:
        """Take this site's place on the roll, if it is free."""
        roll, mine = _Roll.of(value), self.mine
        alive = tuple(one for one in roll.here if one.process not in self._gone)
        if mine in roll.here:  # without those that have died while they waited
            waits = not roll.is_complete and not roll.refused
            return str(_Roll(alive)) if waits and alive != roll.here else None
        if roll.is_complete or roll.refused:
            # Who comes back begins anew: those that it trained with have lost it, and come again, too.
            comes_back = any(one.site == mine.site and one not in alive for one in roll.here)
            if alive and (roll.refused or not comes_back):
                return None
            alive = ()
        if any(one.site == mine.site for one in alive):
            return None
        here = (*alive, mine)
        return str(_Roll(here, len(here) == mine.sites, _difference(here)))

    def _withdraw(self, value: str) -> str | None:
        roll = _Roll.of(value)
        if roll.is_complete or self.mine not in roll.here:
            return None
        return str(_Roll(tuple(one for one in roll.here if one != self.mine), refused=roll.refused))

    def _clear_the_way(self, roll: _Roll) -> None:
        """This site's place is taken: by who is dead, or else it is refused."""
        namesakes = [one for one in roll.here if one.site == self.mine.site]
        in_the_way = [one for one in namesakes or roll.here if one.process not in self._gone]
        if self._watch(in_the_way, roll, self.dead_after):
            return
        if roll.refused:
            raise AgreementError(roll.refused)
        if namesakes:
            raise AgreementError(
                f"site {self.mine.site} is here already, in {namesakes[0].where}, and is alive: give every "
                f"site a name of its own (LOCO_SITE), or end that process first"
            )
        raise AgreementError(
            f"{_listed(roll.here)} train with each other already, and {self.mine.site} is none of them: give "
            f"it the name (LOCO_SITE) that it had before, or another address (LOCO_AT) for a run of its own"
        )

    def _watch(self, arrivals: Sequence[Arrival], roll: _Roll, seconds: float) -> bool:
        """-> whether, within some seconds, one of them was found to be gone, or the roll has changed."""
        lost: list[Loss] = []
        deadline, changed = time.monotonic() + seconds, False
        with self._liveness.watching([one.process for one in arrivals], lost.append, reunion=True):
            while not lost and not changed and time.monotonic() < deadline:
                time.sleep(_POLL)
                changed = _Roll.of(self._register.read()) != roll
        for loss in lost:
            if loss.store:
                raise RuntimeError(loss.store)
            self._gone |= {*loss.silent, *loss.gone}
        return bool(lost) or changed

    def _missing(self, roll: _Roll) -> str:
        return f"{len(roll.here)} of {self.mine.sites} sites are here ({_listed(roll.here)})"


def session_of(arrivals: list[Arrival]) -> str:
    """A name that no other gathering has."""
    return hashlib.blake2b(repr([one.process for one in arrivals]).encode(), digest_size=8).hexdigest()


def _difference(here: tuple[Arrival, ...]) -> str:
    """Why these can't train together; "" if they can."""
    for one in here:
        if one.sites != here[0].sites:
            return (
                f"site {here[0].site} expects {here[0].sites} sites, site {one.site} {one.sites}: start all "
                f"with the same number (LOCO_SITES)"
            )
        if one.ranks != here[0].ranks:
            return (
                f"site {here[0].site} has {here[0].ranks} ranks, site {one.site} {one.ranks}: each rank "
                f"exchanges with those of the same number, so launch all sites with as many"
            )
    return ""


def _listed(arrivals: tuple[Arrival, ...]) -> str:
    return ", ".join(sorted(one.site for one in arrivals)) or "none"
