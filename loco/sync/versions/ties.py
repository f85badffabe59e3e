"""Checks that the manifests of several publishers are one version, and no mixture of two attempts at it.

Publishers do not talk to each other. One that died and came back may write its part of a version whose other
parts are of an older attempt. So each manifest has ties, which are names with values: two manifests with a
name in common must have the same value for it.

Of tensors that several publishers hold alike, each of them publishes a share, and the tie is a digest of the
whole: it differs if one of them held other weights, in another attempt or between two rounds. Of a shard that
one rank alone holds nothing can be compared: its tie is random, drawn once in each launch of a site.
"""

import uuid
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from loco import kernels

from .layout import BYTES, Layout, Region
from .manifest import Manifest
from .vectors import combined

Held = list[tuple[Region, Tensor]]  # whole boxes, and their elements here
_KEY = "loco.sync/launch"  # in the store of the default process group


def ties_of(tensors: Held, shards: Held, launched: int | None) -> dict[str, str]:
    """
    Args:
        tensors: that all publishers hold.
        shards: that some of them hold.
        launched: the site of which this is a rank, if it holds any shards.
    """
    ties = {"tensors": f"{_boxes(tensors)} {_contents(tensors)}"}
    if shards:
        ties[f"shards {_boxes(shards)}"] = _contents(shards)
    if launched is not None:
        ties[f"launch of site {launched}"] = _launch()
    return ties


def _boxes(held: Held) -> str:
    return Layout(tuple(region for region, _ in held)).digest[:16]


def _contents(held: Held) -> str:
    return combined([_digest(tensor.detach().reshape(-1)) for _, tensor in held])


def _digest(flat: Tensor) -> int:
    flat = flat if flat.device.type in ("cpu", "cuda") else flat.to("cpu")
    return kernels.digest_bits(flat if flat.dtype in kernels.FORMATS else flat.contiguous().view(BYTES))


def _launch() -> str:
    """The process group that shards have has a store, which is another one after each launch."""
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set(_KEY, "", uuid.uuid4().hex).decode()


def why_mixed(manifests: Sequence[Manifest]) -> str:
    """Why these manifests, of one number, are not one version, in words; "" if they are."""
    said: dict[str, tuple[str, Manifest]] = {}
    for manifest in manifests:
        for name, value in {**manifest.ties, "training": manifest.training}.items():
            other, whose = said.setdefault(name, (value, manifest))
            if other != value:
                is_content = name.startswith(("tensors", "shards"))
                what = "is a share of other weights" if is_content else "is of another attempt"
                return f"{manifest.path} {what} than {whose.path}"
    return ""
