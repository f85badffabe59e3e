"""Which part of the weights one publisher publishes."""

from dataclasses import dataclass
from typing import Protocol

from .versions.manifest import Stream


class SitePosition(Protocol):
    """What a publisher needs of an optimizer's topology: where this rank stands among all sites' ranks."""

    @property
    def num_sites(self) -> int: ...
    @property
    def site(self) -> int: ...
    @property
    def ranks_per_site(self) -> int: ...
    @property
    def rank_in_site(self) -> int: ...


@dataclass(frozen=True)
class Share:
    """
    Attributes:
        site, sites: which one this is of so many that hold the same shards, each on ranks of its own.
    """

    stream: Stream
    site: int = 0
    sites: int = 1


def share_of(stream: tuple[int, int] | SitePosition) -> Share:
    """
    Args:
        stream: as of `Publisher`.

    Raises:
        ValueError: it is a pair that is out of range.
    """
    if isinstance(stream, tuple):
        index, count = stream
        if not 0 <= index < count:
            raise ValueError(f"stream must be (k, n) with 0 <= k < n, got {stream}")
        return Share(Stream(index, count))
    site, sites, ranks = stream.site, stream.num_sites, stream.ranks_per_site
    return Share(Stream(site * ranks + stream.rank_in_site, sites * ranks), site, sites)
