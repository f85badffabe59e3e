"""A site's checkpoint, put together from its ranks' files, and cut anew for ranks that shard otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..parameters.placements import held_elements
from ..parameters.sharding import is_sharded, layout_of
from ..round.outer.outer_state import OuterState
from ..round.outer.state import identity
from .plain_data import PART, WRAPPED

_VECTORS = ("anchor", "momentum", "residual")


def same_model(saved: Sequence[Any], mine: Sequence[Any]) -> bool:
    """Whether two descriptions of parameters differ at most in how these are divided."""
    return [one[:3] for one in saved] == [one[:3] for one in mine]


def resharded(trees: Sequence[Any], outer: OuterState) -> Any:
    """What this rank is to load.

    Args:
        trees: what the ranks of the site that it continues have saved, by their numbers in that site.

    Raises:
        ValueError: the files do not hold every element, or something that can't be cut.
    """
    first = trees[outer.topology.rank_in_site % len(trees)]  # whose `extra` this rank takes over
    if _has_parts(first["extra"]):
        raise ValueError(
            "`extra` holds DTensors, which can only be loaded with the sharding with which they were saved"
        )
    saved = [tree["optimizer"]["loco"] for tree in trees]
    count = len(outer.parameters.params)
    whole_sizes = [torch.Size(one[1]) for one in saved[0]["parameters"]]
    held = [[_held(own, k) for k in range(count)] for own in saved]

    def whole(k: int, parts: Sequence[Tensor], what: str) -> Tensor:
        return _whole(whole_sizes[k], [by_param[k] for by_param in held], parts, what)

    own = dict(first["optimizer"]["loco"])
    mine = [_mine(outer, k) for k in range(count)]
    names = outer.parameters.names
    own["weights"] = [
        whole(k, [one["weights"][k] for one in saved], f"the weight {names[k]}").flatten()[mine[k]]
        for k in range(count)
    ]
    for name in _VECTORS:
        if own[name] is None:
            continue
        by_rank = _vectors([one[name] for one in saved], saved[0])
        split = [v.split([at.numel() for at in held[r]]) for r, v in enumerate(by_rank)]
        parts = [
            whole(k, [one[k].view(held[r][k].shape) for r, one in enumerate(split)], f"{name} of {names[k]}")
            for k in range(count)
        ]
        flat = torch.cat([part.flatten()[mine[k].flatten()] for k, part in enumerate(parts)])
        own[name] = flat[outer.start : outer.stop].clone()
    if own.get("step_length") is not None:
        own["step_length"] |= {"before": None}  # of other elements than this rank will look at
    own |= {"shards": None, **identity(outer.topology, outer.parameters)}

    def cut(index: int, name: str, value: Any) -> Any:
        k, entries = index, [tree["optimizer"]["state"][index][name] for tree in trees]
        what = f"{name} of {names[k]}"
        is_part = isinstance(value, dict) and PART in value
        held_as = value["local"] if is_part else value
        if isinstance(held_as, dict) and WRAPPED in held_as:
            raise ValueError(
                f"{what} is a {held_as['type']}, whose elements can't be told apart: load it with the "
                f"sharding of the save"
            )
        if is_part:
            if torch.Size(value["shape"]) != whole_sizes[k]:
                raise ValueError(f"{what} is divided otherwise than its parameter, and can't be cut anew")
            value = whole(k, [one["local"] for one in entries], what)
        if not isinstance(value, Tensor) or value.shape != whole_sizes[k] or not value.dim():
            return value  # a counter, say
        param = outer.parameters.params[k]
        if not is_sharded(param):
            return value
        placements, _ = layout_of(param)
        local = value.flatten()[mine[k]]
        marked = {"local": local, "mesh_of": k, "placements": placements}
        return {PART: 1, **marked, "shape": list(param.shape), "stride": list(param.stride())}

    state = {
        index: {name: cut(index, name, value) for name, value in of_param.items()}
        for index, of_param in first["optimizer"]["state"].items()
    }
    return first | {"optimizer": first["optimizer"] | {"state": state, "loco": own}}


def _held(own: Mapping[str, Any], k: int) -> Tensor:
    """Which elements of parameter k the rank of this state held."""
    _, shape, _, *divided = own["parameters"][k]
    if not divided:
        return torch.arange(torch.Size(shape).numel()).view(*shape)
    (placements, mesh), (coordinates, local) = divided, own["shards"][k]
    held = held_elements(shape, placements, mesh, coordinates)
    if list(held.shape) != list(local):
        raise ValueError(
            f"parameter {own['parameters'][k][0]} was divided unevenly by several dimensions of a mesh, so "
            f"its layout does not say which elements a rank holds: load it with the sharding of the save"
        )
    return held


def _mine(outer: OuterState, k: int) -> Tensor:
    described, shards = outer.parameters.describe(), outer.parameters.shards()
    return _held({"parameters": described, "shards": shards}, k)


def _whole(shape: torch.Size, held: Sequence[Tensor], parts: Sequence[Tensor], what: str) -> Tensor:
    result, is_known = None, torch.zeros(shape.numel(), dtype=torch.bool)
    for at, part in zip(held, parts, strict=True):
        if result is None:
            result = part.new_empty(shape.numel())
        result[at.flatten()] = part.flatten()
        is_known[at.flatten()] = True
    if result is None or not bool(is_known.all()):
        raise ValueError(f"the files of this site do not hold all of {what}")
    return result.view(shape)


def _vectors(by_rank: Sequence[Tensor], first: Mapping[str, Any]) -> Sequence[Tensor]:
    """Ranks that do not shard hold slices of one vector; as if each held all of it."""
    if first.get("shards"):
        return by_rank
    whole = torch.cat(list(by_rank))
    return [whole] * len(by_rank)


def _has_parts(tree: Any) -> bool:
    if isinstance(tree, dict):
        return PART in tree or any(_has_parts(value) for value in tree.values())
    return isinstance(tree, list | tuple) and any(_has_parts(value) for value in tree)
