"""DTensors in a state, as plain data: a rank saves the part that it holds, and where that part belongs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..round.placements import describe_placement, placement_of
from ..round.sharding import is_sharded, local

MARK = "loco.dtensor"


def without_dtensors(tree: Any, params: Sequence[Tensor]) -> Any:
    """The same dicts, lists and tuples, with each DTensor replaced by a dict of what this rank holds of it.

    Args:
        params: the parameters whose meshes the DTensors use.

    Raises:
        ValueError: a DTensor is on another mesh, or a sum that is not complete.
    """
    if isinstance(tree, dict):
        return {key: without_dtensors(value, params) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [without_dtensors(value, params) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    if not is_sharded(tree):
        return tree
    meshes = [p.device_mesh if is_sharded(p) else None for p in params]
    if tree.device_mesh not in meshes:
        raise ValueError(
            f"a state holds a DTensor on a device mesh ({tree.device_mesh}) on which no parameter is: "
            f"a checkpoint could not say where it belongs. Keep such a state on the mesh of its parameter"
        )
    return {
        MARK: 1,
        "local": local(tree),
        "mesh_of": meshes.index(tree.device_mesh),  # a parameter's number
        "placements": [describe_placement(one) for one in tree.placements],
        "shape": list(tree.shape),
        "stride": list(tree.stride()),
    }


def with_dtensors(tree: Any, params: Sequence[Tensor]) -> Any:
    """The inverse of `without_dtensors`, over parameters that are divided in the same way.

    Raises:
        ValueError: what lies there is not what `without_dtensors` makes.
    """
    if isinstance(tree, dict):
        if MARK in tree:
            return _rebuilt(tree, params)
        return {key: with_dtensors(value, params) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [with_dtensors(value, params) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


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
