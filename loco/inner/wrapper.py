"""An optimizer around another one, which looks to torch like the inner one."""

import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ..logs import warn_once_per_machine
from .several import as_one, each_of

# Those whose own steps run rounds (see `loco.attach`), and a reference to what ends that.
ATTACHED: WeakKeyDictionary[Optimizer, Callable[[], Callable[[], None] | None]] = WeakKeyDictionary()
_logger = logging.getLogger(__name__)


class Wrapper(Optimizer):
    """A torch optimizer whose `param_groups` and `state` are the inner optimizer's own objects, so that
    schedulers, gradient scalers and hooks work on them. Subclasses define `step`."""

    def __init__(self, inner: Optimizer | Iterable[Optimizer]) -> None:
        inner = as_one(inner)
        if any(isinstance(one, Wrapper) for one in each_of(inner)):
            raise ValueError("inner already exchanges with the other sites; wrap the optimizer inside it")
        for one in each_of(inner):
            _detach(one)
        self.inner = inner
        self._wrapped = False
        super().__init__(inner.param_groups, inner.defaults)
        self._wrapped = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the sites agree on the parameters once, at construction."""
        if not self._wrapped:
            return  # torch's constructor adds the inner optimizer's own groups
        raise ValueError(
            f"the sites agreed on the parameters when this {type(self).__name__} was built: add the group "
            f"to the inner optimizer before you build it, or build a new one around the inner optimizer"
        )

    # torch's constructor assigns these two; the assignment is ignored, as the inner optimizer holds them.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass


def _detach(optimizer: Optimizer) -> None:
    """A training that is begun again after an error attaches again, and nobody has ended what was before."""
    detach = ATTACHED.get(optimizer, lambda: None)()
    if detach is not None:
        warn_once_per_machine(
            _logger,
            "this %s was attached before: its earlier handle is detached, and runs no more rounds",
            type(optimizer).__name__,
        )
        detach()
