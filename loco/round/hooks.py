"""Seeing a round from outside, and stepping into it, at named phases."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from torch.utils.hooks import RemovableHandle

from loco.kernels import Entries

from ..members.view import View
from .outer.outer_state import OuterState


class Phase(StrEnum):
    """In the order of a round."""

    BEGUN = "begun"  # the inner steps are done, and nothing has been read yet
    ENCODED = "encoded"  # this rank knows what it would send
    ANNOUNCED = "announced"  # all sites know what each would send, and none refuses
    RECEIVED = "received"  # all entries are here
    VOTED = "voted"  # all sites have everything
    COMMITTED = "committed"  # the round counts, on all sites
    APPLIED = "applied"  # θ, m, e and w are those after the round


COUNTS = (Phase.COMMITTED, Phase.APPLIED)  # this rank knows that the round does


@dataclass(frozen=True, kw_only=True)
class RoundProgress:
    """A round at one of its phases, on this rank.

    Attributes:
        phase: a `Phase`, which compares as its name.
        number: of the round, from 1.
        view: who takes part, and the links to them.
        state: `optimizer.outer_state`. A hook may change weights and state at "begun" and "applied", and
            nothing in between; at "applied" the weights must stay the cast of θ.
        entries: what this rank sends, from "encoded" on. Where all elements are sent as FP32, their place
            is taken by the sums: at "encoded" and "announced" they are still there.
        contributions: from "received" on, what is added up in this order: each site's entries, or their sums.
            The next round may overwrite them: copy what you keep.
    """

    phase: Phase
    number: int
    view: View
    state: OuterState
    entries: Entries | None = None
    contributions: Sequence[Entries] = ()


T = TypeVar("T")


class Hooks(Generic[T]):
    """A user's functions of one argument, called in the order in which they were registered."""

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, Callable[[T], None]] = OrderedDict()

    def register(self, hook: Callable[[T], None]) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, argument: T) -> None:
        for hook in list(self._hooks.values()):
            hook(argument)
