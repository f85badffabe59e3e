"""Parameters of which a rank holds a part: DTensors, as FSDP2, HSDP and tensor parallelism make them."""

import gc
import sys
import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from .placements import describe_placement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor."""
    # Importing torch.distributed.tensor takes long; where nobody has, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The elements that this rank holds, in the memory in which the tensor has them now.

    FSDP2 may give a parameter other memory at any time, so nobody should keep what this returns.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def layout_of(tensor: Tensor) -> list[Any]:
    """How a DTensor is divided, the same on all ranks: placements and the shape of the mesh, JSON-able. Empty
    for other tensors."""
    if not is_sharded(tensor):
        return []
    return [[describe_placement(one) for one in tensor.placements], list(tensor.device_mesh.shape)]


def shard_of(tensor: Tensor) -> list[Any]:
    """Which part this rank holds: its coordinates in the dimensions of the mesh along which the tensor is
    divided, and the part's shape. Ranks of a site with the same coordinates hold copies."""
    if not is_sharded(tensor):
        return [[], list(tensor.shape)]
    coordinates = tensor.device_mesh.get_coordinate() or []
    divided = [
        [dim, at]
        for dim, (at, placement) in enumerate(zip(coordinates, tensor.placements, strict=True))
        if not placement.is_replicate()
    ]
    return [divided, list(local(tensor).shape)]


def check_sharded(name: str, tensor: "DTensor", site_ranks: Collection[int] | None) -> None:
    """Refuse what can't be exchanged shard by shard.

    Args:
        site_ranks: the ranks of this site, by their numbers in the process group; None: not known.

    Raises:
        ValueError: says what to do.
    """
    mesh, held = tensor.device_mesh, local(tensor)
    if mesh.get_coordinate() is None:
        raise ValueError(f"parameter {name} is on a device mesh that this rank is not part of")
    foreign = sorted(set(mesh.mesh.flatten().tolist()) - set(site_ranks or mesh.mesh.flatten().tolist()))
    if foreign:
        raise ValueError(
            f"parameter {name} is divided or replicated over rank {foreign[0]} of another site: give "
            f"fully_shard and parallelize_module a mesh of this site's ranks alone, such as "
            f'mesh["shard"] of init_device_mesh(…, (sites, ranks), mesh_dim_names=("site", "shard"))'
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"parameter {name} is a partial sum ({tensor.placements}): redistribute it to Shard or "
            f"Replicate before you build the optimizer"
        )
    # What the forward pass sees of such a tensor is not its BF16 cast, which is what the gate looks at.
    if hasattr(held, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name} holds a {type(held).__name__}, which FSDP2 converts in a way of its own when "
            f"it gathers (FP8 scales anew each time), so that loco can't tell what a forward pass sees: turn "
            f"off the quantised all-gather (enable_fsdp_float8_all_gather=False, in torchao)"
        )
    if type(held) not in (Tensor, torch.nn.Parameter):
        raise ValueError(
            f"parameter {name} holds its shard as a {type(held).__name__}; loco synchronises plain tensors"
        )


class GatheredCopies:
    """The modules that FSDP2 has divided, which may hold gathered copies of their parameters.

    After a forward pass without a backward pass the root module keeps the copies that it has gathered, and
    the next forward pass takes them as they are: it would not see what is written into the shards.

    Args:
        named: the parameters to be written, by their names.

    Raises:
        ValueError: one of them is such a copy.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._modules: list[weakref.ref[Any]] = []
        ours = {id(p): name for name, p in named}
        module = sys.modules.get("torch.distributed.fsdp")
        if not ours or module is None:
            return
        # A parameter does not know its module. Modules can't be divided after their optimizer was built, so
        # those that are there now are all.
        found = [one for one in _candidates() if issubclass(type(one), module.FSDPModule)]
        before = {id(p) for one in found for p in one.parameters()}
        for one in found:
            one.reshard()
        after = {id(p) for one in found for p in one.parameters()}
        if copies := [name for p, name in ours.items() if p in before - after]:
            raise ValueError(
                f"parameter {copies[0]} is a copy that FSDP2 had gathered for a forward pass, and not "
                f"the parameter: call model.reshard() before you build the inner optimizer"
            )
        self._modules = [weakref.ref(one) for one in found if any(id(p) in ours for p in one.parameters())]

    def drop(self) -> None:
        """Have the next forward pass gather anew. Does nothing where no copies are held."""
        for reference in self._modules:
            if (module := reference()) is not None:
                module.reshard()


def _candidates() -> list[Any]:
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:  # it is torch's own
        return gc.get_objects()
    return list(_module_state_mapping)
