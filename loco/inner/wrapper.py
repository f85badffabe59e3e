"""An optimizer around another one, which looks to torch like the inner one."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from .several import as_one, each_of

ATTACHED: WeakSet[Optimizer] = WeakSet()  # those whose own steps run rounds: see `loco.attach`


class Wrapper(Optimizer):
    """A torch optimizer whose `param_groups` and `state` are the inner optimizer's own objects, so that
    schedulers, gradient scalers and hooks work on them. Subclasses define `step`."""

    def __init__(self, inner: Optimizer | Iterable[Optimizer]) -> None:
        inner = as_one(inner)
        if any(isinstance(one, Wrapper) for one in each_of(inner)):
            raise ValueError("inner already exchanges with the other sites; wrap the optimizer inside it")
        for one in each_of(inner):
            if one in ATTACHED:
                raise ValueError(
                    f"this {type(one).__name__} exchanges with the other sites already, since loco.attach: "
                    f"call detach() on its handle first"
                )
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
