"""One key of the store that all ranks change by compare-and-set, and on whose value they therefore agree."""

from collections.abc import Callable

from .authentication import StoreSeals
from .store_client import KeyValueStore


def number_in(value: str) -> int:
    """Of a value that counts from 0; −1: it is malformed, or nobody has written it."""
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= 18 else -1


class CompareAndSetKey:
    """A key and its value, "" as long as nobody has written it.

    Args:
        key: of this register only.
        seals: prove that a rank has written the value, if the ranks share a key.
    """

    def __init__(self, store: KeyValueStore, key: str, seals: StoreSeals) -> None:
        self._store = store
        self._key = key
        self._seals = seals

    def read(self) -> str:
        """
        Raises:
            RuntimeError: the store does not answer.
            AuthenticationError: somebody without the key has written the value.
        """
        return self._open(self._found())

    def exists(self) -> bool:
        return self._store.check([self._key])

    def change(self, step: Callable[[str], str | None]) -> str:
        """Replace the value by `step(value)`, or keep it where that is None -> the value that now stands.

        `step` is called again whenever another rank was quicker, so it only computes. A rank whose request
        was lost may repeat it: a step that finds its work done returns None, or the value as it is.

        Raises:
            RuntimeError, AuthenticationError: as `read`.
        """
        now, is_known = "", False  # usually it is the first to write, and need not read before
        while True:
            value = self._open(now)
            wish = step(value)
            if wish is None and is_known:
                return value
            if wish is None:
                now, is_known = self._found(), True
                continue
            sealed = self._seals.write(self._key, wish)
            found = self._store.compare_set(self._key, now, sealed).decode(errors="replace")
            if found == sealed:
                return wish
            # torch's stores answer with what was expected if the key was removed meanwhile.
            now, is_known = "" if found == now else found, True

    def settle(self, wish: str) -> str:
        """-> the first value that any rank has settled on, this rank's wish if nobody was quicker."""
        return self.change(lambda value: None if value else wish)

    def _found(self) -> str:
        return self._store.get(self._key).decode(errors="replace") if self.exists() else ""

    def _open(self, found: str) -> str:
        return self._seals.read(self._key, found) if found else ""
