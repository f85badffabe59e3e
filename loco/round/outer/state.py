"""The state of the outer loop on one rank as plain data, and back into the rank that it belongs to."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco import kernels
from loco.kernels import BLOCK, Entries

from ...config import checked_weight
from ...members.view import SiteTopology
from ...parameters.flat_parameters import FlatParameters
from .outer_state import OuterState
from .step_length import StepLength

_logger = logging.getLogger(__name__)


def digest_of(tensor: Tensor) -> str:
    """Identifies a θ or m in files and error messages."""
    return kernels.digest_hex(tensor)


def standing_of(outer: OuterState) -> str:
    """Identifies what all sites must hold alike to go on together."""
    anchor, length = digest_of(outer.anchor), outer.step_length
    return anchor if length is None else f"{anchor}-{length.mark:016x}-{digest_of(length.before)}"


def state_of(outer: OuterState, *, undecided_round: int | None) -> dict[str, Any]:
    """This rank's whole state: plain numbers and strings, and references to its tensors. Sends no messages.

    The working weights are part of it: between rounds each site has its own, and a model file that one rank
    writes for all ranks would lose those of the other sites.

    Args:
        undecided_round: the round that was interrupted before this rank knew whether it counts; the state is
            the one before it.

    Raises:
        LocoError: this rank's state is incomplete, because a round was interrupted while it was applied.
    """
    outer.check_whole()
    return {
        "format": 1,
        **identity(outer.topology, outer.parameters),
        "undecided_round": undecided_round,
        "settings": vars(outer.settings).copy(),
        "round": outer.rounds_done,
        "weight": outer.weight,
        "anchor": outer.anchor,
        "momentum": outer.momentum,
        "residual": outer.residual,
        "step_length": None if outer.step_length is None else outer.step_length.state(),
        "weights": outer.parameters.tensors,
        "tuner": outer.tuner.state(),
        "took_part": dict(outer.took_part),
        "sent_bytes": outer.sent_bytes,
    }


def pop_own_state(outer: OuterState, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Take "loco" out of an optimizer's state dict, and refuse it if it is not this rank's, before anything
    is changed.

    Raises:
        ValueError: says what differs.
    """
    if "loco" not in state_dict:
        raise ValueError(
            "this state has no 'loco' entry, so it is not of a loco optimizer: load an inner "
            "optimizer's state into the inner optimizer before you wrap it, or attach to it"
        )
    own = state_dict.pop("loco")
    _check(outer, own)
    found = len(state_dict["state"])
    saved = own.get("inner_entries", found)
    if found != saved:
        raise ValueError(
            f"this state holds the inner optimizer's state of {found} parameters, {saved} were saved. "
            f"torch.distributed.checkpoint fills only what is there, and in a fresh optimizer nothing "
            f"is: load with loco.Checkpoints"
        )
    return own


def load_inner(inner: Optimizer, state: dict[str, Any], agree: Callable[[], object] | None) -> None:
    """The inner optimizer's state, if then `agree` does not raise."""
    before = inner.state_dict()
    try:
        inner.load_state_dict(state)
        if agree is not None:
            agree()
    except BaseException:
        inner.load_state_dict(before)
        raise


