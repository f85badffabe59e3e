"""Tensors of other kinds in a state, as plain data: of a DTensor the part that this rank holds and where it
belongs; of a tensor that wraps others (torchao's 8-bit states) those, and its type's name."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..parameters.placements import describe_placement, placement_of
from ..parameters.sharding import is_sharded, local
from .formats import mapped

PART, WRAPPED = "loco.dtensor", "loco.wrapped"


def as_plain_data(tree: Any, params: Sequence[Tensor]) -> Any:
    """The same dicts, lists and tuples, with dicts in the place of such tensors.

    Args:
        params: the parameters whose meshes the DTensors use.

    Raises:
        ValueError: a DTensor is on another mesh, or a sum that is not complete; or a tensor's type could not
            be found when it is loaded.
    """

    def replaced(_: str, value: Any) -> Any:
        if is_sharded(value):
            return _part(value, params) | {"local": replaced("", local(value))}
        return _unwrapped(value) if is_traceable_wrapper_subclass(value) else value

    return mapped(tree, replaced)


def from_plain_data(tree: Any, params: Sequence[Tensor]) -> Any:
    """The inverse of `as_plain_data`, over parameters that are divided in the same way.

    Raises:
        ValueError: what lies there is not what `as_plain_data` makes, or a type that this program lacks.
    """
    if isinstance(tree, list | tuple):
        items = [from_plain_data(value, params) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    if not isinstance(tree, dict):
        return tree
    found = {key: from_plain_data(value, params) for key, value in tree.items()}
    if PART in found:
        return _rebuilt(found, params)
    return _wrapped(found) if WRAPPED in found else found


def _part(tensor: Any, params: Sequence[Tensor]) -> dict[str, Any]:
    """All but the local part."""
    meshes = [p.device_mesh if is_sharded(p) else None for p in params]
    if tensor.device_mesh not in meshes:
        raise ValueError(
            f"a state holds a DTensor on a device mesh ({tensor.device_mesh}) on which no parameter is: "
            f"a checkpoint could not say where it belongs. Keep such a state on the mesh of its parameter"
        )
    return {
        PART: 1,
        "mesh_of": meshes.index(tensor.device_mesh),  # a parameter's number
        "placements": [describe_placement(one) for one in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _rebuilt(saved: dict[str, Any], params: Sequence[Tensor]) -> Tensor:
    from torch.distributed.tensor import DTensor

    try:
        like, held = params[saved["mesh_of"]], saved["local"]
        placements = [placement_of(described) for described in saved["placements"]]
        if not is_sharded(like) or not isinstance(held, Tensor):
            raise ValueError("this state holds part of a DTensor for a parameter that is none: it is damaged")
        return DTensor.from_local(
            held.to(local(like).device),
            like.device_mesh,
            placements,
            run_check=False,
            shape=tuple(saved["shape"]),  # pyright: ignore[reportArgumentType]
            stride=tuple(saved["stride"]),
        )
    except (KeyError, IndexError, TypeError) as error:
        what = f"this state holds a part of a DTensor that can't be read ({error!r}): it is damaged"
        raise ValueError(what) from error


def _unwrapped(tensor: Any) -> dict[str, Any]:
    name = _name(type(tensor))
    _registered(name)  # so that what is saved can be loaded
    inner, attributes = tensor.__tensor_flatten__()
    return {
        WRAPPED: 1,
        "type": name,
        "inner": {attribute: getattr(tensor, attribute) for attribute in inner},
        "attributes": attributes,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _wrapped(saved: dict[str, Any]) -> Tensor:
    try:
        kind = _registered(saved["type"])
        size, stride = torch.Size(saved["shape"]), tuple(saved["stride"])
        return kind.__tensor_unflatten__(saved["inner"], saved["attributes"], size, stride)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"this state holds a tensor that can't be put together ({error!r})") from error


def _registered(name: str) -> Any:
    """The type of this name, of those that torch.load may make in this program: a name imports nothing."""
    for kind in torch.serialization.get_safe_globals():
        if isinstance(kind, type) and issubclass(kind, Tensor) and _name(kind) == name:
            return kind
    raise ValueError(
        f"a state holds a tensor of type {name}, which torch.load(…, weights_only=True) would refuse, too: "
        f"import the library that it comes from, or register it by torch.serialization.add_safe_globals"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
