"""Rounds around an optimizer that a framework owns: through the optimizer's own hooks, not in its place."""

import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .inner.init_step import only_initialises
from .inner.several import each_of
from .inner.wrapper import ATTACHED
from .logs import warn_once_per_machine
from .optimizer import LowCommunicationOptimizer, PulseLoCo
from .report import SyncReport
from .surface import RoundSurface

_logger = logging.getLogger(__name__)


def attach(
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    method: Callable[..., LowCommunicationOptimizer] = PulseLoCo,
    in_state_dict: bool = True,
    **options: Any,
) -> "Attached":
    """Run rounds after the steps of `optimizer`, which stays the object that its framework knows.

        handle = loco.attach(optimizer, sync_every=8)       # the arguments of loco.PulseLoCo
        handle = loco.attach(optimizer, method=loco.DiLoCo, sync_every=8)

        optimizer.step()                                    # every 8th call also runs a round
        handle.last_report

    Weights, θ, e and m are those that the wrapper `loco.PulseLoCo(optimizer, …)` would give, bit for bit.
    `optimizer.state_dict()` then has the state of the rounds under "loco", and `optimizer.load_state_dict`
    takes it from there, so that a framework that saves the optimizer of every rank resumes bit for bit. Load
    the model before the optimizer, because the optimizer's state holds this site's weights.

    Attach once the framework has prepared model and optimizer, and before the first step. A step that a
    GradScaler skips because of an overflow does not count here, as torch calls no hook: the other sites wait
    until this one catches up. The wrapper counts it.

    An optimizer that was attached before, by a training that has failed say, is detached first.

    Args:
        optimizer: a torch optimizer with its parameters; or several, each with parameters of its own. A step
            counts when all of them have stepped. The first one's state dict has "loco".
        method: `loco.PulseLoCo` or `loco.DiLoCo`.
        in_state_dict: whether `optimizer.state_dict()` has "loco". Without it the handle's own `state_dict`
            must be saved on every rank: for frameworks of which one rank saves the optimizer for all.
        options: the method's arguments: `sync_every`, `topology` and so on.

    Raises:
        ValueError, TypeError, AgreementError: as `method`.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for one in given:
        if isinstance(one, Optimizer) and not hasattr(one, "_optimizer_step_post_hooks"):
            raise ValueError(
                f"this {type(one).__name__} has no step hooks, because it skips torch.optim.Optimizer's "
                f"constructor: attach to the optimizer inside it"
            )
    return Attached(method(given, **options), in_state_dict=in_state_dict)


class Attached(RoundSurface):
    """The rounds around an attached optimizer: what `loco.attach` returns.

    It can be saved and loaded by `loco.Checkpoints`, as the wrappers can, and each other's checkpoints too.

    Args:
        wrapper: built around the optimizer. The handle takes its place.
        in_state_dict: as for `loco.attach`.

    Attributes:
        inner: the optimizer; or if there are several, one that stands for them.
        topology: the sites, and this rank's position among them.
    """

    def __init__(self, wrapper: LowCommunicationOptimizer, *, in_state_dict: bool) -> None:
        self.inner = wrapper.inner
        self.topology = wrapper.topology
        self._loop = wrapper._loop
        self._optimizers = each_of(self.inner)
        self._stepped: set[int] = set()  # which of them have, since the last step that counts
        self._has_warned = False
        self._in_state_dict = in_state_dict
        self._own_call = False  # the handle itself saves or loads
        self._loading: dict[str, Any] | None = None
        self._hooks: list[RemovableHandle] = []
        for k, optimizer in enumerate(self._optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after(k)))
            ATTACHED[optimizer] = WeakMethod(self.detach)
        first = self._optimizers[0]
        self._hooks.append(first.register_state_dict_post_hook(self._add_own_state))
        self._hooks.append(first.register_load_state_dict_pre_hook(self._check_own_state))
        self._hooks.append(first.register_load_state_dict_post_hook(self._take_over))

    def sync(self) -> SyncReport:
        self._stepped.clear()
        return super().sync()

    sync.__doc__ = RoundSurface.sync.__doc__

    def detach(self) -> None:
        """Remove the hooks: the optimizer's steps count no more, and its state dict is its own again.

        Weights stay as they are; in eval mode they are given back. `sync()` on all ranks before it leaves all
        sites with the same.
        """
        self.train()
        if self._hooks:  # else another handle may have taken its place
            for optimizer in self._optimizers:
                ATTACHED.pop(optimizer, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and under "loco" that of the rounds: as `PulseLoCo.state_dict`."""
        self._own_call = True
        try:
            inner = self.inner.state_dict()
        finally:
            self._own_call = False
        return {**inner, "loco": self._loop.own_state(inner)}

    def load_state_dict(
        self, state_dict: dict[str, Any], *, agree: Callable[[], object] | None = None
    ) -> None:
        """As `PulseLoCo.load_state_dict`."""
        self._own_call = True
        try:
            self._loop.load(state_dict.copy(), agree)
        finally:
            self._own_call = False
        self._stepped.clear()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if only_initialises(optimizer):
            return
        self._loop.refuse_in_eval("step()")
        if not self._stepped:
            self._loop.before_step()

    def _after(self, number: int) -> Callable[..., None]:
        def count(optimizer: Optimizer, *_: Any) -> None:
            if only_initialises(optimizer):
                return
            if number in self._stepped:
                self._warn_of_missing_steps(number)
            self._stepped.add(number)
            if len(self._stepped) == len(self._optimizers):
                self._stepped.clear()
                self._loop.after_step()

        return count

    def _warn_of_missing_steps(self, number: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            missing = [k for k in range(len(self._optimizers)) if k not in self._stepped]
            warn_once_per_machine(
                _logger,
                "optimizer %d has stepped again before optimizer %s has: a step counts, and a round becomes "
                "due, when all %d of them have stepped",
                number,
                ", ".join(map(str, missing)),
                len(self._optimizers),
            )

    def _add_own_state(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if self._own_call or not self._in_state_dict:
            return None
        return {**state, "loco": self._loop.own_state(state)}

    def _check_own_state(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Nothing has been loaded yet: what is refused here changes nothing."""
        self._loading = None
        if self._own_call:
            return
        if self._in_state_dict:
            self._loading = self._loop.check_own_state(state)
        elif "loco" in state:
            raise ValueError(
                "this state has that of the rounds under 'loco', and loco.attach was told "
                "in_state_dict=False: load it with the handle's load_state_dict"
            )

    def _take_over(self, _: Optimizer) -> None:
        own, self._loading = self._loading, None
        if own is not None:
            self._loop.take_over(own)
            self._stepped.clear()

    def __repr__(self) -> str:
        return f"{self.settings.kind}{self._describe()} attached to {self.inner}"
