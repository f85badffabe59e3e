"""The outer loop: the state that the sites share, and a round as its numbered steps (DESIGN's §2)."""

import logging
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco import kernels
from loco.kernels import Encoded, Entries, Gate, Known, OuterStep

from ..config import GATES, Settings
from ..coordination.commit import ABORT, COMMIT
from ..errors import LocoError, TransportError
from ..exchange.conversation import Exchange, Outcome, WireConfig
from ..exchange.tuning import ExchangeTuner
from ..members.fixed import Topology
from ..report import SyncReport
from ..wire.header import VERSION, Status
from ..wire.refusal import Problem, Refused
from .handshake import agree_on_parameters, check_denormals, check_first_anchor
from .hooks import Hooks, RoundProgress
from .inside_site import compare, share

_logger = logging.getLogger(__name__)


@dataclass
class _Exchanged:
    """A round whose entries are all here, until it is certain whether it counts, and it is applied."""

    outcome: Outcome
    before: tuple[int, int, int]  # bytes
    began: float
    exchanging: float
    applying: float = 0.0
    applied: bool = False
    residual_norm: float = 0.0


class OuterLoop:
    """Anchor θ, outer momentum m and residual e of this rank's slice, and the rounds over them.

    Args:
        inner: the optimizer whose parameters are synchronised.
        settings: equal on all sites.
        topology: who the sites are.
        wire: how entries travel.
        offload: keep θ, m and e in host memory.

    Raises:
        ValueError: this rank's parameters can't be synchronised.
        AgreementError: another rank's can't, or the sites differ.
        TransportError, ReplicaError: site 0's weights did not reach all.
    """

    def __init__(
        self,
        inner: Optimizer,
        settings: Settings,
        topology: Topology,
        wire: WireConfig,
        *,
        offload: bool,
    ) -> None:
        self.settings = settings
        self.topology = topology
        self.hooks = Hooks()
        self.rounds_done = 0  # rounds done
        self._everyone = topology.everyone()
        self._liveness = topology.liveness
        # A rank that can't go on says so before it raises, so that the others do not wait for it.
        self.parameters = agree_on_parameters(
            self._everyone, topology, inner, {"wire version": VERSION} | vars(settings) | wire.agreement()
        )
        self._device = torch.device("cpu") if offload else self.parameters.device  # of θ, m and e
        self._inner = inner
        self._wire = wire
        self._tuner = ExchangeTuner(wire.codec, topology.num_sites)
        # A name that all ranks share and no other optimizer has, to meet under after a failure.
        self._name = self._everyone.swap_records(uuid.uuid4().bytes, phase="naming")[0].hex()
        if topology.ranks_per_site > 1:  # see `is_called`
            topology.notes.answers(self, self._name)
        self._meeting = 0  # which of the ranks' meetings the links are from
        self._connect()
        self._torn = False
        self._unfinished: _Exchanged | None = None

        seen = GATES[settings.gate]
        self.gate = None
        if seen is not None:
            self.gate = Gate(
                dtype=seen,
                gain=settings.gate_gain,
                margin=settings.gate_margin,
                value_steps=settings.value_steps,
            )
        self._step = OuterStep(
            num_sites=topology.num_sites,
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.nesterov,
        )
        # The ranks of a site share the flat state in equal slices, the last ones possibly shorter.
        numel = self.parameters.numel
        self._width = -(-numel // topology.ranks_per_site)
        self.start = min(topology.rank_in_site * self._width, numel)
        self.stop = min(self.start + self._width, numel)
        self.anchor = self._zeros()
        self.momentum = self._zeros() if settings.outer_momentum else None
        self.residual = self._zeros() if self.gate is not None else None
        self._start_alike()

    @torch.no_grad()
    def run_round(self) -> SyncReport:
        """A round, tried again by all ranks together if they live and only their links were lost."""
        for left in range(self.topology.repeats, -1, -1):
            try:
                return self._attempt()
            except TransportError as error:
                if error.lasting or not left:
                    raise
                _logger.warning("%s. The round is repeated over new links", error)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self) -> SyncReport:
        """Steps 2 to 8 (step 1 is the caller's H inner steps).

        Until it is certain that every site has received everything, nothing is written: a round that fails
        leaves θ, m, e and w as they were, and can be repeated by all ranks together.
        """
        report = self.settle()
        if report is not None:
            return report  # what is to be repeated had been done after all
        number = self.rounds_done + 1
        self._liveness.say(f"round {number}, encoding")
        if not self._connected:
            self._connect(again=True)
        self._verdicts.prepare(number)
        before, began = self._bytes(), time.perf_counter()
        # 2. Δ = float(cast(θ)) − float(w)   3. s = Δ + e   4. visible?   5. what to send
        encoded, norm, problem = self._encode()
        exchanging = time.perf_counter()
        self._liveness.say(f"round {number}, exchanging")
        try:
            with self._conversation():
                norm, drift = compare(
                    self._inside,
                    self.parameters,
                    norm,
                    encoded=encoded is not None,
                    phase=f"round {number}, weights inside the site",
                )
                known = Known(self.anchor, self.momentum, self.gate or Gate())
                outcome = self._exchange.run(
                    encoded,
                    known,
                    norm=norm,
                    outlier_factor=self.settings.outlier_factor,
                    round=number,
                    problem=problem or drift,
                )
                assert encoded is not None
                self._call_hooks("received", outcome)
                # From here on the others may count on this rank.
                self._unfinished = _Exchanged(outcome, before, began, exchanging)
                try:
                    self._exchange.confirm(outcome, round=number)
                except Refused:
                    self._unfinished = None  # nobody has all votes
                    raise
        except Exception:
            report = self._finish(ABORT)
            if report is None:
                raise
            return report
        report = self._finish(COMMIT)
        if report is None:
            with self._conversation():
                raise TransportError(
                    f"round {number}: another rank lost its links in the last vote, so no rank has applied "
                    f"the round, and all can repeat it"
                )
        return report

    @torch.no_grad()
    def settle(self) -> SyncReport | None:
        """Finish a round whose end was cut off, if any -> its report, if it counts.

        Raises:
            LocoError: it can't be finished yet; or this rank can't go on, see `check_whole`.
        """
        self.check_whole()
        return self._finish(ABORT)

    def tell_step(self, local_step: int) -> None:
        """What those who wait for this rank may want to know."""
        steps = f"step {local_step} of {self.settings.sync_every}"
        self._liveness.say(f"computing, {steps} after round {self.rounds_done}")

    def check_whole(self) -> None:
        """Refuse to go on, or to save, after a round was stopped while it was being applied: by Ctrl-C, or
        for want of memory.

        Raises:
            LocoError: the state is half of one round and half of the next.
        """
        if self._torn:
            raise LocoError(
                f"round {self.rounds_done + 1} was stopped while it was being applied: this rank's state is "
                f"neither before nor after it. Load the last checkpoint"
            )

    def _finish(self, wish: str) -> SyncReport | None:
        """Apply the round whose entries are all here, if it counts for all ranks -> its report."""
        round = self._unfinished
        if round is None:
            return None
        if not round.applied:
            if not self._counts(self.rounds_done + 1, wish):
                self._unfinished = None
                return None
            self._apply(round)
        if self._inside.size > 1:
            if self._connected:
                with self._conversation():
                    self._share_anchor()
            else:
                self._connect(again=True)  # which ends with it
        self._unfinished = None
        done = time.perf_counter()

        numel, entries = self.stop - self.start, round.outcome.own.values.numel()
        sent, received, inside = (now - then for now, then in zip(self._bytes(), round.before, strict=True))
        sites = self.topology.num_sites
        return SyncReport(
            round=self.rounds_done,
            numel=numel,
            entries=entries,
            density=entries / numel if numel else 0.0,
            wire=round.outcome.codec,
            exchange=round.outcome.exchange,
            payload_bytes=round.outcome.payload_bytes,
            sent_bytes=sent,
            received_bytes=received,
            site_bytes=inside,
            dense_bytes=2 * (sites - 1) * 4 * numel // sites,
            update_norms=round.outcome.norms,
            left_out=round.outcome.left_out,
            residual_norm=round.residual_norm,
            seconds={
                "encode": round.exchanging - round.began,
                "exchange": round.applying - round.exchanging,
                "apply": done - round.applying,
            },
        )

    def _counts(self, number: int, wish: str) -> bool:
        """Whether all ranks apply the round, or none."""
        return self._verdicts.on(number, wish) == COMMIT

    def _apply(self, round: "_Exchanged") -> None:
        """5. e = what was not sent   6. g = Σ / R   7. m and θ   8. w = cast(θ)"""
        round.applying = time.perf_counter()
        self._liveness.say(f"round {self.rounds_done + 1}, applying")
        self._call_hooks("committed", round.outcome)
        self._torn = True
        try:
            with self.parameters.pieces(self.start, self.stop, write=True) as weights:
                round.residual_norm = kernels.apply(
                    self.anchor,
                    self.momentum,
                    weights,
                    self.residual,
                    round.outcome.own,
                    round.outcome.contributions,
                    self._step,
                )
        except BaseException:
            self._liveness.leave(
                f"round {self.rounds_done + 1} was stopped while it was being applied", self._across.link
            )
            raise
        self._torn = False
        self.rounds_done += 1
        round.applied = True
        self._call_hooks("applied", round.outcome)

    def _call_hooks(self, phase: str, outcome: Outcome | None = None, entries: Entries | None = None) -> None:
        self.hooks.call(
            RoundProgress(
                phase=phase,
                number=self.rounds_done + (phase != "applied"),
                state=self,
                entries=entries if outcome is None else outcome.own,
                contributions=() if outcome is None else outcome.contributions,
            )
        )

    def own_state(self) -> dict[str, Any]:
        """What belongs to this rank's state beside what all kinds of outer loops have."""
        return {}

    def adopt_state(self, state: Mapping[str, Any]) -> bool:
        """Go on from a state that was loaded -> whether another site's has taken its place."""
        return False

    @property
    def tuner(self) -> ExchangeTuner:
        return self._tuner

    def is_called(self) -> bool:
        """Whether ranks of this run wait to connect anew. Those of a site of several may after a round that
        counts, if they lost each other before they had shared θ; and only all ranks can connect."""
        return self.topology.ranks_per_site > 1 and self.topology.is_called(self._name)

    def reconnect(self) -> None:
        """Connect anew with those who wait for it."""
        if self._connected:
            self._connected = False
            self.topology.disconnect(self._across, self._inside)
        self._connect(again=True)

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Around what replaces the whole state: torn until it is done."""
        self._torn = True
        yield
        self._torn = False
        self._unfinished = None

    def _zeros(self) -> Tensor:
        """A part of the outer state. In host memory it is pinned, if there is a GPU to copy from."""
        pinned = self._device.type == "cpu" and self.parameters.device.type == "cuda"
        numel = self.stop - self.start
        return torch.zeros(numel, dtype=torch.float32, device=self._device, pin_memory=pinned)

    def _connect(self, *, again: bool = False) -> None:
        if again:
            self._meeting = self.topology.meet(self._name)
        self._across, self._inside = self.topology.connect(self._device, f"{self._name}/{self._meeting}")
        self._verdicts = self.topology.verdicts(f"loco/{self._name}/{self._meeting}")
        self._exchange = Exchange(
            self._across, self._inside, self.parameters.name_of, self._wire, self._tuner
        )
        self._connected = True
        if again and self._inside.size > 1:
            with self._conversation():
                self._catch_up_in_site()

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        """Messages that all ranks exchange in one order. Who leaves early hangs up, so that no message of
        a repeat is taken for one that a peer still waits for."""
        try:
            yield
        except Refused as refusal:  # by all ranks, at the same message
            raise refusal.error from None
        except BaseException as error:
            self._connected = False
            said = str(error) if isinstance(error, LocoError) else f"{type(error).__name__}: {error}"
            # What others have said is told by them.
            self._liveness.leave(said.partition("; last heard of")[0], self._across.link)
            self.topology.disconnect(self._across, self._inside)
            # gloo hangs up once nobody holds its messages, and the frames of this error's traceback do.
            traceback.clear_frames(error.__traceback__)
            raise

    def _encode(self) -> tuple[Encoded | None, float, Problem | None]:
        """This rank's part of the round and its norm, or why it has none."""
        try:
            self.parameters.check_unchanged(self._inner)
            check_denormals(self._device)
            self._call_hooks("begun")
            with self.parameters.pieces(self.start, self.stop) as weights:
                encoded = kernels.encode(self.anchor, weights, self.residual, self.gate)
            self._call_hooks("encoded", entries=encoded.entries)
            norm = float(torch.linalg.vector_norm(encoded.entries.values))
        except Exception as error:
            return None, 0.0, Problem(Status.FAILED, seen=error)
        position = encoded.first_nonfinite
        if position < 0:
            return encoded, norm, None
        return encoded, norm, Problem(Status.NON_FINITE, self.parameters.index_at(self.start + position))

    def _start_alike(self) -> None:
        """θ is site 0's weights, on all sites, verified; w = cast(θ)."""
        with torch.no_grad(), self.parameters.pieces(self.start, self.stop) as weights:
            for part, w in zip(self.anchor.split([w.numel() for w in weights]), weights, strict=True):
                part.copy_(w)
        self._across.broadcast(self.anchor, phase="first anchor")
        self.reset_weights()
        check_first_anchor(self._everyone, self.topology, self.parameters, self.anchor, self.start)

    @torch.no_grad()
    def reset_weights(self) -> None:
        """w = cast(θ), on all ranks of a site together."""
        with self.parameters.pieces(self.start, self.stop, write=True) as weights:
            kernels.write_weights(self.anchor, weights)
        self._share_anchor()

    def _catch_up_in_site(self) -> None:
        """Of a round that counts, the lost link may have kept some ranks of this site from the others' parts
        of θ; all send theirs again, since those who had everything don't know."""
        lacking = self._unfinished is not None
        told = self._inside.swap_records(bytes([lacking]), phase="reconnecting inside the site")
        if any(record != bytes(1) for record in told):
            self._share_anchor(write=lacking)

    def _share_anchor(self, *, write: bool = True) -> None:
        phase = f"round {self.rounds_done}, anchor inside the site"
        share(self._inside, self.parameters, self.anchor, self._width, write=write, phase=phase)

    def _bytes(self) -> tuple[int, int, int]:
        return self._across.sent_bytes, self._across.received_bytes, self._inside.sent_bytes
