"""The address at which sites that each have a world of their own meet. One of them, or `python -m loco meet`,
hosts a store there."""

import logging
import os
import secrets
import socket
import time
from typing import Any

from ..coordination.authentication import StoreSeals
from ..coordination.hosted_store import Guests, HostedStore, host_at
from ..coordination.site_directory import BEATS, Arrival, SiteDirectory
from ..coordination.store_client import RemoteStore, address_towards, check_store, host_and_port, no_store
from ..errors import LocoError, TransportError, seconds
from ..logs import SAY_SOON, Waiting
from ..net.listening import Endpoint

_PREFIX = "sites"  # of the keys in the store
_POLL = 0.2  # seconds
_ANSWERS = 30.0  # seconds: a store that looks up the name of each host that connects may take long
_logger = logging.getLogger(__name__)


class Meeting:
    """One site's place among those that meet at an address.

    Args:
        at: host:port. The site whose machine has this address hosts the store there.
        site: this one's name.
        sites: how many.
        at_least: how many are enough when others are lost.
        ranks: how many this site has.
        endpoint: where this rank listens. A machine that is advertised as the address's host has it, too.
        patience: seconds to wait for the others, or for the store.
        dead_after: as `loco.Topology`.
        key: as of `SiteDirectory`.

    Attributes:
        hosted: the store, if this process hosts it.
        hosted_by: the site that hosts it, as of the latest quorum; "" if none of them does.

    Raises:
        ValueError: the address is none.
    """

    def __init__(
        self,
        at: str,
        *,
        site: str,
        sites: int,
        at_least: int,
        ranks: int,
        endpoint: Endpoint,
        patience: float,
        dead_after: float,
        key: bytes | None = None,
    ) -> None:
        self.at = at
        self._host, self._port = host_and_port(at)
        self._endpoint = endpoint
        self._is_behind = endpoint.advertised == self._host  # the address leads here, through another machine
        self.own_at = f"127.0.0.1:{self._port}" if self._is_behind else at
        self._who: dict[str, Any] = {"site": site, "sites": sites, "at_least": at_least, "ranks": ranks}
        self._patience, self._dead_after, self._key = patience, dead_after, key
        self._directory: SiteDirectory | None = None
        self.hosted: HostedStore | None = None
        self.hosted_by = ""

    def ask(self, claim: dict[str, Any]) -> tuple[str, list[Arrival]]:
        """As `SiteDirectory.ask`. If the store is gone, its host may come back.

        Raises:
            ValueError: no store can be hosted at the address.
            AgreementError: the sites do not fit together.
            TransportError: not all came, or nobody hosts the store.
        """
        deadline, is_lost = time.monotonic() + self._patience, False
        while True:
            try:
                if self._directory is None or is_lost:
                    self.host()
                    store = _reached(self._remote(), max(deadline - time.monotonic(), 1.0))
                    self._directory = self._directory or self._enter(store)
                claim = claim | {"hosts": self.hosted is not None}
                name, quorum = self._directory.ask(claim, max(deadline - time.monotonic(), 1.0))
                self.hosted_by = next((one.site for one in quorum if one.claim.get("hosts")), "")
                return name, quorum
            except LocoError:
                raise
            except RuntimeError as error:
                is_lost = True
                if time.monotonic() > deadline:
                    raise no_store("meeting the other sites", self._remote(), error) from error

    def serve(self, quorum: list[Arrival]) -> None:
        """If this process hosts the store, it does so until these sites have ended."""
        if self.hosted is not None:
            others = [one.process for one in quorum if one.site != self._who["site"]]
            self.hosted.serve(_PREFIX, [Guests(_PREFIX, BEATS, others, StoreSeals(self._key))])

    def store(self) -> RemoteStore:
        """The store, once it answers there."""
        return _reached(self._remote(), self._patience)

    def own_endpoint(self) -> Endpoint:
        """At the address by which this machine reaches the store: so others reach it by that one, too."""
        if self._endpoint.advertised:
            return self._endpoint
        return self._endpoint.at(address_towards(self._host, self._port, self._patience))

    def close(self) -> None:
        """From now on another process may take this site's name, and nobody waits for this one."""
        if self._directory is not None:
            self._directory.close()
        self._directory = None

    def host(self) -> None:
        """Host the store, if this machine has the address and nobody was quicker.

        Raises:
            ValueError: the address can't be looked up.
        """
        self.hosted = host_at("0.0.0.0" if self._is_behind else self._host, self._port)

    def _remote(self) -> RemoteStore:
        return RemoteStore(self.own_at, _PREFIX, self._patience, hosted_by=self.hosted_by)

    def _enter(self, store: RemoteStore) -> SiteDirectory:
        where = f"process {os.getpid()} on {socket.gethostname()}"
        mine = Arrival(process=secrets.randbits(48), where=where, **self._who)
        return SiteDirectory(store, mine, dead_after=self._dead_after, key=self._key)


def _reached(store: RemoteStore, patience: float) -> RemoteStore:
    """The store, once it answers there.

    Raises:
        TransportError: it does not, or another program does.
    """
    deadline, why = time.monotonic() + patience, "nothing has answered there yet"

    def what() -> str:
        return (
            f"the sites' store at {store.address} (LOCO_AT), which the site at that address has to host; "
            f"{why}. Is LOCO_AT right, and the same on all sites? Is that port open on the way there? If "
            f"another program uses it, choose another one"
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
                        f"{error}, for {seconds(patience)}: the site whose machine has this address hosts "
                        f"the store at which all meet; start it, or give another machine's address (LOCO_AT)",
                        lasting=True,
                        has_remedy=True,
                    ) from error
                time.sleep(_POLL)