def _check(outer: OuterState, state: Mapping[str, Any]) -> None:
    if state.get("format") != 1:
        raise ValueError(f"a loco state of format {state.get('format')!r}; this is format 1")
    own = identity(outer.topology, outer.parameters)
    for key, mine in (own | {"settings": vars(outer.settings)}).items():
        check_same(key, state.get(key), mine)
    for name in ("round", "local_step"):
        count = state.get(name)
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"this state's {name} is {count!r}, not a number of rounds or steps")
    for name in ("weight", "sent_weight"):
        checked_weight(state.get(name, 1.0))
    if len(state.get("weights") or []) != len(outer.parameters.params):
        raise ValueError("this state does not hold the weights of all parameters: it is damaged")
    if outer.step_length is not None:
        StepLength.from_state(state.get("step_length"), outer.numel)
    ahead_by = state.get("ahead_by", 0.0)
    if not isinstance(ahead_by, float) or not 0 <= ahead_by < float("inf"):
        raise ValueError(f"this state's ahead_by is {ahead_by!r}: it is damaged")
    check_in_flight(state.get("ahead"), outer.numel)
    for name, mine, saved in _tensors(outer, state):
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (mine.shape, mine.dtype):
            what = f"{saved.dtype} {tuple(saved.shape)}" if isinstance(saved, Tensor) else repr(saved)
            raise ValueError(
                f"this state's {name} is {what}, not {mine.dtype} {tuple(mine.shape)}: it is damaged"
            )


def check_in_flight(saved: Any, numel: int) -> None:
    """Kernels trust what they are given: a ValueError unless these are entries of a vector of that size."""
    if saved is None:
        return
    entries = None
    if isinstance(saved, dict) and saved.keys() == set(Entries._fields):
        entries = Entries(**saved)
    if entries is None or not _are_entries(entries, numel):
        raise ValueError(f"this state's entries in flight are none of a vector of {numel} elements")


def _are_entries(entries: Entries, numel: int) -> bool:
    starts, offsets, values = entries
    if not isinstance(values, Tensor) or values.dtype != torch.float32 or values.dim() != 1:
        return False
    if starts is None:
        return offsets is None and values.numel() == numel
    if not isinstance(offsets, Tensor) or not isinstance(starts, Tensor):
        return False
    if (starts.dtype, offsets.dtype) != (torch.int64, torch.uint8) or offsets.shape != values.shape:
        return False
    if starts.shape != (-(-numel // BLOCK) + 1,) or int(starts[0]) != 0 or int(starts[-1]) != values.numel():
        return False
    if bool((starts.diff() < 0).any()):
        return False
    where = entries.indices()
    return bool((where.diff() > 0).all()) and (where.numel() == 0 or int(where[-1]) < numel)


@torch.no_grad()
def take_over(outer: OuterState, state: Mapping[str, Any]) -> None:
    """Continue from a state that has passed `pop_own_state`, weights included."""
    if state.get("undecided_round") is not None:
        _logger.warning(
            "this state was saved before the outcome of round %s was known: if other ranks load a state of "
            "that round, the next round will fail with a ReplicaError",
            state["undecided_round"],
        )
    outer.parameters.drop_gathered_copies()
    with outer.rewriting():
        for _, mine, saved in _tensors(outer, state):
            mine.copy_(saved)
        outer.rounds_done = int(state["round"])
        outer.weight = float(state.get("weight", outer.weight))
        if outer.step_length is not None:
            outer.step_length = StepLength.from_state(state["step_length"], outer.numel)
        outer.took_part = dict(state.get("took_part", {}))
        outer.sent_bytes = int(state.get("sent_bytes", 0))
        outer.anchor_incomplete = False
    outer.tuner.resume(state.get("tuner"))


def identity(topology: SiteTopology, parameters: FlatParameters) -> dict[str, Any]:
    """Which rank a state belongs to, and which parameters."""
    shards = {"shards": parameters.shards()} if parameters.is_sharded else {}
    return topology.seat() | {"parameters": parameters.describe()} | shards


def check_same(key: str, saved: Any, mine: Any) -> None:
    """Raise a ValueError that names the first difference between a saved state and this optimizer."""
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


def _tensors(outer: OuterState, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Any]]:
    """Each tensor of this rank: its name, itself, and the state's value for it."""
    for name in ("anchor", "momentum", "residual"):
        mine = getattr(outer, name)
        if mine is not None:
            yield name, mine, state.get(name)
    layout = outer.parameters
    for name, param, saved in zip(layout.names, layout.tensors, state["weights"], strict=True):
        yield f"weight {name}", param, saved
