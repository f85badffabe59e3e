"""A list in the store by which sites that each have a world of their own find each other by name.

One process of each site enters it, and waits for a quorum: all sites that begin together. Sites that stay the
same do so once; sites that come and go before each round. All quorums come from one list, and a site is on it
once, so two runs never both take themselves for the whole.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import ne
from typing import Any

from ..errors import AgreementError, LocoError, TransportError, first_line, seconds
from ..logs import SAY_SOON, Waiting
from .authentication import StoreSeals
from .compare_and_set import CompareAndSetKey
from .heartbeats import Loss
from .liveness import Liveness
from .store_client import RemoteStore, StoreClient

BEATS = "sites"  # the name of the heartbeats that tell which sites on the list are alive
_POLL = 0.001, 0.02  # seconds: at first, when a round may be about to begin, and later
_ANSWERS = 30.0  # seconds: a store that looks up the name of each host that connects may take long at first
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A site's entry in the list.

    sites: how many it expects.
    at_least: how many are enough when others are lost.
    ranks: how many it has itself.
    process: a number that only the process which entered it has.
    where: that process, for errors.
    asked: for how many quorums this process has asked, with this one.
    claim: what else it tells those of its quorum.
    """

    site: str
    sites: int
    at_least: int
    ranks: int
    process: int
    where: str
    asked: int = 0
    claim: dict[str, Any] = field(default_factory=dict)

    @property
    def can_lose_none(self) -> bool:
        """Its run is always of the same sites."""
        return self.at_least == self.sites


@dataclass(frozen=True)
class _Listing:
    """The list.

    waiting: for the next quorum.
    quorum: the latest one. Those of it who live and have not come again are waited for.
    name: of that quorum, and of no other.
    refused: why the sites that wait can't train together; "" if they can.
    """

    waiting: tuple[Arrival, ...] = ()
    quorum: tuple[Arrival, ...] = ()
    name: str = ""
    refused: str = ""

    @classmethod
    def of(cls, value: str) -> "_Listing":
        try:
            found = json.loads(value) if value else {}
            waiting, quorum = (
                tuple(Arrival(**one) for one in found.pop(part, [])) for part in ("waiting", "quorum")
            )
            return cls(waiting, quorum, **found)
        except (ValueError, TypeError, AttributeError) as error:
            raise AgreementError(
                f"the store at which the sites meet holds something else under their key ({value[:80]!r}): "
                f"all sites need the same version of loco, the same key or none, and a store of their own"
            ) from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def processes(self) -> list[Arrival]:
        """Each once, as it came last."""
        return list({one.process: one for one in (*self.quorum, *self.waiting)}.values())


