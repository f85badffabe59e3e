"""Seeing a round from outside, and stepping into it, at named phases."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.hooks import RemovableHandle

from loco.kernels import Entries

# In the order of a round. "begun": the inner steps are done, and nothing has been read yet. "encoded": this
# rank knows what it would send. "announced": all sites know what each would send, and none refuses.
# "received": all entries are here. "voted": all sites have everything. "committed": the round counts on all
# sites. "applied": θ, m, e and w are those after the round.
PHASES = ("begun", "encoded", "announced", "received", "voted", "committed", "applied")


@dataclass(frozen=True, kw_only=True)
class RoundProgress:
    """A round at one of its phases, on this rank.

    Attributes:
        phase: one of PHASES.
        number: of the round, from 1.
        state: `optimizer.outer_state`. A hook may change weights and state at "begun" and "applied", and
            nothing in between.
        entries: what this rank sends, from "encoded" on.
        contributions: from "received" on, what is added up in this order: each site's entries, or their sums.
    """

    phase: str
    number: int
    state: Any
    entries: Entries | None = None
    contributions: Sequence[Entries] = ()


Hook = Callable[[RoundProgress], None]


class Hooks:
    """Those of one optimizer, in the order in which they were registered."""

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, Hook] = OrderedDict()

    def register(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def call(self, progress: RoundProgress) -> None:
        for hook in list(self._hooks.values()):
            hook(progress)
