"""The outer optimizer: counts inner steps, runs the rounds between them, and holds what a resumed run needs.

It is driven from outside: `PulseLoCo` and `DiLoCo` call it from their `step`, `loco.attach` from hooks of the
user's own optimizer.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .config import Settings
from .exchange.wire_config import WireConfig
from .members.view import SiteTopology
from .report import SyncReport
from .round.loop import OuterLoop
from .round.state import check, state_of, take_over


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

    def before_step(self) -> None:
        """Call it before an inner step moves the weights."""
        self.settle(abandon=True)

    def after_step(self) -> None:
        """Count an inner step, and run the round that is due."""
        self.local_step += 1
        self.loop.tell_step(self.local_step)
        if self.local_step >= self.loop.state.settings.sync_every:
            self.sync()

    def sync(self) -> SyncReport:
        return self._done(self.loop.run_round())

    def settle(self, *, abandon: bool = False) -> SyncReport | None:
        report = self.loop.settle(abandon=abandon)
        return None if report is None else self._done(report)

    def _done(self, report: SyncReport) -> SyncReport:
        self.last_report, self.local_step = report, 0
        return report

    def own_state(self, inner_state: dict[str, Any]) -> dict[str, Any]:
        """What a state dict has under "loco", beside the inner optimizer's state."""
        own = state_of(self.loop.state, undecided_round=self.loop.undecided_round())
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
        take_over(self.loop.state, own)
        self.local_step = 0 if self.loop.resume() else int(own["local_step"])
