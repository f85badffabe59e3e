"""The state of the outer loop on one rank as plain data, and back, only where it belongs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from loco import kernels

from .loop import OuterLoop


def digest_of(tensor: Tensor) -> str:
    """What tells one θ, or m, from another, in a file and in a message to a person."""
    return kernels.digest_hex(tensor)


def state_of(outer: OuterLoop) -> dict[str, Any]:
    """Everything of this rank, by reference: plain numbers, strings and tensors.

    The working weights are part of it: between rounds each site has its own, and a model file that
    one rank wrote for all would lose the others'.
    """
    outer.check_whole()
    return {
        "format": 1,
        **identity(outer),
        "settings": vars(outer.settings).copy(),
        "round": outer.rounds_done,
        "anchor": outer.anchor,
        "momentum": outer.momentum,
        "residual": outer.residual,
        "weights": [p.detach() for p in outer.parameters.params],
        "tuner": outer.tuner.state(),
        **outer.own_state(),
    }


def check(outer: OuterLoop, state: Mapping[str, Any]) -> None:
    """Refuse a state that is not this rank's, before anything is changed."""
    if state.get("format") != 1:
        raise ValueError(f"a loco state of format {state.get('format')!r}; this is format 1")
    for key, mine in (identity(outer) | {"settings": vars(outer.settings)}).items():
        check_same(key, state.get(key), mine)
    for name in ("round", "local_step"):
        count = state.get(name)
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"this state's {name} is {count!r}, not a number of rounds or steps")
    if len(state.get("weights") or []) != len(outer.parameters.params):
        raise ValueError("this state does not hold the weights of all parameters: it is damaged")
    for name, mine, saved in _tensors(outer, state):
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (mine.shape, mine.dtype):
            what = f"{saved.dtype} {tuple(saved.shape)}" if isinstance(saved, Tensor) else repr(saved)
            raise ValueError(
                f"this state's {name} is {what}, not {mine.dtype} {tuple(mine.shape)}: it is damaged"
            )


@torch.no_grad()
def take_over(outer: OuterLoop, state: Mapping[str, Any]) -> None:
    """Continue from a state that `check` has passed, weights included."""
    with outer.rewritten():
        for _, mine, saved in _tensors(outer, state):
            mine.copy_(saved)
        outer.rounds_done = int(state["round"])
    outer.tuner.resume(state.get("tuner"))


def identity(outer: OuterLoop) -> dict[str, Any]:
    """Whose state it is."""
    return outer.topology.seat() | {"parameters": outer.parameters.describe()}


def check_same(key: str, saved: Any, mine: Any) -> None:
    """Raise a ValueError that names the first thing in which a saved state differs."""
    if isinstance(mine, dict) and isinstance(saved, dict):
        for name in mine | saved:
            check_same(name, saved.get(name), mine.get(name))
    elif saved != mine:
        if isinstance(mine, list) and isinstance(saved, list):
            pairs = [(a, b) for a, b in zip(saved, mine, strict=False) if a != b]
            saved, mine = pairs[0] if pairs else (len(saved), len(mine))
        raise ValueError(
            f"this state was saved with {key} = {saved}, this optimizer has {mine}: each rank loads the "
            f"state that it saved, into an optimizer built with the same settings"
        )


def _tensors(outer: OuterLoop, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Any]]:
    """What this rank holds beside what a state has for it."""
    for name in ("anchor", "momentum", "residual"):
        mine = getattr(outer, name)
        if mine is not None:
            yield name, mine, state.get(name)
    layout = outer.parameters
    for name, param, saved in zip(layout.names, layout.params, state["weights"], strict=True):
        yield f"weight {name}", param, saved
