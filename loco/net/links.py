"""Links between the sites of one quorum: gloo pairs of their own, outside torch's default process group.

The default group can't lose a member. These links are built for one set of sites, by the store that the first
of them hosts, and dropped with it.
"""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from ..coordination.liveness import Liveness, Loss
from ..coordination.store_client import StoreClient
from ..errors import TransportError, first_line
from .transport import NEVER, Transport, listed

_POLL = 0.05  # seconds


class Links:
    """gloo pairs between all members of a quorum, their store, and their signs of life.

    Args:
        name: of these links, the same on all members, and no others'.
        store: host:port of the store they meet by.
        place, size: of this member, and how many there are.
        address: by which the other members reach this one.
        timeout: seconds within which all members must have come.
        dead_after: as `Topology`.

    Raises:
        TransportError: a member did not come, or was lost on the way.
    """

    def __init__(
        self,
        name: str,
        *,
        store: str,
        place: int,
        size: int,
        address: str,
        timeout: float,
        dead_after: float,
    ) -> None:
        self.name = name
        self.size = size
        self.place = place
        self._pairs: Any = None  # torch's stubs don't know what it can
        try:
            self._meet_by = PrefixStore(f"loco/{name}", _client(store, timeout))
            self._meet_by.set(f"here/{place}", "")
            self._await_all(timeout)
            self.store = StoreClient(self._meet_by, limit=dead_after)
            self.liveness = Liveness(self._meet_by, name, place, dead_after=dead_after)
            self._pairs = ProcessGroupGloo(self._meet_by, place, size, _options(address, timeout))
        except TransportError:
            raise
        except (RuntimeError, OSError) as error:
            raise TransportError(f"linking {size} sites: {first_line(error)}") from error

    @property
    def whole(self) -> bool:
        return self._pairs is not None

    def begin(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, tag: int = 0
    ) -> list[dist.Work]:
        """Start to send and to receive -> one work for each message, the receives first."""
        pairs = self._pairs
        if pairs is None:
            raise RuntimeError("these links were given up")
        works = [pairs.recv([tensor], place, tag) for place, tensor in receives]
        return works + [pairs.send([tensor], place, tag) for place, tensor in sends]

    def interrupt(self) -> None:
        """End what the main thread waits for: gloo closes all pairs if a wait for any of them times out."""
        # One who has hung up already fails the call before it can time out: then another's pair does it.
        for place in range(self.size):
            if place != self.place:
                with suppress(RuntimeError):  # which is what it is for
                    never = torch.empty(1, dtype=torch.uint8)
                    self.begin([], [(place, never)], tag=NEVER)[0].wait(timedelta(milliseconds=1))

    def announce(self, what: str) -> None:
        """Tell all members of something that they may wait for.

        Raises:
            TransportError: the store's host is gone.
        """
        try:
            self.store.set(f"said/{what}", "")
        except RuntimeError as error:
            raise TransportError(f"telling of {what}: {_no_store(error)}") from error

    def await_word(self, what: str, places: Sequence[int]) -> None:
        """Wait until one of these members, who are busy, has announced it.

        Raises:
            TransportError: one of them died or gave up, or the store's host did.
        """
        losses: list[Loss] = []
        with self.liveness.watching(places, losses.append):
            try:
                while not self.store.check([f"said/{what}"]):
                    if losses:
                        said = self.liveness.describe(losses[0], lambda ranks: listed("member", ranks))
                        raise TransportError(f"waiting for {what}: {said}")
                    time.sleep(_POLL)
            except RuntimeError as error:
                if isinstance(error, TransportError):
                    raise
                raise TransportError(f"waiting for {what}: {_no_store(error)}") from error

    def close(self, why: str = "") -> None:
        """Hang up, so that members who wait learn of it. gloo does so when nobody holds the pairs any more.

        why: unless the signs of life have told it already.
        """
        if self._pairs is None:
            return
        self._pairs = None
        if why:
            self.liveness.leave(why)
        try:
            self.store.check(["any"])
        except RuntimeError:  # nobody listens, and torch logs pages for every beat to a store that is gone
            self.liveness.close()

    def _await_all(self, timeout: float) -> None:
        """gloo's own wait would name nobody."""
        keys = [f"here/{place}" for place in range(self.size)]
        try:
            self._meet_by.wait(keys, timedelta(seconds=timeout))
        except RuntimeError:
            missing = [place for place, key in enumerate(keys) if not self._meet_by.check([key])]
            raise TransportError(
                f"linking {self.size} sites: {listed('member', missing)} did not come within {timeout:g} s"
            ) from None


class LinkTransport(Transport):
    """Some members of a quorum, called 0 … size−1 in this order, as seen by one of them.

    Args:
        links: theirs; None for a site that is alone.
        places: of the members in the links.
        place: this member's.
        timeout: seconds to wait for a message of a member that is alive.
    """

    def __init__(self, links: Links | None, places: Sequence[int], place: int, *, timeout: float) -> None:
        super().__init__(
            None,
            places,
            places.index(place),
            device=torch.device("cpu"),  # gloo sends no other memory
            liveness=None if links is None else links.liveness,
            timeout=timeout,
            patience=timeout,  # whoever is in a quorum has come to its round
            member="site",
        )
        self.links = links

    def _by_gloo(self) -> bool:
        return True

    def _begin(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[dist.Work]:
        if self.links is None:
            raise RuntimeError("this site has no links")
        at = self._ranks
        return self.links.begin([(at[p], t) for p, t in sends], [(at[p], t) for p, t in receives])

    def _interrupt(self) -> None:
        if self.links is not None:
            self.links.interrupt()

    def broadcast(self, tensor: Tensor, *, phase: str) -> None:
        assert self.size == 1, "sites that come and go are given what they lack one by one"

    def close(self) -> None:
        if self.links is not None:
            self.links.close()
        self.links = None


def host_store(address: str, port: int) -> tuple[TCPStore, str]:
    """A store that this process hosts, and host:port of it for the others."""
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(f"port {port} can't be used for this site's store: {first_line(error)}") from error
    return store, f"{address}:{store.port}"


def _client(address: str, timeout: float) -> TCPStore:
    host, _, port = address.rpartition(":")
    # torch tries a host that refuses until its time is over, and logs pages about it.
    socket.create_connection((host, int(port)), timeout=timeout).close()
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))


def _options(address: str, timeout: float) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    by_interface = "GLOO_SOCKET_IFNAME" in os.environ
    options._devices = [
        gloo.create_default_device() if by_interface else gloo.create_device(hostname=address)
    ]
    return options


def _no_store(error: RuntimeError) -> str:
    return f"the quorum's store does not answer, its host is gone ({first_line(error)})"
