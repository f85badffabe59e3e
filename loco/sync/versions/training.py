"""The identity of the training that publishes in a store, so that versions of two are never mixed."""

import hashlib
import uuid
from contextlib import suppress

from ..storage.stores import Store

PATH = "training"
MOST_BYTES = 1024


def checked_training(name: str | None) -> str | None:
    if name == "":
        raise ValueError("training must be a name that is not empty, or None, got ''")
    return name


def training_of(store: Store) -> str:
    """The identity of the training that publishes in a store: the first of its publishers draws it. A digest,
    so that no contents of the file can be wrong.

    Raises:
        OSError: the store can't be read or written.
    """
    with suppress(FileNotFoundError):
        return _read(store)
    with suppress(FileExistsError):
        store.create(PATH, uuid.uuid4().hex.encode())
    return _read(store)


def _read(store: Store) -> str:
    return hashlib.sha256(store.read(PATH, MOST_BYTES)).hexdigest()
