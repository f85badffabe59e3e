"""What a user sees of the rounds: the same on `PulseLoCo`, on `DiLoCo` and on what `loco.attach` returns."""

from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from .config import Settings, checked_weight
from .report import SyncReport
from .round.hooks import RoundProgress
from .round.loop import OuterLoop
from .round.outer.outer_state import OuterState


class RoundSurface:
    """The rounds of an `OuterLoop`, which the class that uses this one has."""

    _loop: OuterLoop

    def sync(self) -> SyncReport:
        """Run a round now; call it on every rank. Useful at the end of training or before an evaluation.

        Raises:
            LocoError: the round failed and changed nothing; it can be repeated.
        """
        return self._loop.run_round()

    def settle(self) -> SyncReport | None:
        """Find out whether a round that was interrupted counts on all ranks, and if so finish it.

        `step`, `sync` and `Checkpoints.save` do this themselves. It may send messages, so call it on every
        rank. Sites that come and go can settle a round only in their next one: for them this does nothing.

        Returns:
            The round's report if it counts; None if it does not, or if no round was interrupted.

        Raises:
            LocoError: it can't be found out yet, because a rank or the store does not answer.
        """
        return self._loop.settle()

    def eval(self) -> None:
        """Show the anchor: the weights become cast(θ), which all sites hold alike, until `train()`.

        For an evaluation in the middle of a round, or to save the model that the sites have in common. What
        the inner steps have made of the weights is kept aside, which takes as much memory as they do;
        `state_dict()` still has it. Meanwhile steps and rounds are refused. Calling it again changes nothing.

        It sends no messages where a site is one rank. The ranks of a larger site must call it together. Only
        after a round that was interrupted all ranks of all sites must: it is settled first.

        Raises:
            LocoError: an interrupted round can't be settled yet, or a link inside the site is lost; the
                weights are what they were.
        """
        self._loop.show_anchor()

    def train(self) -> None:
        """End `eval()`: the weights are what they were before it, bit for bit. It sends no messages.

        What was written into the weights meanwhile is discarded, with a warning.
        """
        self._loop.give_weights_back()

    def adopt_weights(self) -> None:
        """Take weights that were loaded or changed from outside as a new start. Call it on every rank.

        Site 0's weights become θ on all sites, and w = cast(θ), as if the optimizer was built now; the other
        sites' weights are replaced. What was withheld (e) and the outer momentum (m) belonged to the old
        weights and become zero; inner steps since the last round are given up. The count of rounds goes on,
        and so does the inner optimizer's state. It ends eval mode.

        Without it, weights that are no longer cast(θ) when the first step after construction or after a round
        begins are refused: the round would take the difference for an update of this site. That check is one
        pass per round over this rank's slice, which reads θ and the weights: 8 bytes for each FP32 parameter.

        Raises:
            ValueError: a weight on site 0 is infinite or NaN; or the sites come and go.
            LocoError: a rank can't, or did not come. Nothing has changed, unless a link was lost while θ
                travelled: then call it again on every rank, or load a checkpoint.
        """
        self._loop.adopt_weights()

    def register_report_hook(self, hook: Callable[[SyncReport], None]) -> RemovableHandle:
        """Have `hook(report)` called after every round on this rank, when its weights are the new ones.

        The round counts: an error that the hook raises changes nothing of that, and comes out of the call
        that ran the round.
        """
        return self._loop.report_hooks.register(hook)

    def register_round_hook(self, hook: Callable[[RoundProgress], None]) -> RemovableHandle:
        """Have `hook(progress)` called at every phase of every round on this rank: see `loco.RoundProgress`.

        An error that it raises counts as this rank's own failure in that phase.
        """
        return self._loop.hooks.register(hook)

    @property
    def weight(self) -> float:
        """c, by which this site counts in the mean over the sites: g = (Σ c·Δ) / (Σ c). It can be set to
        another number at any time, as to what this site has learned from since the last round, over what a
        site usually learns from; the round after it, and only that, takes the inner steps until then with
        it. All ranks of a site set the same.
        """
        return self._loop.state.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._loop.state.weight = checked_weight(weight)

    @property
    def outer_state(self) -> OuterState:
        """The outer state of this rank, to be read: θ (`anchor`), m (`momentum`) and e (`residual`) of the
        elements `start` to `stop` of the flat parameters; `parameters`, the position of each parameter among
        these; `gate`; `rounds_done`.
        """
        return self._loop.state

    @property
    def settings(self) -> Settings:
        return self.outer_state.settings

    @property
    def sync_every(self) -> int:
        return self.settings.sync_every

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self.outer_state.rounds_done

    @property
    def local_step(self) -> int:
        """Inner steps since the last round."""
        return self._loop.local_step

    @property
    def steps_since_round(self) -> int:
        """Inner steps since the latest round was applied: where rounds overlap, `local_step` and those before
        the last boundary, if it applied none."""
        return self._loop.steps_since_round

    @property
    def is_synced(self) -> bool:
        """Whether the weights are cast(θ), as on all sites: no inner step was made since the last round and,
        where rounds overlap, none is in flight."""
        return self.local_step == 0 and self.outer_state.ahead is None

    @property
    def last_report(self) -> SyncReport | None:
        """Of the latest round, or None before the first."""
        return self._loop.last_report

    def metrics(self) -> dict[str, float]:
        """The latest round, for any logger; empty before the first one. The same on all ranks of a site, the
        times aside.

        The integrations log these by themselves. Bytes are those that this site sent to the others, all its
        ranks together; `loco/sent_bytes_total` goes on when a state is loaded.
        """
        report = self.last_report
        if report is None:
            return {}
        return {
            "loco/round": report.round,
            "loco/sent_bytes": report.site.sent_bytes,
            "loco/sent_bytes_total": self.outer_state.sent_bytes,
            "loco/below_dense": report.site.below_dense,
            "loco/density": report.site.density,
            "loco/round_seconds": sum(report.seconds.values()),
            "loco/waited": report.waited,
        }

    def _describe(self) -> str:
        shown = {name: value for name, value in vars(self.settings).items() if name != "kind"}
        shown["sites"] = self.outer_state.topology.num_sites
        return f"({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
