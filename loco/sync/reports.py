"""The reports of `publish` and `update`."""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)
_MANY = 0.3  # of the weights


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


def warned_of_many_changes(published: Published) -> bool:
    """Warn of a patch from which nobody has much. -> whether there was reason to"""
    share = published.entries / max(1, published.numel)
    is_dense = not published.reason and share > _MANY
    if is_dense:
        logger.warning(
            "version %d changes %.0f%% of the weights, so that its patch takes %.0f%% of their bytes, as "
            "is usual for adapters. Else: is the learning rate far above 1e-5, are there many steps between "
            "two versions, or does the training keep no FP32 weights, so that each of its steps rounds?",
            published.version,
            100 * share,
            100 * published.patch_bytes / published.dense_bytes,
        )
    return is_dense


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
