"""What a checkpoint needs of an optimizer. Nothing in this wing knows which optimizer it is."""

from collections.abc import Callable
from typing import Any, Protocol

from ..config import Settings
from ..members.view import SiteTopology
from ..round.outer.outer_state import OuterState


class Saveable(Protocol):
    """An optimizer with rounds, as `Checkpoints` sees it."""

    topology: SiteTopology

    @property
    def settings(self) -> Settings: ...
    @property
    def outer_state(self) -> OuterState: ...
    @property
    def round(self) -> int: ...
    @property
    def local_step(self) -> int: ...
    @property
    def steps_since_round(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """The inner state, and under "loco" what `round.outer.state.state_of` returns. Sends no messages."""
        ...

    def load_state_dict(
        self, state_dict: dict[str, Any], *, agree: Callable[[], object] | None = None
    ) -> None:
        """Continue from a state. When only copying is left, call `agree`; if it raises, change nothing."""

    def settle(self) -> object:
        """Find out whether an interrupted round counts. May send messages."""
        ...
