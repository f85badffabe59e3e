"""What PULSELoCo and DiLoCo have in common: inner steps, and a round with the other sites every so often."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .config import Settings
from .exchange.wire_config import WireConfig
from .members.topology import Topology
from .members.view import SiteTopology
from .report import SyncReport
from .round.hooks import Hook
from .round.loop import OuterLoop
from .round.outer_state import OuterState
from .round.state import check, state_of, take_over
from .wrapper import Wrapper


class LowCommunicationOptimizer(Wrapper):
    """What `PulseLoCo` and `DiLoCo` have in common: an inner optimizer for the steps of this site, and a
    round with the other sites after every `sync_every` of them.

    Attributes:
        inner: the wrapped optimizer.
        topology: the sites, and this rank's position among them.
        local_step: inner steps since the last round.
        last_report: the `loco.SyncReport` of the latest round, or None before the first.
    """

    def __init__(
        self,
        inner: Optimizer,
        settings: Settings,
        topology: SiteTopology | None,
        wire: WireConfig,
        offload: bool,
    ) -> None:
        super().__init__(inner)
        self.topology = topology or Topology()
        self._outer = OuterLoop(inner, settings, self.topology, wire, offload=offload)
        self.local_step = 0
        self.last_report: SyncReport | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step; every `sync_every`-th call also runs a round. Returns the inner step's loss.

        A step that a GradScaler skips because of an overflow counts too, so that all sites come to the round
        together.

        Raises:
            LocoError: the round failed and changed nothing; the inner step is kept. `sync()` repeats the
                round, and so does the next `step()`, after another inner step. A rank on which something
                else failed (it ran out of memory, for example) raises that error, and the others a PeerError.
        """
        self._settle(abandon=True)
        loss = None
        try:
            if not self._unscale_or_skip():
                loss = self.inner.step() if closure is None else self.inner.step(closure)
            self.local_step += 1
            self._outer.tell_step(self.local_step)
            if self.local_step >= self.sync_every:
                self.sync()
        except BaseException:
            # GradScaler removes these only after a step that returns; left here, they would be used again.
            for left_by_scaler in ("grad_scale", "found_inf"):
                self.__dict__.pop(left_by_scaler, None)
            raise
        return loss

    def sync(self) -> SyncReport:
        """Run a round now; call it on every rank. Useful at the end of training or before an evaluation.

        Raises:
            LocoError: the round failed and changed nothing; it can be repeated.
        """
        return self._done(self._outer.run_round())

    def settle(self) -> SyncReport | None:
        """Find out whether a round that was interrupted counts on all ranks, and if so finish it.

        `step`, `sync` and `Checkpoints.save` do this themselves. It may send messages, so call it on every
        rank. Sites that come and go can settle a round only in their next one: for them this does nothing.

        Returns:
            The round's report if it counts; None if it does not, or if no round was interrupted.

        Raises:
            LocoError: it can't be found out yet, because a rank or the store does not answer.
        """
        return self._settle()

    def _settle(self, *, abandon: bool = False) -> SyncReport | None:
        report = self._outer.settle(abandon=abandon)
        return None if report is None else self._done(report)

    def _done(self, report: SyncReport) -> SyncReport:
        self.last_report, self.local_step = report, 0
        return report

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

    @property
    def outer_state(self) -> OuterState:
        """The outer state of this rank, to be read: θ (`anchor`), m (`momentum`) and e (`residual`) of the
        elements `start` to `stop` of the flat parameters; `parameters`, the position of each parameter among
        these; `gate`; `rounds_done`.
        """
        return self._outer.state

    def register_round_hook(self, hook: Hook) -> RemovableHandle:
        """Have `hook(progress)` called at every phase of every round on this rank: see `loco.RoundProgress`.

        An error that it raises counts as this rank's own failure in that phase.
        """
        return self._outer.hooks.register(hook)

    @property
    def settings(self) -> Settings:
        return self._outer.state.settings

    @property
    def sync_every(self) -> int:
        return self._outer.state.settings.sync_every

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self._outer.state.rounds_done

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
        state: dict[str, Any] = self.inner.state_dict()
        own = {"local_step": self.local_step, "inner_entries": len(state["state"])}
        state = {
            **state,
            "loco": state_of(self._outer.state, undecided_round=self._outer.undecided_round()) | own,
        }
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
        if "loco" not in state_dict:
            raise ValueError(
                "this state has no 'loco' entry, so it is not of a loco optimizer: load an inner "
                "optimizer's state into the inner optimizer before you wrap it"
            )
        outer = state_dict.pop("loco")
        check(self._outer.state, outer)
        found = len(state_dict["state"])
        saved = outer.get("inner_entries", found)
        if found != saved:
            raise ValueError(
                f"this state holds the inner optimizer's state of {found} parameters, {saved} were saved. "
                f"torch.distributed.checkpoint fills only what is there, and in a fresh optimizer nothing "
                f"is: load with loco.Checkpoints"
            )
        before = self.inner.state_dict()
        try:
            self.inner.load_state_dict(state_dict)
            if agree is not None:
                agree()
        except BaseException:
            self.inner.load_state_dict(before)
            raise
        take_over(self._outer.state, outer)
        self.local_step = 0 if self._outer.resume() else int(outer["local_step"])
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} holds process groups and can't be copied or pickled: "
            f"save its state_dict()"
        )

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" for name, value in vars(self._outer.state.settings).items() if name != "kind"
        )
        return f"{type(self).__name__}({settings}, sites={self.topology.num_sites}) around {self.inner}"
