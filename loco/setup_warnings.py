"""What goes wrong in silence when a training is set up, said once, as soon as it shows."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .config import GATES, Settings
from .logs import warn_once_per_machine
from .members.view import SiteTopology
from .parameters.flat_parameters import FlatParameters
from .report import SyncReport

_logger = logging.getLogger(__name__)


class SetupWarnings:
    """
    Args:
        settings: of the rounds.
        topology: who the sites are.
        parameters: that are synchronised.
        anchor: this rank's part of θ, before the first round.
        inner: the optimizer of this site's own steps.
    """

    def __init__(
        self,
        settings: Settings,
        topology: SiteTopology,
        parameters: FlatParameters,
        anchor: Tensor,
        inner: Optimizer,
    ) -> None:
        self._settings, self._topology, self._parameters, self._inner = settings, topology, parameters, inner
        self._said: set[str] = set()
        self._residual_norm: float | None = 0.0  # after the last round; None: not known
        self._equal_rounds = 0  # one after the other, in which all sites' norms were the same
        self._weight = float(torch.linalg.vector_norm(anchor)) / max(anchor.numel(), 1) ** 0.5
        self._look_at_formats()

    def forget(self) -> None:
        """The state was replaced: nothing is known of what was before the next round."""
        self._residual_norm, self._equal_rounds = None, 0

    def look_at(self, report: SyncReport, *, steps: int) -> None:
        """
        Args:
            report: of a round that was just done.
            steps: inner steps since the one before.
        """
        before, self._residual_norm = self._residual_norm, report.residual_norm
        norms = report.update_norms
        if not norms:
            return  # this site was given θ, and took no part
        self._look_at_norms(report.round, norms)
        self._look_at_density(report)
        self._look_at_reach(report, sum(norms) / len(norms), before)
        # Nothing is sent, and what is withheld is what was withheld before: no weight has moved.
        if steps and not any(norms) and report.residual_norm == before:
            self._say(
                "unmoved",
                "round %d: no site has anything to send, and no weight of this one has moved in %d inner "
                "steps: %s",
                report.round,
                steps,
                self._why_unmoved(),
            )

    def _look_at_norms(self, round: int, norms: Sequence[float]) -> None:
        is_equal = len(norms) > 1 and norms[0] > 0 and len(set(norms)) == 1
        self._equal_rounds = self._equal_rounds + 1 if is_equal else 0
        # Two norms of a billion elements may agree in all 24 bits by chance, once; not twice.
        if self._equal_rounds * (len(norms) - 1) >= 2:
            self._say(
                "equal",
                "round %d: the updates of all %d sites have the same norm to the last bit, %g. Either "
                "something averages gradients over the sites at every step (DistributedDataParallel over the "
                "whole world, or Trainer, Accelerate or Lightning that was started over all sites), and "
                "rounds have nothing to do: average inside a site only, with "
                "process_group=topology.site_group, or give each site a world of its own. Or all sites train "
                "on the same data: seed it with topology.site",
                round,
                len(norms),
                norms[0],
            )

    def _look_at_density(self, report: SyncReport) -> None:
        if GATES[self._settings.gate] is not None and report.density > 0.5:
            self._say(
                "dense",
                "round %d: this site sends %.0f%% of its entries, so the gate saves few bytes beside "
                "loco.DiLoCo (at 97%% that sends only 1.4 times as many), whose rounds take less time. In a "
                "round most weights move by more than a BF16 ulp, counted with the gate's gain of %g; the"
                " gate is for smaller steps, such as those of learning rates near 1e-6. If the training "
                "needs this one, use loco.DiLoCo: docs/algorithm.md, "
                '"Where the method stops paying"',
                report.round,
                100 * report.density,
                self._settings.gate_gain,
            )

    def _look_at_reach(self, report: SyncReport, update_norm: float, withheld: float | None) -> None:
        """An outer step that is far too long ruins the weights in the first rounds, or once a warm-up of the
        inner learning rate has come far enough."""
        settings = self._settings
        if report.outer_lr <= 1 or withheld is None:
            return  # the step is no longer than the sites' own; or it is not known what is new
        # By root mean squares: the norm of the update is that of a site, whose ranks have a part each.
        numel = report.numel * self._topology.ranks_per_site
        ahead = settings.outer_momentum if settings.nesterov else 0.0
        # At least that much of the update is new: the rest was withheld before, and most of it will be again.
        new = update_norm - withheld
        moved = report.outer_lr * (1 + ahead) * new / max(numel, 1) ** 0.5
        if moved > 0.5 * self._weight > 0:
            self._say(
                "reach",
                "round %d: an outer step of outer_lr %g moves the weights by up to %.0f%% of what they were "
                "at the start. Outer steps of that length are for inner learning rates near 1e-6: at ten "
                "times the inner learning rate, or in rounds of ten times as many steps, divide outer_lr by "
                "ten",
                report.round,
                report.outer_lr,
                100 * moved / self._weight,
            )

    def _why_unmoved(self) -> str:
        if all(p.grad is None for p in self._parameters.params):
            return (
                "none of the optimizer's parameters has a gradient. If the model's have, they were replaced "
                "after the optimizer was built (by load_state_dict(assign=True), for example): build it anew "
                "on those"
            )
        if not any(group.get("lr", 1.0) for group in self._inner.param_groups):
            return "the learning rate is 0"
        return "gradients are zero, or steps are too small for the format of the parameters"

    def _look_at_formats(self) -> None:
        layout = self._parameters
        low = [name for name, kind in zip(layout.names, layout.dtypes, strict=True) if kind != torch.float32]
        if low:
            self._say(
                "formats",
                "%d of %d trained parameters have 16 bits, %s for example: the inner optimizer rounds each "
                "step to that format and loses what is below half an ulp, which at learning rates near 1e-6 "
                "is nearly everything. Keep the parameters in FP32, and compute in BF16 by torch.autocast or "
                "FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
                len(low),
                len(layout.names),
                low[0],
            )

    def _say(self, what: str, message: str, *args: object) -> None:
        if what not in self._said:
            self._said.add(what)
            warn_once_per_machine(_logger, message, *args)
