"""Links between the sites of one quorum.

They are built for one set of sites, by the store that the first of them hosts, and dropped with it.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence

from ..coordination.authentication import MessageSeals, StoreSeals
from ..coordination.heartbeats import guarded
from ..coordination.liveness import Liveness
from ..coordination.store_client import RemoteStore, StoreClient, no_store
from ..errors import TransportError, first_line, seconds
from ..logs import Waiting
from .introductions import PatientStore
from .linking import link
from .listening import Endpoint
from .mesh import NoLinks
from .tcp import TcpLinks
from .transport import Transport, listed

_POLL = 0.05  # seconds
_logger = logging.getLogger(__name__)


class Links:
    """Connections between all members of a quorum, their store, and their heartbeats.

    Args:
        name: of these links, the same on all members, and no others'.
        store: host:port of the store they meet by.
        hosted_by: the site that hosts it; "" if nobody knows.
        member, names: this one's number, and what all are called.
        rank: in its site; those of one number are linked.
        endpoint: where this one listens.
        timeout: seconds within which all members must have come.
        dead_after: as `Topology`.
        key: of the run, if it has one.

    Attributes:
        seals: of what members, and all ranks of their sites, write into the store.

    Raises:
        TransportError: a member did not come, or was lost on the way.
    """

    def __init__(
        self,
        name: str,
        *,
        store: str,
        hosted_by: str = "",
        member: int,
        names: Sequence[str],
        rank: int = 0,
        endpoint: Endpoint,
        timeout: float,
        dead_after: float,
        key: bytes | None = None,
    ) -> None:
        self.name = name
        size = len(names)
        self.member, self.size, self._names = member, size, names
        self._rank = rank
        self.mesh: TcpLinks | NoLinks = NoLinks()
        self._key, self._session = key, b""
        self.seals = StoreSeals(key, hashlib.blake2b(name.encode(), digest_size=16).digest())
        self._clients: list[StoreClient | Liveness] = []
        deadline = time.monotonic() + timeout
        remote = RemoteStore(store, prefix_of(name), timeout, hosted_by=hosted_by)
        try:
            self.store = StoreClient(remote, limit=dead_after, connect_limit=timeout)
            self._clients.append(self.store)
            self.store.set(f"here/{rank}/{member}", "")
            self._await_all(deadline, timeout)
            self.liveness = Liveness(
                remote,
                beats_of(rank),
                member,
                dead_after=dead_after,
                seals=self.seals,
                connect_limit=deadline - time.monotonic(),
            )
            self._clients.append(self.liveness)
            with guarded(
                self.liveness, range(size), phase=f"linking {size} sites", named=self._called
            ) as guard:
                by = PatientStore(self.store, limit=timeout, may_still_come=lambda: guard.loss is None)
                self.mesh = link(
                    by,
                    f"{name}/rank {rank}",
                    member,
                    size,
                    endpoint=endpoint,
                    called=lambda other: self._called([other]),
                )
            if key is not None:
                self._session = self._agree(timeout)
        except TransportError as error:
            error.lasting = False  # whoever was lost: the next quorum is without it
            raise
        except (RuntimeError, OSError) as error:
            raise TransportError(f"linking {size} sites: {first_line(error)}") from error
        finally:
            if not self.mesh.is_open:
                for client in self._clients:
                    client.close()

    def message_seals(self, group: str, member: int) -> MessageSeals | None:
        """Of the messages of a group that no other over these links has the name of. `member`: in it."""
        return None if self._key is None else MessageSeals(self._key, self._session, group, member)

    def _agree(self, timeout: float) -> bytes:
        """-> what names this session: every member has put random bytes of its own into it."""
        all_members = Transport(
            self.mesh,
            range(self.size),
            self.member,
            liveness=self.liveness,
            timeout=timeout,
            patience=timeout,
            member="site",
            names=self._names,
        )
        records = all_members.swap_records(os.urandom(16), phase=f"linking {self.size} sites")
        return hashlib.blake2b(b"".join(records), digest_size=16).digest()

    @property
    def whole(self) -> bool:
        return self.mesh.is_open

    def announce(self, what: str) -> None:
        """Tell all members of something that they may wait for.

        Raises:
            TransportError: the store's host is gone.
        """
        try:
            self.store.set(f"said/{self._rank}/{what}", "")
        except RuntimeError as error:
            raise self._no_store(f"telling of {what}", error) from error

    def await_word(self, what: str, members: Sequence[int]) -> None:
        """Wait until one of these members, who are busy, has announced it.

        Raises:
            TransportError: one of them died or gave up, or the store's host did.
        """
        phase = f"waiting for {what}"
        try:
            watched = guarded(self.liveness, members, phase=phase, named=self._called)
            with watched as guard, Waiting(_logger, lambda: what):
                while not self.store.check([f"said/{self._rank}/{what}"]):
                    guard.check()
                    time.sleep(_POLL)
        except TransportError:
            raise
        except RuntimeError as error:
            raise self._no_store(phase, error) from error

    def close(self, why: str = "") -> None:
        """Hang up, so that members who wait learn of it.

        why: unless the heartbeats have told it already.
        """
        if not self.mesh.is_open:
            return
        self.mesh.close()
        if why:
            self.liveness.leave(why)
        try:
            self.store.check(["any"])
        except RuntimeError:  # nobody listens, and torch logs pages for every beat to a store that is gone
            self.liveness.close()

    def _no_store(self, phase: str, error: RuntimeError) -> TransportError:
        """It need not last: the next quorum may have another host."""
        lost = no_store(phase, self.store, error)
        lost.lasting = False
        return lost

    def _called(self, members: Sequence[int]) -> str:
        return listed("site", members, self._names)

    def _await_all(self, deadline: float, timeout: float) -> None:
        """Before links are built: a member that did not come is named."""
        keys = [f"here/{self._rank}/{member}" for member in range(self.size)]
        with Waiting(_logger, lambda: f"the {self.size} sites of {self.name}, to link with them"):
            while not self.store.check(keys):
                if time.monotonic() > deadline:
                    missing = [member for member, key in enumerate(keys) if not self.store.check([key])]
                    who = self._called(missing)
                    text = f"linking {self.size} sites: {who} did not come within {seconds(timeout)}"
                    raise TransportError(text)
                time.sleep(_POLL)


def prefix_of(links: str) -> str:
    """Of the keys of these links in their store."""
    return f"loco/{links}"


def beats_of(rank: int) -> str:
    """The name of the heartbeats of all members' ranks of this number."""
    return f"rank {rank}"
