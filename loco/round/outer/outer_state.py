"""What a rank holds of the outer optimization: its part of θ, m and e, and the parameters themselves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import fsum

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Encoded, Entries, Gate, OuterStep
from loco.kernels.recycle import Recycler
from loco.kernels.reserve import lasting_zeros

from ...config import GATES, Settings
from ...errors import LocoError
from ...exchange.tuning import ExchangeTuner
from ...members.view import SiteTopology
from ...parameters.flat_parameters import FlatParameters
from ...parameters.part import Part
from ...wire.records import Announcement, fp32_of
from .step_length import Agreement, StepLength


@dataclass(kw_only=True)
class OuterState:
    """The state of the outer optimization on one rank.

    It covers this rank's part, which is the elements `start` to `stop` of its flat parameters: see `Part`.

    Attributes:
        settings: equal on all sites.
        topology: who the sites are.
        parameters: of the inner optimizer, as one flat vector.
        part: which of them this rank exchanges.
        anchor: θ.
        momentum: m; None where μ = 0.
        residual: e; None where everything is sent.
        gate: decides what is sent; None: everything.
        step_length: of the outer step, if it finds it itself.
        tuner: what earlier rounds were like.
        rounds_done: the round that the state is after.
        weight: c, by which the updates of this site count, an FP32 number.
        took_part: the last round of each site that has a name.
        sent_bytes: by this site, in all rounds, to the others.
        ahead, ahead_by: where rounds overlap, what this rank sent at the last boundary, v, and β. The inner
            steps began from cast(θ − β·v).
        on_its_way: the number of the round that v travels in; 0: v is in e again, or there is none.
        lacks_slices: the other ranks of this site have not given their parts of the weights yet.
        memory: what rounds leave to each other.
        anchor_incomplete: θ or m is only a part of what another site was sending.
        is_torn: it is half of one round and half of the next, and of no use.
    """

    settings: Settings
    topology: SiteTopology
    parameters: FlatParameters
    part: Part
    anchor: Tensor
    momentum: Tensor | None
    residual: Tensor | None
    gate: Gate | None
    tuner: ExchangeTuner
    weight: float = 1.0
    rounds_done: int = 0
    took_part: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    step_length: StepLength | None = None
    ahead: Encoded | None = None
    ahead_by: float = 0.0
    on_its_way: int = 0
    lacks_slices: bool = False
    anchor_incomplete: bool = False
    is_torn: bool = False
    memory: Recycler = field(default_factory=Recycler)

    @staticmethod
    def of(
        parameters: FlatParameters,
        part: Part,
        settings: Settings,
        topology: SiteTopology,
        tuner: ExchangeTuner,
        *,
        offload: bool,
    ) -> "OuterState":
        """The state before the first round, with this site's own weights as θ."""
        device = torch.device("cpu") if offload else parameters.device
        seen = GATES[settings.gate]

        def zeros() -> Tensor:
            numel = part.own.stop - part.own.start
            if parameters.device.type == "cpu":
                return lasting_zeros(numel, torch.float32)
            # In host memory it is pinned: there is a GPU to copy from.
            return torch.zeros(numel, dtype=torch.float32, device=device, pin_memory=device.type == "cpu")

        state = OuterState(
            settings=settings,
            topology=topology,
            parameters=parameters,
            part=part,
            anchor=zeros(),
            momentum=zeros() if settings.outer_momentum else None,
            residual=None if seen is None and settings.overlap is None else zeros(),
            gate=None
            if seen is None
            else Gate(
                dtype=seen,
                gain=settings.gate_gain,
                margin=settings.gate_margin,
                value_steps=settings.value_steps,
            ),
            tuner=tuner,
            step_length=StepLength.of(part.own.stop - part.own.start) if settings.finds_outer_lr else None,
        )
        state.read_weights()
        return state

    @property
    def start(self) -> int:
        return self.part.own.start

    @property
    def stop(self) -> int:
        return self.part.own.stop

    @property
    def numel(self) -> int:
        """Of this rank's part."""
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    @property
    def shared(self) -> list[Tensor]:
        """What all sites hold alike, as vectors."""
        looked_at = None if self.step_length is None else self.step_length.before.view(-1)
        return [tensor for tensor in (self.anchor, self.momentum, looked_at) if tensor is not None]

    @property
    def outer_lr(self) -> float:
        """α of the round that was applied last."""
        return self.settings.outer_lr if self.step_length is None else self.step_length.outer_lr

    @property
    def beta(self) -> float:
        """How far this site would run ahead by what it sends now, where rounds overlap."""
        overlap = self.settings.overlap
        return self.outer_lr if overlap == "auto" else float(overlap or 0.0)

    def began_from(self, at: slice) -> Tensor:
        """The inner steps began from the cast of this: θ or, where rounds overlap, θ − β·v."""
        sent = None if self.ahead is None else self.ahead.entries
        return kernels.run_ahead(self.anchor, sent, self.ahead_by, at)

    def name_at(self, position: int) -> str:
        """Of the parameter that has this element of the state."""
        return self.parameters.name_at(self.start + position)

    @torch.no_grad()
    def read_weights(self) -> None:
        """θ = w, of this rank's slice."""
        with self.parameters.pieces(self.start, self.stop) as weights:
            for part, w in zip(self.anchor.split([w.numel() for w in weights]), weights, strict=True):
                part.copy_(w)

    @torch.no_grad()
    def write_weights(self) -> None:
        """8. w = cast(θ), of this rank's part."""
        with self.parameters.pieces(self.start, self.stop, write=True) as weights:
            kernels.write_weights(self.anchor, weights)

    def sums_margin(self, announced: Sequence[Announcement]) -> float | None:
        """Of the sums of a round: F of the mean.

        Args:
            announced: by all sites.
        """
        margin = self.settings.sums_margin
        return None if margin is None else margin * _divisor(announced)

    def outer_step(
        self,
        announced: Sequence[Announcement],
        factor: float,
        agreement: Agreement,
        contributions: Sequence[Entries],
    ) -> OuterStep:
        """That of a round which counts; and how long the next one is, as far as this round tells.

        Args:
            announced: by all sites.
            factor: c, of the inner steps that are in this site's weights.
            agreement: of the round before.
            contributions: what is added up.
        """
        settings, divisor = self.settings, _divisor(announced)
        if self.step_length is not None:
            moved = self.step_length.moved(agreement)
            self.step_length = moved.having_seen(contributions, divisor, self.anchor)
        return OuterStep(
            divisor=divisor,
            factor=factor,
            lr=self.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.nesterov,
        )

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Around what replaces the state: if it does not come to its end, the state is of no use."""
        self.is_torn = True
        yield
        self.is_torn = False

    def check_whole(self) -> None:
        """Refuse to go on, or to save, after the state was only half replaced: because of Ctrl-C, or for want
        of memory.

        Raises:
            LocoError: the state is half of one round and half of the next.
        """
        if self.is_torn:
            raise LocoError(
                f"round {self.rounds_done + 1} was stopped while it was being applied: this rank's state is "
                f"neither before nor after it. Load the last checkpoint"
            )


def _divisor(announced: Sequence[Announcement]) -> float:
    """Σ c, of the sites that a round adds up."""
    return fsum(fp32_of(one.weight_bits) for one in announced)
