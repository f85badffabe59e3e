"""Ranks that reach each other: they meet in a store, say there that they live, and link up."""

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..coordination.authentication import MessageSeals, StoreSeals
from ..coordination.heartbeats import guarded
from ..coordination.liveness import Liveness
from ..coordination.store_client import StoreClient, no_store
from ..errors import AgreementError, TransportError, first_line
from ..logs import Waiting
from .introductions import PatientStore, introduce
from .linking import link
from .listening import Endpoint
from .mesh import Mesh, NoLinks
from .tcp import TcpLinks
from .transport import Transport, listed

_CONNECTS = 120.0  # seconds: the longest that the store's host may take to be reached
_POLL = 0.05  # seconds
_NONCE = 16  # bytes
_logger = logging.getLogger(__name__)


class Peers:
    """Ranks that reach each other: by a store, by heartbeats in it, and by links between all of them.

    Sites that stay the same have one such object as long as they train. Sites that come and go have one for
    each quorum.

    Args:
        store: where they meet; clients clone it.
        name: of all of them together, and of no others that ever met in this store.
        rank: this one's number.
        called: what each is called in errors, by number.
        kind: what each is, e.g. "site".
        endpoint: where this rank listens.
        timeout, patience, dead_after, key: as `loco.Topology`.
        within: seconds in which all must have come.
        answers: seconds that the store may take to answer until they have; from then on `dead_after`.
        links_within: seconds to link up once all have come.
        seals: of what they write into the store; by default their key's, for this session.
        told: what all ranks were told alike before, which becomes part of the session.

    Attributes:
        store: a client of the store.
        session: random bytes of every rank are in it, so it is no older one, and a message of which somebody
            kept a copy proves nothing in it.
        mesh: the links between all.

    Raises:
        AgreementError: not all have a key.
        TransportError: one did not come or was lost on the way, or the store does not answer.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        *,
        called: Sequence[str],
        kind: str,
        endpoint: Endpoint,
        timeout: float,
        patience: float,
        dead_after: float,
        within: float,
        answers: float,
        links_within: float,
        key: bytes | None = None,
        seals: StoreSeals | None = None,
        told: bytes = b"",
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(called)
        self.kind, self.called = kind, tuple(called)
        self.endpoint = endpoint
        self.timeout, self.patience, self.dead_after = timeout, patience, dead_after
        self._key = key
        self._phase = f"linking {self.size} {kind}s"
        self.mesh: TcpLinks | NoLinks = NoLinks()
        deadline, clients = time.monotonic() + within, list[StoreClient | Liveness]()
        try:
            self.store = StoreClient(store, limit=answers, connect_limit=min(within, _CONNECTS))
            clients.append(self.store)
            self.session = self._agree(told, within)
            self.seals = seals or StoreSeals(key, self.session)
            left = max(deadline - time.monotonic(), 1.0)
            self.liveness = Liveness(
                store,
                name,
                rank,
                dead_after=dead_after,
                seals=self.seals,
                connect_limit=min(left, _CONNECTS),
            )
            clients.append(self.liveness)
            # torch's store asks for the name of every host that connects, and answers nobody until it is
            # told: for seconds, where names are looked up slowly. So all connect before anybody listens.
            self._introduce("connected", "", max(left, links_within))
            self.store.limit = dead_after
            with self.linking(self._phase, links_within) as by:
                self.mesh = self.link(f"{self.root}/links", range(self.size), by)
        except BaseException as error:  # a traceback that is kept holds this object
            for client in clients:
                client.close()
            if isinstance(error, RuntimeError) and not isinstance(error, AgreementError | TransportError):
                raise no_store(self._phase, store, error) from error
            raise

    @property
    def root(self) -> str:
        """Prefix of their keys in the store."""
        return f"loco/{self.name}"

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def named(self, ranks: Sequence[int]) -> str:
        return listed(self.kind, ranks, self.called)

    @contextmanager
    def linking(self, phase: str, limit: float) -> Iterator[PatientStore]:
        """The store by which ranks find each other in the body, for so many seconds, and as long as none of
        them is lost.

        Raises:
            TransportError: one was, or the body could not link them.
        """
        with guarded(
            self.liveness, self.others, phase=phase, named=self.named, left_may_return=True
        ) as guard:
            try:
                yield PatientStore(self.store, limit=limit, may_still_come=lambda: guard.loss is None)
            except RuntimeError as error:
                # Whoever could not be reached may have died just now, which its silence has yet to show.
                if guard.notices_within(self.dead_after):
                    raise
                raise TransportError(f"{phase}: {first_line(error)}") from error

    def link(self, name: str, ranks: Sequence[int], by: PatientStore) -> TcpLinks | NoLinks:
        """Connections between these ranks, this one among them.

        Raises:
            RuntimeError: they can't be made.
        """
        if len(ranks) == 1:
            return NoLinks()
        return link(
            by,
            name,
            ranks.index(self.rank),
            len(ranks),
            endpoint=self.endpoint,
            called=lambda member: self.named([ranks[member]]),
        )

    def transport(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        *,
        member: str = "",
        names: Sequence[str] | None = None,
        link: str = "",
        seals: MessageSeals | None = None,
        left_may_return: bool = False,
    ) -> Transport:
        """Messages among these ranks over their links.

        Args:
            member, names: what they are, and are called, in errors; by default as in all others.
            link, seals, left_may_return: as `Transport`.
        """
        return Transport(
            mesh,
            ranks,
            ranks.index(self.rank),
            liveness=self.liveness,
            timeout=self.timeout,
            patience=self.patience,
            member=member or self.kind,
            names=[self.called[rank] for rank in ranks] if names is None else names,
            link=link,
            seals=seals,
            left_may_return=left_may_return,
        )

    def message_seals(self, group: str, member: int) -> MessageSeals | None:
        """Of the messages of a group that no other has the name of. `member`: this rank's number in it."""
        return None if self._key is None else MessageSeals(self._key, self.session, group, member)

    @property
    def whole(self) -> bool:
        return self.mesh.is_open

    def announce(self, what: str) -> None:
        """Tell all of something that they may wait for.

        Raises:
            TransportError: the store does not answer.
        """
        try:
            self.store.set(f"{self.root}/said/{what}", "")
        except RuntimeError as error:
            raise no_store(f"telling of {what}", self.store, error) from error

    def await_word(self, what: str, ranks: Sequence[int]) -> None:
        """Wait until one of these ranks, which are busy, has announced it.

        Raises:
            TransportError: one of them died or gave up, or the store does not answer.
        """
        phase = f"waiting for {what}"
        try:
            watched = guarded(self.liveness, ranks, phase=phase, named=self.named)
            with watched as guard, Waiting(_logger, lambda: what):
                while not self.store.check([f"{self.root}/said/{what}"]):
                    guard.check()
                    time.sleep(_POLL)
        except TransportError:
            raise
        except RuntimeError as error:
            raise no_store(phase, self.store, error) from error

    def hang_up(self, why: str = "") -> None:
        """Give up the links, so that those who wait learn of it. `why`: unless heartbeats have told it."""
        if not self.mesh.is_open:
            return
        self.mesh.close()
        if why:
            self.liveness.leave(why)
        try:
            self.store.check(["any"])
        except RuntimeError:  # nobody listens, and torch logs pages for every beat to a store that is gone
            self.liveness.close()

    def close(self, why: str = "") -> None:
        """Say that this rank has ended, and give back all that is held."""
        self.liveness.close(why)
        self.store.close()
        self.mesh.close()

    def _agree(self, told: bytes, within: float) -> bytes:
        """-> what names this session."""
        mine = f"{'sealed' if self._key else 'open'} {os.urandom(_NONCE).hex()}"
        notes = self._introduce("here", mine, within)
        keyed = [note.startswith("sealed ") for note in notes]
        if keyed.count(keyed[0]) != self.size:
            have, lack = self.named([keyed.index(True)]), self.named([keyed.index(False)])
            raise AgreementError(f"{have} has a key, {lack} has none")
        return hashlib.blake2b(told + "\n".join(notes).encode(), digest_size=16).digest()

    def _introduce(self, what: str, note: str, limit: float) -> list[str]:
        name = f"{self.root}/{what}"
        return introduce(
            self.store,
            name,
            self.rank,
            note,
            size=self.size,
            limit=limit,
            phase=self._phase,
            named=self.named,
        )
