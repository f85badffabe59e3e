"""Keeping the rounds' state apart from the state dict of an attached optimizer."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class Apart:
    """Takes the rounds out of `optimizer.state_dict()`: frameworks let one rank save it for all ranks of its
    world, and θ, m and e are each rank's own.

    Args:
        optimizer: attached; of several the first, whose state dict has the rounds.
        bring: gives what `optimizer.load_state_dict` loads in its place: this rank's.
    """

    def __init__(self, optimizer: Optimizer, bring: Callable[[], Any] | None = None) -> None:
        def without(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in state.items() if name != "loco"}

        def together(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return state if bring is None or "loco" in state else {**state, "loco": bring()}

        self._hooks = [
            optimizer.register_state_dict_post_hook(without),
            optimizer.register_load_state_dict_pre_hook(together, prepend=True),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