class SiteDirectory:
    """Enters one site into the list, and waits for the others.

    Args:
        store: clients clone it.
        mine: this site.
        dead_after: seconds after which a site without heartbeats no longer counts as here.
        key: nobody else can write to the list then; None: it is believed.

    Raises:
        TransportError: what listens there is no such store.
    """

    def __init__(
        self, store: RemoteStore, mine: Arrival, *, dead_after: float, key: bytes | None = None
    ) -> None:
        self._mine = mine
        self._dead_after = dead_after
        self._last: tuple[Arrival, ...] = ()  # its latest quorum, for a store that has been started again
        self._gone: dict[int, int] = {}  # processes, and how often they had asked by then
        seals = StoreSeals(key)
        try:
            self._client = StoreClient(store, limit=max(dead_after, _ANSWERS))
            self._liveness = Liveness(store, BEATS, mine.process, dead_after=dead_after, seals=seals)
        except RuntimeError as error:
            raise TransportError(
                f"what listens at {store.host}:{store.port} does not answer as the sites' store "
                f"does ({first_line(error)}): if it is another program, choose another port (LOCO_AT)",
                lasting=True,
                has_remedy=True,
            ) from error
        self._entry = CompareAndSetKey(self._client, "roll", seals)

    def ask(self, claim: dict[str, Any], patience: float) -> tuple[str, list[Arrival]]:
        """Enter this site, and wait for a quorum -> its name, which no other has, and its sites, in the order
        of their names. Those of the latest quorum who live belong to it, and all who wait for it.

        Args:
            claim: what this site tells the others.
            patience: seconds to wait for those who live, or have yet to come.

        Raises:
            AgreementError: they do not fit together, or this site's name is taken by one that is alive.
            TransportError: not all came within `patience`.
            RuntimeError: the store is gone. It can be asked again, also if it was started again meanwhile.
        """
        self._mine = replace(self._mine, claim=claim, asked=self._mine.asked + 1)
        self._liveness.say("waiting for the other sites")
        try:
            return self._wait(patience)
        except BaseException as error:  # Ctrl-C, too: nobody is to count on this site
            if isinstance(error, LocoError) or not isinstance(error, RuntimeError):  # the store answers
                with suppress(RuntimeError):
                    self._entry.change(self._withdrawn)
            raise

    def close(self) -> None:
        """Stop the heartbeats: from now on another process may take this site's name."""
        self._liveness.close()
        self._client.close()

    def _wait(self, patience: float) -> tuple[str, list[Arrival]]:
        deadline, listing, name = time.monotonic() + patience, _Listing(), secrets.token_hex(8)
        soon = SAY_SOON if self._mine.asked == 1 else None  # later, others may have longer steps
        with Waiting(_logger, lambda: f"the run's sites: {self._missing(listing)}", first=soon):
            while True:
                listing = _Listing.of(self._entry.change(lambda value: self._entered(value, name)))
                if self._mine in listing.quorum:
                    self._last = listing.quorum
                    return listing.name, sorted(listing.quorum, key=lambda one: one.site)
                if self._mine not in listing.waiting:
                    in_the_way, why = self._obstacle(listing)
                    if in_the_way and self._watch(in_the_way, self._dead_after, self._is_free) is None:
                        raise AgreementError(why)
                elif listing.refused:
                    raise AgreementError(listing.refused)
                elif time.monotonic() > deadline:
                    raise too_few(self._missing(listing), patience)
                else:
                    left = deadline - time.monotonic()
                    now = self._watch(listing.processes, left, partial(ne, listing)) or listing
                    if self._mine not in (*now.waiting, *now.quorum):  # the others took this site for dead
                        self._mine = replace(self._mine, asked=self._mine.asked + 1)

    def _entered(self, value: str, name: str) -> str | None:
        """Add this site, if it can be. `name`: of the quorum, if it is the last that was missing."""
        listing, mine = _Listing.of(value) if value else _Listing(quorum=self._last), self._mine
        if mine in listing.quorum or (mine in listing.waiting and listing.refused):
            return None
        if self._obstacle(listing)[0]:
            return None
        latest = self._latest(listing)
        waiting = self._alive(listing.waiting)
        if mine not in waiting:
            waiting = [*(one for one in waiting if one.process != mine.process), mine]
        refused, come = _difference(waiting), {one.process for one in waiting}
        if not refused and len(waiting) >= mine.at_least and all(one.process in come for one in latest):
            return str(_Listing(quorum=tuple(waiting), name=name))
        entered = _Listing(tuple(waiting), tuple(latest), listing.name, refused)
        return None if entered == listing else str(entered)

    def _withdrawn(self, value: str) -> str | None:
        listing = _Listing.of(value)
        waiting = tuple(one for one in listing.waiting if one.process != self._mine.process)
        return None if waiting == listing.waiting else str(replace(listing, waiting=waiting))

    def _alive(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """One that was only stopped, or cut off, asks once more when it is back."""
        return [one for one in arrivals if one.asked > self._gone.get(one.process, -1)]

    def _latest(self, listing: _Listing) -> list[Arrival]:
        """Those of the latest quorum who are waited for."""
        latest = self._alive(listing.quorum)
        lost = {one.site for one in listing.quorum} - {one.site for one in latest}
        if self._mine.can_lose_none and self._mine.site in lost:
            return []  # without that one the others can't go on: they come anew, too
        return latest

    def _obstacle(self, listing: _Listing) -> tuple[list[Arrival], str]:
        """Sites that live, and beside whom this one can't be added; and why."""
        mine, latest = self._mine, self._latest(listing)
        others = [one for one in (*latest, *self._alive(listing.waiting)) if one.process != mine.process]
        namesakes = [one for one in others if one.site == mine.site]
        if listing.refused and mine not in listing.waiting:
            return others, listing.refused
        if namesakes:
            return namesakes, (
                f"site {mine.site} is here already, in {namesakes[0].where}, and is alive: give every "
                f"site a name of its own (LOCO_SITE), or end that process first"
            )
        if any(one.process == mine.process for one in latest):
            return [], ""
        if latest and mine.can_lose_none:
            return latest, (
                f"{_listed(latest)} train with each other already, and {mine.site} is none of them: "
                f"give it the name (LOCO_SITE) that it had before, or another address (LOCO_AT) for a run of "
                f"its own"
            )
        why = _difference((*latest, mine))
        return (latest, why) if why else ([], "")

    def _is_free(self, listing: _Listing) -> bool:
        return not self._obstacle(listing)[0]

    def _watch(
        self, arrivals: Sequence[Arrival], seconds: float, until: Callable[[_Listing], bool]
    ) -> _Listing | None:
        """-> the list, once one of them is found dead or it is as it should be; None after some seconds."""
        lost: list[Loss] = []
        others = [one.process for one in self._alive(arrivals) if one.process != self._mine.process]
        with self._liveness.watching(others, lost.append, left_may_return=True):
            began, now = time.monotonic(), _Listing.of(self._entry.read())
            while not lost and not until(now):
                waited = time.monotonic() - began
                if waited >= seconds:
                    return None
                time.sleep(min(_POLL[0] + waited / 10, _POLL[1]))
                now = _Listing.of(self._entry.read())
        for loss in lost:
            if loss.store:
                raise RuntimeError(loss.store)
            self._gone |= {
                one.process: one.asked for one in arrivals if one.process in (*loss.silent, *loss.gone)
            }
        return now

    def _missing(self, listing: _Listing) -> str:
        mine, come = self._mine, {one.process for one in listing.waiting}
        if late := [one for one in self._alive(listing.quorum) if one.process not in come]:
            return f"{_listed(late)}, alive and not here yet"
        needed = "" if mine.can_lose_none else f", and {mine.at_least} are needed"
        return f"{len(come)} of {mine.sites} sites are here ({_listed(listing.waiting)}){needed}"


def too_few(here: str, patience: float) -> TransportError:
    """Args: here: how many have come, of how many."""
    return TransportError(
        f"{here} after {seconds(patience)}. Start the sites that are missing, or give them more time "
        f"(LOCO_PATIENCE)",
        lasting=True,
        has_remedy=True,
    )


def _difference(here: Sequence[Arrival]) -> str:
    """Why these can't train together; "" if they can."""
    for one in here:
        if one.sites != here[0].sites:
            return (
                f"site {here[0].site} expects {here[0].sites} sites, site {one.site} {one.sites}: start all "
                f"with the same number (LOCO_SITES)"
            )
        if one.at_least != here[0].at_least:
            return (
                f"site {here[0].site} goes on with at least {here[0].at_least} sites, site {one.site} with "
                f"{one.at_least}: start all with the same number (LOCO_AT_LEAST)"
            )
        if one.ranks != here[0].ranks:
            return (
                f"site {here[0].site} has {here[0].ranks} ranks, site {one.site} {one.ranks}: each rank "
                f"exchanges with those of the same number, so launch all sites with as many"
            )
    return ""


def _listed(arrivals: Sequence[Arrival]) -> str:
    return ", ".join(sorted(one.site for one in arrivals)) or "none"
