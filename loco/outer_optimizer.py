"""The outer optimizer: counts inner steps, runs the rounds between them, and holds what a resumed run needs.

It is driven from outside: `PulseLoCo` and `DiLoCo` call it from their `step`, `loco.attach` from hooks of the
user's own optimizer.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .config import Settings
from .exchange.wire_config import WireConfig
from .inner.own_masters import OwnMasters
from .members.view import SiteTopology
from .report import SyncReport
from .round.loop import OuterLoop
from .round.state import check, state_of, take_over
from .round.weights import ShownAnchor, first_changed
from .setup_warnings import SetupWarnings


class OuterOptimizer:
    """
    Args:
        inner: the optimizer of this site's own steps.
        settings: equal on all sites.
        topology: who the sites are.
        wire: how entries travel.
        offload: keep θ, m and e in host memory.

    Attributes:
        loop: runs the rounds.
        local_step: inner steps since the last round.
        last_report: of the latest round.
    """

    def __init__(
        self, inner: Optimizer, settings: Settings, topology: SiteTopology, wire: WireConfig, *, offload: bool
    ) -> None:
        self.inner = inner
        self.loop = OuterLoop(inner, settings, topology, wire, offload=offload)
        self.local_step = 0
        self.last_report: SyncReport | None = None
        self._warnings = SetupWarnings(self.loop.state, inner)
        self._masters = OwnMasters(inner, self.loop.state.parameters)
        self._shown: ShownAnchor | None = None  # in eval mode
        self._is_unmoved = True  # no inner step has begun since w = cast(θ)

    def before_step(self) -> None:
        """Call it before an inner step moves the weights.

        Raises:
            ValueError: θ is shown, the weights were changed from outside, or other parameters are trained
                than the sites agreed on.
            LocoError: an interrupted round can't be settled yet.
        """
        self.refuse_in_eval("step()")
        self.settle(abandon=True)
        if self._is_unmoved:
            self.loop.state.parameters.check_unchanged(self.inner)
            self._check_weights()
            self._masters.before_first_step()
            self._is_unmoved = False

    def _check_weights(self) -> None:
        state = self.loop.state
        if name := first_changed(state):
            since = f"round {state.rounds_done}" if state.rounds_done else "the optimizer was built"
            raise ValueError(
                f"parameter {name} was changed from outside since {since}, so it is no longer the cast of θ, "
                f"which all sites hold: load the weights before you build the optimizer, or call "
                f"optimizer.adopt_weights() on every rank once they are loaded"
            )

    def after_step(self) -> None:
        """Count an inner step, and run the round that is due."""
        self.local_step += 1
        self.loop.tell_step(self.local_step)
        if self.local_step == 1:
            self._masters.after_first_step(self.loop.state.rounds_done)
        if self.local_step >= self.loop.state.settings.sync_every:
            self.sync()

    def sync(self) -> SyncReport:
        self.refuse_in_eval("sync()")
        self._masters.before_round()
        return self._done(self.loop.run_round(self._check_inner))

    def _check_inner(self) -> None:
        self.loop.state.parameters.check_unchanged(self.inner)
        self._masters.check()

    def settle(self, *, abandon: bool = False) -> SyncReport | None:
        report = self.loop.settle(abandon=abandon)
        return None if report is None else self._done(report)

    def _done(self, report: SyncReport) -> SyncReport:
        steps = self.local_step
        self.last_report, self.local_step, self._is_unmoved = report, 0, True
        self._warnings.look_at(report, steps=steps)
        return report

    def show_anchor(self) -> None:
        if self._shown is None:
            self.settle()  # which needs the weights
            self._shown = ShownAnchor(self.loop.state, self.loop.show_anchor)

    def give_weights_back(self) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.give_back()

    def refuse_in_eval(self, what: str) -> None:
        """
        Raises:
            ValueError: θ is shown.
        """
        if self._shown is not None:
            raise ValueError(
                f"{what} in eval mode, in which the weights show θ and not what the inner steps have made of "
                f"them: call optimizer.train() first"
            )

    def adopt_weights(self) -> None:
        self.loop.adopt_weights()
        self._shown, self.local_step, self._is_unmoved = None, 0, True
        self._warnings.forget()
        self._masters.forget()

    def own_state(self, inner_state: dict[str, Any]) -> dict[str, Any]:
        """What a state dict has under "loco", beside the inner optimizer's state."""
        own = state_of(self.loop.state, undecided_round=self.loop.undecided_round())
        if self._shown is not None:
            own["weights"] = self._shown.weights
        return own | {"local_step": self.local_step, "inner_entries": len(inner_state["state"])}

    def check_own_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take "loco" out of a state dict, and refuse it if it is not this rank's.

        Raises:
            ValueError: says what differs.
        """
        if "loco" not in state_dict:
            raise ValueError(
                "this state has no 'loco' entry, so it is not of a loco optimizer: load an inner "
                "optimizer's state into the inner optimizer before you wrap it, or attach to it"
            )
        own = state_dict.pop("loco")
        check(self.loop.state, own)
        found = len(state_dict["state"])
        saved = own.get("inner_entries", found)
        if found != saved:
            raise ValueError(
                f"this state holds the inner optimizer's state of {found} parameters, {saved} were saved. "
                f"torch.distributed.checkpoint fills only what is there, and in a fresh optimizer nothing "
                f"is: load with loco.Checkpoints"
            )
        return own

    def load(self, state_dict: dict[str, Any], agree: Callable[[], object] | None) -> None:
        """The inner optimizer's state and the outer one's, or nothing.

        Args:
            agree: called when only copying is left. If it raises, nothing was changed.
        """
        own = self.check_own_state(state_dict)
        before = self.inner.state_dict()
        try:
            self.inner.load_state_dict(state_dict)
            if agree is not None:
                agree()
        except BaseException:
            self.inner.load_state_dict(before)
            raise
        self.take_over(own)

    def take_over(self, own: dict[str, Any]) -> None:
        """Continue from what `check_own_state` returned."""
        self._shown = None
        take_over(self.loop.state, own)
        self.local_step = 0 if self.loop.resume() else int(own["local_step"])
        self._is_unmoved = self.local_step == 0
        self._warnings.forget()
        self._masters.forget()
