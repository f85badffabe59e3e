"""A subscriber's memory of one publisher's regions, seen as the vectors that its files hold."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Changes

from ..versions.layout import Layout
from ..versions.vectors import MASK, combined
from .memory import Memory, Mirror, RegionMemory


class PublisherMemory:
    """The regions of one publisher in a subscriber's memory, as one vector for each format.

    Raises:
        LayoutError: as of `Memory.of_region`.
    """

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.layout = layout
        self._regions: dict[torch.dtype, list[RegionMemory]] = {}
        for format in layout.formats:
            self._regions[format] = [memory.of_region(region) for region in layout.of_format(format)]
        self.digests: dict[torch.dtype, list[int]] = {}

    @property
    def digest(self) -> str:
        return combined([digest for format in self.layout.formats for digest in self.digests[format]])

    def measure(self) -> dict[torch.dtype, list[int]]:
        """The digests of what is in memory now."""
        return {
            format: [kernels.digest_bits(region.read()) for region in regions]
            for format, regions in self._regions.items()
        }

    def numel(self, format: torch.dtype) -> int:
        return sum(region.numel for region in self._regions[format])

    def direct(self, format: torch.dtype) -> list[Tensor] | None:
        """The pieces of a vector where they are; None unless all lie in rows in host memory."""
        pieces = [region.direct for region in self._regions[format]]
        return None if any(piece is None for piece in pieces) else [p for p in pieces if p is not None]

    def read(self, format: torch.dtype, first: int, last: int) -> Tensor:
        """A copy of some elements of a vector, in host memory."""
        parts = [region.read(a, b) for region, a, b in self._within(format, first, last)]
        return torch.cat([part.view(kernels.FORMATS[format].bits) for part in parts]).view(format)

    def write(self, format: torch.dtype, first: int, fresh: Tensor) -> None:
        at = 0
        for region, a, b in self._within(format, first, first + fresh.numel()):
            region.write(a, fresh[at : at + b - a])
            at += b - a

    def take(self, format: torch.dtype, positions: Tensor) -> Tensor:
        """The bits of some elements of a vector, in host memory."""
        found = torch.empty(positions.numel(), dtype=kernels.FORMATS[format].bits)
        for region, start, a, b in self._of_positions(format, positions):
            if a < b:
                found[a:b] = region.take(positions[a:b] - start)
        return found

    def swaps_in_one_call(self, format: torch.dtype) -> bool:
        """Whether `swap` writes all or nothing, whatever exception comes: Python raises none inside C."""
        return kernels.packs_fast() and self._in_place(format) is not None

    def swap_bits(self, format: torch.dtype, changes: Changes) -> None:
        """As `Vectors.swap_bits`."""
        pieces = self._in_place(format)
        if pieces is not None:
            moved = kernels.swap_bits(pieces, changes)
        else:
            moved = [
                region.swap_bits(Changes(changes.positions[a:b] - start, changes.bits[a:b])) if a < b else 0
                for region, start, a, b in self._of_positions(format, changes.positions)
            ]
        self.digests[format] = [d + m & MASK for d, m in zip(self.digests[format], moved, strict=True)]

    def _in_place(self, format: torch.dtype) -> list[Tensor] | None:
        """As `direct`, but None where changes are also written to an engine's memory."""
        mirrored = any(isinstance(region, Mirror) for region in self._regions[format])
        return None if mirrored else self.direct(format)

    def _of_positions(
        self, format: torch.dtype, positions: Tensor
    ) -> Iterator[tuple[RegionMemory, int, int, int]]:
        """The regions, where each begins in its vector, and which of the ascending positions lie there."""
        regions = self._regions[format]
        starts = torch.tensor([0, *(region.numel for region in regions)]).cumsum(0)
        edges = torch.searchsorted(positions, starts).tolist()
        return zip(regions, starts.tolist(), edges, edges[1:], strict=False)

    def _within(self, format: torch.dtype, first: int, last: int) -> Sequence[tuple[RegionMemory, int, int]]:
        """The regions that have elements `first` to `last`, and which of theirs."""
        found, at = [], 0
        for region in self._regions[format]:
            a, b = max(first - at, 0), min(last - at, region.numel)
            if a < b:
                found.append((region, a, b))
            at += region.numel
        return found
