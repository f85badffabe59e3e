"""The errors of publishers and subscribers."""

from ..errors import LocoError


class SyncError(LocoError):
    """Base of all errors of publishing and subscribing. The weights are what they were before the call."""


class NoVersionError(SyncError):
    """Nothing is published yet, or not the version that was asked for, or no way leads to it any more."""


class DamagedError(SyncError):
    """A file in the store is not what its publisher wrote, or is not there.

    Attributes:
        path: of the file in the store.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.path = path


class LayoutError(SyncError):
    """What is published and what is held here are not the same tensors."""


class TakenOverError(SyncError):
    """Somebody else publishes under the same name."""


class StaleStoreError(SyncError):
    """The newest version in the store is older than what is held: `update(version=…)` goes back to it."""


class OtherTrainingError(SyncError):
    """What is published belongs to another training than what is followed: make a new `Subscriber` for it."""


class MixedVersionError(SyncError):
    """The publishers of a version hold different weights, or another one's part is of an earlier attempt."""


class NotThisVersionError(SyncError):
    """What is in memory is not the version that it should be: something else has written into the weights."""
