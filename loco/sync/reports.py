"""The reports of `publish` and `update`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Published:
    """The report of one `publish`.

    Attributes:
        reason: why a subscriber must read all weights (an anchor), if there is no patch; else "".
        entries: how many elements changed since the last version; all of them if there is no patch.
        numel: how many elements this publisher has.
        patch_bytes: of the patch from the last version, or of the anchor if there is no patch.
        bytes: all that was written, patches over several versions, anchor and manifest included; 0 as long as
            `publish(wait=False)` has not finished.
        dense_bytes: of all weights, as they are in memory.
        skips: the older versions from which a patch leads to this one.
        seconds: "find" and "pack", while the weights may not change, and then "write".
    """

    version: int
    reason: str
    entries: int
    numel: int
    patch_bytes: int
    dense_bytes: int
    seconds: dict[str, float]
    bytes: int = 0
    skips: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Updated:
    """The report of one `update`.

    Attributes:
        version: that the weights are now.
        previous: that they were; None if they were of no version that is known.
        entries: how many elements were written.
        bytes: that were read of patches and anchors.
        files: how many these were.
        seconds: "prepare" (download and decode, while the weights are only read) and "apply".
    """

    version: int
    previous: int | None
    entries: int
    bytes: int
    files: int
    seconds: dict[str, float]
