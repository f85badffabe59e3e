"""Sites that each have a world of their own, joined at an address at which one of them hosts a store."""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..coordination.hosted_store import Guests, HostedStore, host_at
from ..coordination.site_directory import BEATS, Arrival, SiteDirectory, session_of
from ..coordination.store_client import RemoteStore, check_store, host_and_port
from ..errors import AgreementError, LocoError, TransportError, first_line, no_store
from ..logs import SAY_SOON, Waiting
from ..net.linking import link_ranks
from ..net.mesh import Mesh
from .own_world import check_one_site, own_world

_PREFIX = "sites"  # of the keys in the store at which the sites meet
_POLL = 0.2  # seconds
_ANSWERS = 30.0  # seconds: a store that looks up the name of each host that connects may take long
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
        host, port = host_and_port(at)
        self._directory: SiteDirectory | None = None
        self._hosted: HostedStore | None = None

        def gather() -> list[Arrival]:
            deadline = time.monotonic() + patience
            while True:
                self._hosted = host_at(host, port)
                left = max(deadline - time.monotonic(), 1.0)
                mine = Arrival(
                    site=site,
                    sites=sites,
                    ranks=self.ranks_per_site,
                    process=secrets.randbits(48),
                    where=f"process {os.getpid()} on {socket.gethostname()}",
                )
                self._directory = SiteDirectory(_reached(at, left), mine, left, dead_after)
                try:
                    return self._directory.join()
                except LocoError:
                    raise
                except RuntimeError as error:  # its host ends, to come back itself
                    if time.monotonic() > deadline:
                        raise no_store("meeting the other sites", error) from error

        arrivals = self._same_in_site([sites, site, at], gather, patience)
        self.names = tuple(one.site for one in arrivals)
        self.rank = self.names.index(site) * self.ranks_per_site + self._rank_in_site
        self.world = len(arrivals) * self.ranks_per_site
        if self._hosted is not None:
            others = [one.process for one in arrivals if one.site != site]
            self._hosted.serve(_PREFIX, [Guests(_PREFIX, BEATS, others)])
        try:
            self.store = _reached(at, patience)
            # The machine's address on the way to the store is the one by which the others reach it, too.
            self.address = _address_towards(host, port)
            self._all_ranks = link_ranks(
                self.store,
                f"all ranks {session_of(arrivals)}",
                self.rank,
                self.world,
                limit=max(2 * dead_after, 60.0),  # all have met, but some processes are slow to start
                address=self.address,
            )
        except BaseException:  # a traceback that is kept holds this object: it must not count as here
            if self._directory is not None:
                self._directory.close()
            raise

    def all_ranks(self) -> Mesh:
        return self._all_ranks

    def group_mesh(self, device: torch.device) -> Mesh | None:
        return None if self._own is None else self._own.group_mesh(device)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()
        self._all_ranks.close()

    def _same_in_site(
        self, told: list[Any], gather: Callable[[], list[Arrival]], patience: float
    ) -> list[Arrival]:
        """The first rank of a site gathers, and tells the others what came of it."""
        global _joined
        _joined += 1
        if self.ranks_per_site == 1:
            return gather()
        store, root = dist.distributed_c10d._get_default_store(), f"loco-joined/{_joined}"
        keys = [f"{root}/{rank}" for rank in range(self.ranks_per_site)]
        try:
            store.set(keys[self._rank_in_site], json.dumps(told))
            if self._rank_in_site > 0:
                with Waiting(_logger, lambda: "this site's first rank, which meets the other sites"):
                    store.wait([root], timedelta(seconds=2 * patience + 60))
                said = json.loads(store.get(root))
                if "here" not in said:
                    raise AgreementError(f"this site's first rank: {said['why']}")
                return [Arrival(**one) for one in said["here"]]
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
            arrivals = gather()
            outcome = {"here": [vars(one) for one in arrivals]}
            return arrivals
        except LocoError as error:
            outcome = {"why": str(error)}
            raise
        finally:
            store.set(root, json.dumps(outcome))


def _reached(at: str, patience: float) -> RemoteStore:
    """The store, once it answers there.

    Raises:
        TransportError: it does not, or another program does.
    """
    store = RemoteStore(at, _PREFIX, patience)
    deadline, why = time.monotonic() + patience, "nothing has answered there yet"

    def what() -> str:
        return (
            f"the sites' store at {at} (LOCO_AT), which another site hosts; {why}. If another program uses "
            f"that port, choose another one"
        )

    with Waiting(_logger, what, first=SAY_SOON):
        while True:
            try:
                left = max(deadline - time.monotonic(), 0.1)
                check_store(store.host, store.port, min(left, _ANSWERS))
                return store
            except LocoError:
                raise
            except RuntimeError as error:
                why = str(error)
                if time.monotonic() > deadline:
                    raise TransportError(
                        f"{error}, for {round(patience, 1):g} s: the site whose machine has this address "
                        f"hosts the store at which all meet; start it, or give another machine's address "
                        f"(LOCO_AT)",
                        lasting=True,
                    ) from error
                time.sleep(_POLL)


def _address_towards(host: str, port: int) -> str:
    with socket.create_connection((host, port)) as connection:
        return connection.getsockname()[0]
