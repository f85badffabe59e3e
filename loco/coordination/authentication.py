"""Seals: keyed hashes that prove who wrote a message or a value in the store, if the ranks share a key."""

import hashlib
import hmac
import struct
from collections import Counter

import torch
from torch import Tensor

from ..errors import AuthenticationError

SEAL_BYTES = 16
LEAST_KEY_BYTES = 16


class MessageSeals:
    """The seals of one group's messages: keyed BLAKE2b, 16 bytes each.

    A seal covers the message and its context: session, group, sender, receiver, and its number among the
    messages between the two. So a receiver refuses a message that was changed, forged, repeated, exchanged
    for another or sent back to its sender.

    Args:
        key: shared by all ranks, and by nobody else.
        session: new with every start, and the same on all ranks.
        group: the group's name.
        rank: this member.
    """

    def __init__(self, key: bytes, session: bytes, group: str, rank: int) -> None:
        self._key = hashlib.blake2b(key, digest_size=32, person=b"loco key").digest()
        self._context = session + hashlib.blake2b(group.encode(), digest_size=16).digest()
        self._rank = rank
        self._sent: Counter[int] = Counter()  # by peer
        self._received: Counter[int] = Counter()

    def seal(self, message: Tensor, receiver: int) -> Tensor:
        """The seal of the next message to `receiver`."""
        self._sent[receiver] += 1
        made = self._make(message, self._rank, receiver, self._sent[receiver])
        return torch.frombuffer(bytearray(made), dtype=torch.uint8).to(message.device)

    def expect(self, sender: int) -> int:
        """The number of the next message of `sender`, in the order in which they are to arrive."""
        self._received[sender] += 1
        return self._received[sender]

    def is_genuine(self, message: Tensor, seal: Tensor, sender: int, number: int) -> bool:
        made = self._make(message, sender, self._rank, number)
        return hmac.compare_digest(made, seal.cpu().numpy().tobytes())

    def _make(self, message: Tensor, sender: int, receiver: int, number: int) -> bytes:
        hashed = hashlib.blake2b(self._context, key=self._key, digest_size=SEAL_BYTES)
        hashed.update(struct.pack("<IIQQ", sender, receiver, number, message.numel()))
        hashed.update(message.cpu().numpy().data)
        return hashed.digest()


class StoreSeals:
    """Seals of what ranks write into the store, if they share a key.

    A seal covers the value, its store key and the session: a value of an earlier run, or of another store
    key, is refused. An older value of the *same* store key is not; where that matters, the store key (or the
    value) holds a number that is used once.

    Args:
        key, session: as of `MessageSeals`; without a key nothing is sealed.
    """

    def __init__(self, key: bytes | None = None, session: bytes = b"") -> None:
        self._secret = key and hashlib.blake2b(key, digest_size=32, person=b"loco word").digest()
        self._session = session

    @property
    def are_used(self) -> bool:
        return self._secret is not None

    def write(self, store_key: str, value: str) -> str:
        """What to put under this store key, so that only a rank that has the key can have written it."""
        if self._secret is None:
            return value
        sealed, salt = f"{store_key}={value}".encode(), self._session[:16]
        return f"{value} {hashlib.blake2b(sealed, key=self._secret, salt=salt, digest_size=16).hexdigest()}"

    def read(self, store_key: str, found: str) -> str:
        """
        Raises:
            AuthenticationError: it was written without the key, or for another store key.
        """
        value = found if self._secret is None else found.rpartition(" ")[0]
        if not hmac.compare_digest(self.write(store_key, value).encode(), found.encode()):
            raise AuthenticationError(f"{store_key} in the store was not written by a rank of this run")
        return value
