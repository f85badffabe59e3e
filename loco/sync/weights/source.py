"""Finds the weights to publish, anew for each version, because frameworks may move them to other memory."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from loco.kernels import reference

from ..share import SitePosition, share_of
from ..versions.layout import BYTES, Layout, Region, cut
from ..versions.ties import Held, ties_of
from .tensors import (
    DtypeOf,
    Named,
    is_sharded,
    local_of,
    published_as,
    shard_of,
    tensors_of,
    without_aliases,
)

Tensors = dict[torch.dtype, list[Tensor]]  # by format: the pieces of its vector, in host memory


class Found(NamedTuple):
    """What a publisher publishes as one version.

    Attributes:
        tensors, shards, launched: as of `ties_of`.
    """

    layout: Layout
    pieces: Tensors
    tensors: Held
    shards: Held
    launched: int | None

    def ties(self) -> dict[str, str]:
        """Reads all tensors that other publishers hold, too."""
        return ties_of(self.tensors, self.shards, self.launched)


class Source:
    """
    Args:
        source, dtype, stream: as of `Publisher`.

    Attributes:
        share: which part of it is published here.
    """

    def __init__(self, source: Named, dtype: DtypeOf, stream: tuple[int, int] | SitePosition) -> None:
        if not callable(source) and not isinstance(source, Mapping):
            source = dict(source)  # an iterator is read once
        self._source, self._dtype, self._stream = source, dtype, stream
        self.share = share_of(stream)

    def read(self) -> Found:
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
        own, tensors, shards = list[Region](), Held(), Held()
        launched = None
        named = without_aliases(tensors_of(self._source))
        held = {name: local_of(tensor) for name, tensor in named.items()}
        for name, tensor in named.items():
            _check_layout(name, held[name])
            dtype = published_as(name, tensor, self._dtype)
            _check_cast(name, held[name], dtype)
            if not is_sharded(tensor):
                tensors.append((Region.whole(name, tensor.shape, dtype), held[name]))
                continue
            launched = share.site
            shard = shard_of(name, tensor, dtype, share.site, share.sites)
            if shard is not None:
                box, copy, copies = shard
                own += cut([box], copy, copies)
                if copies > 1:
                    shards.append((box, held[name]))
        whole, stream = [region for region, _ in tensors], share.stream
        layout = Layout((*own, *(whole if stream.count == 1 else cut(whole, stream.index, stream.count))))
        pieces = {
            f: [_piece(region, held[region.name]) for region in layout.of_format(f)] for f in layout.formats
        }
        return Found(layout, pieces, tensors, shards, launched)


def _check_layout(name: str, tensor: Tensor) -> None:
    if tensor.is_complex() or tensor.layout != torch.strided:
        raise ValueError(
            f"{name} is a {tensor.dtype} tensor of layout {tensor.layout}, which can't be published"
        )


def _check_cast(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    castable = (tensor.dtype, torch.bfloat16, torch.float16)
    if dtype not in castable:
        raise ValueError(
            f"dtype must be torch.bfloat16, torch.float16 or {tensor.dtype} for {name}, got {dtype}"
        )


def _piece(region: Region, tensor: Tensor) -> Tensor:
    """The elements of a region in a row, cast if they do not lie in host memory, where the kernels cast."""
    flat = tensor.detach().reshape(-1)
    if region.start or region.stop != flat.numel():
        flat = flat[region.start : region.stop]
    if flat.device.type != "cpu":
        flat = (flat if flat.dtype == region.dtype else reference.cast(flat, region.dtype)).to("cpu")
    return flat if region.format == region.dtype else flat.contiguous().view(BYTES)
