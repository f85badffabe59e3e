"""Sites that each have a world of their own, joined at an address at which one of them hosts a store."""

import json
from contextlib import suppress
from typing import Any

import torch

from ..errors import AgreementError, LocoError, TransportError
from ..net.linking import link_ranks
from ..net.listening import Endpoint
from ..net.mesh import Mesh
from ..net.transport import Transport
from .fixed import what_ranks_are_called
from .meeting import Meeting
from .own_world import check_one_site, own_world

_PHASE = "waiting for this site's first rank, which meets the other sites"


class JoinedWorlds:
    """`Ranks` of a `FixedSites`: each site's own world, one after the other in the order of the sites' names.

    Args:
        sites: how many.
        site: this one's name.
        at: host:port. The site whose machine has this address hosts the store there.
        endpoint: where this rank listens.
        patience: seconds to wait for the others.
        dead_after: as `loco.Topology`.

    Raises:
        ValueError: the address is none, or no store can be hosted at it.
        AgreementError: the sites, or the ranks of this one, do not fit together.
        TransportError: not all came, or nobody hosts the store.
    """

    told = b""

    def __init__(
        self, sites: int, site: str, at: str, *, endpoint: Endpoint, patience: float, dead_after: float
    ) -> None:
        own = self._own = own_world(patience, site, endpoint)
        self.ranks_per_site, self._rank_in_site = (1, 0) if own is None else (own.world, own.rank)
        self.site_group = None if own is None else own.site_group
        self._meeting = Meeting(
            at,
            site=site,
            sites=sites,
            at_least=sites,
            ranks=self.ranks_per_site,
            endpoint=endpoint,
            patience=patience,
            dead_after=dead_after,
        )
        try:
            session, self.names, host = self._same_in_site([sites, site, at], patience)
            self._meeting.hosted_by = host  # which the site's first rank knows
            self.rank = self.names.index(site) * self.ranks_per_site + self._rank_in_site
            self.world = len(self.names) * self.ranks_per_site
            self.store = self._meeting.store()
            self.endpoint = self._meeting.own_endpoint()
            kind, called = what_ranks_are_called(self.names, self.world, self.ranks_per_site)
            self._all_ranks = link_ranks(
                self.store,
                f"all ranks {session}",
                self.rank,
                self.world,
                limit=max(2 * dead_after, 60.0),  # all have met, but some processes are slow to start
                endpoint=self.endpoint,
                called=lambda rank: called[rank] if kind == "site" else f"{kind} {called[rank]}",
            )
        except BaseException:  # a traceback that is kept holds this object: it must not count as here
            self._meeting.close()
            raise

    def all_ranks(self) -> Mesh:
        return self._all_ranks

    def group_mesh(self, device: torch.device) -> Mesh | None:
        return None if self._own is None else self._own.group_mesh(device)

    def close(self) -> None:
        self._meeting.close()
        self._all_ranks.close()

    def _same_in_site(self, told: list[Any], patience: float) -> tuple[str, tuple[str, ...], str]:
        """A name that no other session has, the sites' names, and which of them hosts the store. The first
        rank of a site meets the others, and tells those of its site what came of it."""
        own = self._own
        if own is None or own.world == 1:
            return self._meet()
        ranks = Transport(
            own.all_ranks(),
            range(own.world),
            own.rank,
            liveness=None,
            timeout=2 * patience + 60,  # the first rank has to wait for the other sites
            patience=patience,
            member="rank of this site",
        )
        try:
            each = ranks.swap_blobs(json.dumps(told).encode(), phase="start of this site", limit=patience)
            check_one_site([json.loads(one) for one in each], "sites, site, address")
            if own.rank > 0:
                said = json.loads(ranks.receive_blob(0, phase=_PHASE))
                if "met" not in said:
                    raise AgreementError(f"this site's first rank: {said['why']}")
                session, names, host = said["met"]
                return session, tuple(names), host
            try:
                met = self._meet()
            except BaseException as error:
                why = str(error) if isinstance(error, LocoError) else "it was interrupted"
                with suppress(TransportError):
                    ranks.send_blob(json.dumps({"why": why}).encode(), ranks.peers, phase=_PHASE)
                raise
            ranks.send_blob(json.dumps({"met": met}).encode(), ranks.peers, phase=_PHASE)
            return met
        finally:
            own.close()

    def _meet(self) -> tuple[str, tuple[str, ...], str]:
        session, quorum = self._meeting.ask({})
        self._meeting.serve(quorum)
        return session, tuple(one.site for one in quorum), self._meeting.hosted_by
