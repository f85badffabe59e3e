"""The weights that a publisher reads, found anew for each version: frameworks may give them other memory."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loco.kernels import reference

from ..share import Ranks, share_of
from ..versions.layout import BYTES, Layout, Region, cut
from .tensors import (
    DtypeOf,
    Named,
    is_sharded,
    local_of,
    published_as,
    region_of,
    tensors_of,
    without_aliases,
)

Tensors = dict[torch.dtype, list[Tensor]]  # by format: the pieces of its vector, in host memory


class Source:
    """
    Args:
        source, dtype, stream: as of `Publisher`.

    Attributes:
        share: which part of it is published here.
    """

    def __init__(self, source: Named, dtype: DtypeOf, stream: tuple[int, int] | Ranks) -> None:
        if not callable(source) and not isinstance(source, Mapping):
            source = dict(source)  # an iterator is read once
        self._source, self._dtype, self._stream = source, dtype, stream
        self.share = share_of(stream)

    def read(self) -> tuple[Layout, Tensors]:
        """What there is now. Tensors in host memory are not copied; FP32 ones are not cast yet.

        Raises:
            ValueError: a tensor can't be published; says why. Or the sites are others than before.
        """
        share = self.share
        if share_of(self._stream) != share:
            raise ValueError(
                f"there were {share.sites} sites, of which this was number {share.site}, and now they are "
                f"others: where sites come and go, let one publish, by stream=(rank_in_site, ranks_per_site)"
            )
        found = without_aliases(tensors_of(self._source))
        held = {name: local_of(tensor) for name, tensor in found.items()}
        for name, tensor in held.items():
            if tensor.is_complex() or tensor.layout != torch.strided:
                raise ValueError(
                    f"{name} is a {tensor.dtype} tensor of layout {tensor.layout}, which can't be published"
                )
        own, shared = [], []
        for name, tensor in found.items():
            region = region_of(name, tensor, published_as(name, tensor, self._dtype), share.site, share.sites)
            if region is not None:
                self._check_cast(region, held[name])
                (own if is_sharded(tensor) else shared).append(region)
        if share.stream.count > 1:
            shared = cut(shared, share.stream.index, share.stream.count)
        layout = Layout((*own, *shared))
        return layout, {
            f: [_piece(region, held[region.name]) for region in layout.of_format(f)] for f in layout.formats
        }

    @staticmethod
    def _check_cast(region: Region, tensor: Tensor) -> None:
        castable = (tensor.dtype, torch.bfloat16, torch.float16)
        if region.dtype not in castable:
            raise ValueError(
                f"dtype must be torch.bfloat16, torch.float16 or {tensor.dtype} for {region.name}, "
                f"got {region.dtype}"
            )


def _piece(region: Region, tensor: Tensor) -> Tensor:
    """The elements of a region in a row, cast if they do not lie in host memory, where the kernels cast."""
    flat = tensor.detach().reshape(-1)
    if region.start or region.stop != flat.numel():
        flat = flat[region.start : region.stop]
    if flat.device.type != "cpu":
        flat = (flat if flat.dtype == region.dtype else reference.cast(flat, region.dtype)).to("cpu")
    return flat if region.format == region.dtype else flat.contiguous().view(BYTES)
