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
from ..coordination.store_client import RemoteStore, address_towards, check_store, host_and_port
from ..errors import LocoError, TransportError, no_store
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
                    store = _reached(self.own_at, max(deadline - time.monotonic(), 1.0))
                    self._directory = self._directory or self._enter(store)
                return self._directory.ask(claim, max(deadline - time.monotonic(), 1.0))
            except LocoError:
                raise
            except RuntimeError as error:
                is_lost = True
                if time.monotonic() > deadline:
                    raise no_store("meeting the other sites", error) from error

    def serve(self, quorum: list[Arrival]) -> None:
        """If this process hosts the store, it does so until these sites have ended."""
        if self.hosted is not None:
            others = [one.process for one in quorum if one.site != self._who["site"]]
            self.hosted.serve(_PREFIX, [Guests(_PREFIX, BEATS, others, StoreSeals(self._key))])

    def store(self) -> RemoteStore:
        """The store, once it answers there."""
        return _reached(self.own_at, self._patience)

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

    def _enter(self, store: RemoteStore) -> SiteDirectory:
        where = f"process {os.getpid()} on {socket.gethostname()}"
        mine = Arrival(process=secrets.randbits(48), where=where, **self._who)
        return SiteDirectory(store, mine, dead_after=self._dead_after, key=self._key)


def _reached(at: str, patience: float) -> RemoteStore:
    """The store, once it answers there.

    Raises:
        TransportError: it does not, or another program does.
    """
    store = RemoteStore(at, _PREFIX, patience)
    deadline, why = time.monotonic() + patience, "nothing has answered there yet"

    def what() -> str:
        return (
            f"the sites' store at {at} (LOCO_AT), which another site hosts; {why}. Is that port open on the "
            f"way there? If another program uses it, choose another one"
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
