"""A list in the store by which sites that each have a world of their own find each other by name.

One process of each site enters it. The list says which sites are here, and whether they are all. A site is on
it once, so two runs never both take themselves for the whole.
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
from .compare_and_set import CompareAndSetKey
from .heartbeats import Loss
from .liveness import Liveness
from .store_client import RemoteStore, StoreClient

BEATS = "sites"  # the name of the heartbeats that tell which sites on the list are alive
_POLL = 0.1  # seconds
_ANSWERS = 30.0  # seconds: a store that looks up the name of each host that connects may take long at first
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A site's entry in the list.

    sites: how many it expects.
    ranks: how many it has itself.
    process: a number that only the process which entered it has.
    where: that process, for errors.
    """

    site: str
    sites: int
    ranks: int
    process: int
    where: str


@dataclass(frozen=True)
class _Listing:
    """The list.

    refused: why the sites that are here can't train together; "" if they can.
    """

    here: tuple[Arrival, ...] = ()
    is_complete: bool = False
    refused: str = ""

    @classmethod
    def of(cls, value: str) -> "_Listing":
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
class SiteDirectory:
    """Enters one site into the list, and waits for the others.

    Args:
        store: clients clone it.
        mine: this site.
        patience: seconds to wait for the others.
        dead_after: seconds after which a site without heartbeats no longer counts as here.
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
        self._entry = CompareAndSetKey(self._client, "roll", StoreSeals())

    def join(self) -> list[Arrival]:
        """Enter this site, and wait until all are here -> their entries, in the order of their names.

        Raises:
            AgreementError: they do not fit together, or this site's name is taken by one that is alive.
            TransportError: not all came within `patience`.
            RuntimeError: the store is gone.
        """
        self._liveness.say("waiting for the other sites")
        try:
            return self._join()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the heartbeats: from now on another process may take this site's name."""
        self._liveness.close()
        self._client.close()

    def _join(self) -> list[Arrival]:
        deadline, listing = time.monotonic() + self.patience, _Listing()
        with Waiting(_logger, lambda: f"the run's sites: {self._missing(listing)}", first=SAY_SOON):
            while True:
                listing = _Listing.of(self._entry.change(self._enter))
                if self.mine not in listing.here:
                    self._clear_the_way(listing)
                elif listing.refused:
                    raise AgreementError(listing.refused)
                elif listing.is_complete:
                    return sorted(listing.here, key=lambda one: one.site)
                elif time.monotonic() > deadline:
                    self._entry.change(self._withdraw)
                    raise TransportError(f"{self._missing(listing)} after {self.patience:g} s", lasting=True)
                else:
                    others = [one for one in listing.here if one != self.mine]
                    self._watch(others, listing, deadline - time.monotonic())

    def _enter(self, value: str) -> str | None:
        """Add this site, if its name is free."""
        listing, mine = _Listing.of(value), self.mine
        alive = tuple(one for one in listing.here if one.process not in self._gone)
        if mine in listing.here:  # without those that have died while they waited
            waits = not listing.is_complete and not listing.refused
            return str(_Listing(alive)) if waits and alive != listing.here else None
        if listing.is_complete or listing.refused:
            # A returning site starts a new list; its old peers have lost it, and rejoin too.
            comes_back = any(one.site == mine.site and one not in alive for one in listing.here)
            if alive and (listing.refused or not comes_back):
                return None
            alive = ()
        if any(one.site == mine.site for one in alive):
            return None
        here = (*alive, mine)
        return str(_Listing(here, len(here) == mine.sites, _difference(here)))

    def _withdraw(self, value: str) -> str | None:
        listing = _Listing.of(value)
        if listing.is_complete or self.mine not in listing.here:
            return None
        return str(_Listing(tuple(one for one in listing.here if one != self.mine), refused=listing.refused))

    def _clear_the_way(self, listing: _Listing) -> None:
        """This site can't be added: return once what is in its way is found dead, or raise."""
        namesakes = [one for one in listing.here if one.site == self.mine.site]
        in_the_way = [one for one in namesakes or listing.here if one.process not in self._gone]
        if self._watch(in_the_way, listing, self.dead_after):
            return
        if listing.refused:
            raise AgreementError(listing.refused)
        if namesakes:
            raise AgreementError(
                f"site {self.mine.site} is here already, in {namesakes[0].where}, and is alive: give every "
                f"site a name of its own (LOCO_SITE), or end that process first"
            )
        raise AgreementError(
            f"{_listed(listing.here)} train with each other already, and {self.mine.site} is none of them: "
            f"give it the name (LOCO_SITE) that it had before, or another address (LOCO_AT) for a run of its "
            f"own"
        )

    def _watch(self, arrivals: Sequence[Arrival], listing: _Listing, seconds: float) -> bool:
        """-> whether, within some seconds, one of them was found dead, or the list has changed."""
        lost: list[Loss] = []
        deadline, changed = time.monotonic() + seconds, False
        with self._liveness.watching([one.process for one in arrivals], lost.append, left_may_return=True):
            while not lost and not changed and time.monotonic() < deadline:
                time.sleep(_POLL)
                changed = _Listing.of(self._entry.read()) != listing
        for loss in lost:
            if loss.store:
                raise RuntimeError(loss.store)
            self._gone |= {*loss.silent, *loss.gone}
        return bool(lost) or changed

    def _missing(self, listing: _Listing) -> str:
        return f"{len(listing.here)} of {self.mine.sites} sites are here ({_listed(listing.here)})"


def session_of(arrivals: list[Arrival]) -> str:
    """A name that no other complete list has."""
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
