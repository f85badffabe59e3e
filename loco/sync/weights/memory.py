"""The memory that a subscriber writes: tensors on any device and of any strides, or slices of an engine's."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Changes

from ..errors import LayoutError
from ..versions.layout import BYTES, Region, name_of_dtype
from ..versions.vectors import MASK
from .coverage import check_coverage
from .tensors import EngineSlice, Named, tensors_of

Target = Named | Mapping[str, Sequence[EngineSlice]] | Mapping[str, Tensor | list[EngineSlice]]


class RegionMemory:
    """The memory of one region.

    Args:
        box: the region is its elements from `start` to `stop`, in row-major order.
    """

    def __init__(self, region: Region, box: Tensor) -> None:
        box = box if box.dim() else box.view(1)
        self.region, self._box = region, box
        self.numel = region.nbytes // region.format.itemsize
        self._bits = box.view(kernels.FORMATS[region.dtype].bits) if region.dtype in kernels.FORMATS else None
        # Elements that lie in a row in host memory are worked on where they are.
        row = box.is_contiguous() and box.device.type == "cpu"
        self.direct = self._formatted(box.view(-1)[region.start : region.stop]) if row else None

    def _formatted(self, flat: Tensor) -> Tensor:
        return flat if self.region.format == self.region.dtype else flat.contiguous().view(BYTES)

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        """Elements of the region in host memory, perhaps without a copy."""
        if self.direct is not None:
            return self.direct[first:last]
        last = self.numel if last is None else last
        flat = self._box.reshape(-1)  # without a copy if they lie in a row
        if self._bits is None:
            return self._formatted(flat[self.region.start : self.region.stop].cpu())[first:last]
        return flat[self.region.start + first : self.region.start + last].cpu()

    def write(self, first: int, fresh: Tensor) -> None:
        """Elements of the region from `first` on."""
        if self.direct is not None:
            self.direct[first : first + fresh.numel()] = fresh
        elif self._bits is None:
            whole = self.read().clone()
            whole[first : first + fresh.numel()] = fresh
            flat = self._box.reshape(-1).clone()
            flat[self.region.start : self.region.stop] = whole.view(self.region.dtype).to(flat.device)
            self._box.copy_(flat.view(self._box.shape))
        else:
            at = torch.arange(first, first + fresh.numel(), device=self._box.device) + self.region.start
            self._put(self._bits, at, fresh.view(self._bits.dtype))

    @staticmethod
    def _put(held: Tensor, at: Tensor, bits: Tensor) -> None:
        """`held.put_(at, bits)`, which torch refuses where deterministic algorithms are asked for."""
        held[torch.unravel_index(at, held.shape)] = bits.to(held.device)

    def take(self, positions: Tensor) -> Tensor:
        """The bits of some elements of the region."""
        if self.direct is not None or self._bits is None:
            flat = self.read()
            return flat.view(kernels.FORMATS[flat.dtype].bits)[positions]
        return torch.take(self._bits, positions.to(self._box.device) + self.region.start).cpu()

    def swap_bits(self, changes: Changes) -> int:
        """As `kernels.swap_bits`, of this region alone."""
        if self.direct is not None:
            return kernels.swap_bits([self.direct], changes)[0]
        if self._bits is None:
            whole = self.read().clone()
            moved = kernels.swap_bits([whole], changes)[0]
            self.write(0, whole)
            return moved
        at = changes.positions.to(self._box.device) + self.region.start
        was = torch.take(self._bits, at).cpu()
        self._put(self._bits, at, changes.bits)
        moved = kernels.digest_terms(changes.bits, changes.positions) - kernels.digest_terms(
            was, changes.positions
        )
        changes.bits.copy_(was)
        return moved & MASK


class Mirror(RegionMemory):
    """The memory of a region of which an engine holds parts, or none, as a rank of tensor parallelism does.

    A patch can be decoded only with all elements of the region. So a copy of all is kept in host memory, and
    what changes is written to it and to the engine.
    """

    def __init__(self, region: Region, whole: Tensor, slices: Sequence[EngineSlice]) -> None:
        super().__init__(region, whole[region.box()])
        self._whole, self._slices = whole, slices

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        for part in self._slices:  # the engine's are the ones that count
            self._whole[part.region] = part.view.to(self._whole)
        return super().read(first, last)

    def write(self, first: int, fresh: Tensor) -> None:
        super().write(first, fresh)
        for part in self._slices:
            part.view.copy_(self._whole[part.region])

    def swap_bits(self, changes: Changes) -> int:
        fresh = changes.bits.clone()
        moved = super().swap_bits(changes)
        inside = torch.unravel_index(changes.positions + self.region.start, self.region.size)
        at = [index + offset for index, offset in zip(inside, self.region.offset, strict=True)]
        for part in self._slices:
            here = torch.ones_like(changes.positions, dtype=torch.bool)
            for index, side in zip(at, part.region, strict=True):
                here &= (index >= side.start) & (index < side.stop)
            starts = [side.start for side in part.region]
            local = [
                (index[here] - start).to(part.view.device) for index, start in zip(at, starts, strict=True)
            ]
            part.view.view(fresh.dtype)[tuple(local)] = fresh[here].to(part.view.device)
        return moved


class Memory:
    """The tensors that a subscriber holds, by the names under which they are published.

    Args:
        held: tensors, or the slices of them that are here.
        loaded: the checkpoint that the slices were loaded from, if that is known.
    """

    def __init__(
        self, held: Mapping[str, Tensor | Sequence[EngineSlice]], loaded: Mapping[str, Tensor] | None = None
    ) -> None:
        self._tensors = {name: one.detach() for name, one in held.items() if isinstance(one, Tensor)}
        self._slices = {name: one for name, one in held.items() if not isinstance(one, Tensor)}
        self._loaded = loaded or {}
        self._mirrors: dict[str, Tensor] = {}

    @staticmethod
    def of(target: Target, loaded: Mapping[str, Tensor] | None) -> "Memory":
        if isinstance(target, Mapping) and any(not isinstance(one, Tensor) for one in target.values()):
            return Memory(cast(Mapping[str, Tensor | Sequence[EngineSlice]], target), loaded)
        return Memory(tensors_of(cast(Named, target)))

    def of_region(self, region: Region) -> RegionMemory:
        """
        Raises:
            LayoutError: the region is of a tensor that is not held here, or is another one here.
        """
        if region.name in self._slices:
            mirror = self._mirror(region)
            for part in self._slices[region.name]:
                if part.view.dtype != region.dtype or mirror[part.region].shape != part.view.shape:
                    raise LayoutError(f"what is published is {region}; here is a part of {_kind(part.view)}")
            return Mirror(region, mirror, self._slices[region.name])
        held = self._tensors.get(region.name)
        if held is None:
            near = ", ".join([*self._tensors, *self._slices][:3])
            raise LayoutError(
                f"{region.name} is published, and there is no such tensor here (there are {near}, …). A "
                f"Publisher of a transformers model, rather than of its tensors, has its checkpoint's names"
            )
        if tuple(held.shape) != region.shape or held.dtype != region.dtype:
            raise LayoutError(f"what is published is {region}; here it is {_kind(held)}")
        return RegionMemory(region, held[region.box()])

    def _mirror(self, region: Region) -> Tensor:
        if region.name not in self._mirrors:
            mirror, loaded = torch.zeros(region.shape, dtype=region.dtype), self._loaded.get(region.name)
            if loaded is not None and loaded.shape == mirror.shape and loaded.dtype == mirror.dtype:
                mirror.copy_(loaded)
            self._mirrors[region.name] = mirror
        return self._mirrors[region.name]

    def check_coverage(self, regions: Sequence[Region]) -> None:
        """
        Raises:
            LayoutError: the regions of all publishers are not just what is held here.
        """
        check_coverage(regions, self._tensors, self._slices)


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {name_of_dtype(tensor.dtype)}"
