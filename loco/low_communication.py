"""What PULSELoCo and DiLoCo have in common: inner steps, and a round with the other sites every so often."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from .config import Settings
from .exchange.wire_config import WireConfig
from .inner.init_step import only_initialises
from .inner.wrapper import Wrapper
from .members.sites import default_topology
from .members.view import SiteTopology
from .outer_optimizer import OuterOptimizer
from .surface import RoundSurface


class LowCommunicationOptimizer(RoundSurface, Wrapper):
    """What `PulseLoCo` and `DiLoCo` have in common: an inner optimizer for the steps of this site, and a
    round with the other sites after every `sync_every` of them.

    Attributes:
        inner: the wrapped optimizer; or if there are several, one that stands for them.
        topology: the sites, and this rank's position among them.
        local_step: inner steps since the last round.
        last_report: the `loco.SyncReport` of the latest round, or None before the first.
    """

    def __init__(
        self,
        inner: Optimizer | Iterable[Optimizer],
        settings: Settings,
        topology: SiteTopology | None,
        wire: WireConfig,
        offload: bool,
    ) -> None:
        super().__init__(inner)
        self.topology = topology or default_topology()
        self._rounds = OuterOptimizer(self.inner, settings, self.topology, wire, offload=offload)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step; every `sync_every`-th call also runs a round. Returns the inner step's loss.

        A step that a GradScaler skips because of an overflow counts too, so that all sites come to the round
        together. A step by which torch.distributed.checkpoint gives a fresh optimizer its state does not.

        Raises:
            LocoError: the round failed and changed nothing; the inner step is kept. `sync()` repeats the
                round, and so does the next `step()`, after another inner step. A rank on which something
                else failed (it ran out of memory, for example) raises that error, and the others a PeerError.
        """
        if only_initialises(self):
            return self.inner.step() if closure is None else self.inner.step(closure)
        self._rounds.before_step()
        loss = None
        try:
            if not self._unscale_or_skip():
                loss = self.inner.step() if closure is None else self.inner.step(closure)
            self._rounds.after_step()
        except BaseException:
            # GradScaler removes these only after a step that returns; left here, they would be used again.
            for left_by_scaler in ("grad_scale", "found_inf"):
                self.__dict__.pop(left_by_scaler, None)
            raise
        return loss

    # With this, torch's GradScaler always calls step(), with `grad_scale` and `found_inf` set on this
    # optimizer. If it skipped the steps whose gradients overflow, this site would come late to its rounds.
    _step_supports_amp_scaling = True

    def _unscale_or_skip(self) -> bool:
        """Unscale the gradients, as GradScaler does for other optimizers. -> whether they overflowed"""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf):
            return True
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(inverse.to(p.grad.device))
        return False

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "loco" all that the outer loop holds on this rank.

        Every rank saves its own: residuals and, between rounds, weights differ from site to site. As in
        torch, tensors are references. No messages are sent: if a round was interrupted before this rank knew
        whether it counts, this is the state before that round, and `["loco"]["undecided_round"]` is the
        round's number. Call `settle()` on every rank first to have it decided.

        Raises:
            LocoError: this rank's state is incomplete, because a round was interrupted while it was applied.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        inner: dict[str, Any] = self.inner.state_dict()
        state = {**inner, "loco": self._rounds.own_state(inner)}
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], *, agree: Callable[[], object] | None = None
    ) -> None:
        """Resume from `state_dict()` of the same rank, bit for bit, in the middle of a round too.

        The weights are restored with it. Load the model first if you load both.

        Args:
            agree: called once the state is checked and the inner optimizer has accepted its part, when only
                copying is left. If it raises, nothing was changed: with it several ranks load together, or
                none of them does.

        Raises:
            ValueError: the state is not this rank's or not of this setup; nothing was changed.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._rounds.load(state_dict, agree)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} holds process groups and can't be copied or pickled: "
            f"save its state_dict()"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._describe()} around {self.inner}"
