"""Sites that each have a world of their own, joined at an address at which one of them hosts a store."""

import json
import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import AgreementError, LocoError, TransportError, first_line
from ..logs import Waiting
from ..net.linking import link_ranks
from ..net.mesh import Mesh
from .meeting import Meeting
from .own_world import check_one_site, own_world

_logger = logging.getLogger(__name__)

_joined = 0  # how many times this process has


class JoinedWorlds:
    """`Ranks` of a `FixedSites`: each site's own world, one after the other in the order of the sites' names.

    Args:
        sites: how many.
        site: this one's name.
        at: host:port. The site whose machine has this address hosts the store there.
        patience: seconds to wait for the others.
        dead_after: as `loco.Topology`.

    Raises:
        ValueError: the address is none, or no store can be hosted at it.
        AgreementError: the sites, or the ranks of this one, do not fit together.
        TransportError: not all came, or nobody hosts the store.
    """

    told = b""

    def __init__(self, sites: int, site: str, at: str, *, patience: float, dead_after: float) -> None:
        own = self._own = own_world(patience)
        self.ranks_per_site, self._rank_in_site = (1, 0) if own is None else (own.world, own.rank)
        self.site_group = None if own is None else own.site_group
        self._meeting = Meeting(
            at,
            site=site,
            sites=sites,
            at_least=sites,
            ranks=self.ranks_per_site,
            patience=patience,
            dead_after=dead_after,
        )
        try:
            session, self.names = self._same_in_site([sites, site, at], patience)
            self.rank = self.names.index(site) * self.ranks_per_site + self._rank_in_site
            self.world = len(self.names) * self.ranks_per_site
            self.store = self._meeting.store()
            self.address = self._meeting.own_address()
            self._all_ranks = link_ranks(
                self.store,
                f"all ranks {session}",
                self.rank,
                self.world,
                limit=max(2 * dead_after, 60.0),  # all have met, but some processes are slow to start
                address=self.address,
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

    def _same_in_site(self, told: list[Any], patience: float) -> tuple[str, tuple[str, ...]]:
        """A name that no other session has, and the sites' names. The first rank of a site meets the others,
        and tells those of its site what came of it."""
        global _joined
        _joined += 1
        if self.ranks_per_site == 1:
            return self._meet()
        store, root = dist.distributed_c10d._get_default_store(), f"loco-joined/{_joined}"
        keys = [f"{root}/{rank}" for rank in range(self.ranks_per_site)]
        try:
            store.set(keys[self._rank_in_site], json.dumps(told))
            if self._rank_in_site > 0:
                with Waiting(_logger, lambda: "this site's first rank, which meets the other sites"):
                    store.wait([root], timedelta(seconds=2 * patience + 60))
                said = json.loads(store.get(root))
                if "met" not in said:
                    raise AgreementError(f"this site's first rank: {said['why']}")
                session, names = said["met"]
                return session, tuple(names)
            with Waiting(_logger, lambda: f"all {len(keys)} ranks of this site"):
                store.wait(keys, timedelta(seconds=patience))
            each = [json.loads(store.get(key)) for key in keys]
        except RuntimeError as error:
            if isinstance(error, LocoError):
                raise
            text = f"not all ranks of this site came within {patience:g} s ({first_line(error)})"
            raise TransportError(text, lasting=True) from error
        outcome: dict[str, Any] = {"why": "it was interrupted"}
        try:
            check_one_site(each, "sites, site, address")
            met = self._meet()
            outcome = {"met": met}
            return met
        except LocoError as error:
            outcome = {"why": str(error)}
            raise
        finally:
            store.set(root, json.dumps(outcome))

    def _meet(self) -> tuple[str, tuple[str, ...]]:
        session, quorum = self._meeting.ask({})
        self._meeting.serve(quorum)
        return session, tuple(one.site for one in quorum)
