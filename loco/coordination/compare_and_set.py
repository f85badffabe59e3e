"""A store key that all ranks change by compare-and-set, so that they agree on its value."""

from collections.abc import Callable

from .authentication import StoreSeals
from .store_client import KeyValueStore


def number_in(value: str) -> int:
    """The number that a value holds; −1 if it is malformed, or nobody has written it."""
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= 18 else -1


class CompareAndSetKey:
    """One key and its value, which is "" until a rank writes it.

    Args:
        key: used for nothing else.
        seals: prove that a rank wrote the value, if the ranks share a key.
    """

    def __init__(self, store: KeyValueStore, key: str, seals: StoreSeals) -> None:
        self._store = store
        self._key = key
        self._seals = seals

    def read(self) -> str:
        """
        Raises:
            RuntimeError: the store does not answer.
            AuthenticationError: the value was written without the key.
        """
        return self._open(self._found())

    def exists(self) -> bool:
        return self._store.check([self._key])

    def change(self, step: Callable[[str], str | None]) -> str:
        """Replace the value by `step(value)`, or keep it where that is None -> the value that now stands.

        `step` is called again whenever another rank was quicker, so it must only compute. A rank may repeat
        a request whose answer was lost: a step that finds its work done returns None, or the same value.

        Raises:
            RuntimeError, AuthenticationError: as `read`.
        """
        now, is_known = "", False  # usually this rank writes first, and need not read
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
        """Write `wish`, unless another rank was quicker -> the value that stands."""
        return self.change(lambda value: None if value else wish)

    def _found(self) -> str:
        return self._store.get(self._key).decode(errors="replace") if self.exists() else ""

    def _open(self, found: str) -> str:
        return self._seals.read(self._key, found) if found else ""
