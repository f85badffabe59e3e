"""One round on one rank, from the end of its inner steps to new weights: steps 2 to 8, in this order.

    begun ── encode ──▶ encoded ── announce ──▶ announced ── receive ──▶ received
          ── vote ──▶ voted ── commit ──▶ committed ── apply ──▶ applied

Up to `vote` nothing is written: a round that fails leaves θ, m, e and w as they were, and all ranks can
repeat it. From the moment that this rank has voted for it, the others may count on it: if its links break
then, the round is in doubt, and the log of verdicts says what became of it.

Whatever goes wrong on a rank between two messages becomes its vote against the round, so that no other rank
is left waiting. Only a lost link can't be voted on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor

from loco import kernels
from loco.kernels import Encoded, Entries, Known, OuterStep

from ..coordination.commit import COMMIT
from ..errors import NonFiniteError
from ..exchange import EXCHANGES, Transfer, open_enclosed
from ..exchange.overflow import adds_up_to_infinity
from ..exchange.wire_config import WireConfig
from ..members.view import View
from ..report import SyncReport, dense_bytes
from ..wire.codecs import DENSE, WHOLE, Codec
from ..wire.framing import Framing
from ..wire.records import Announcement, Status, Vote, fp32_of
from ..wire.refusal import Problem, Refused, overflow_text
from .announcements import Opening, announce, opening, outliers, replica_problem
from .hooks import Hooks, Phase, RoundProgress
from .inside_site import compare, digests_of_copies, share_anchor
from .joining.handshake import check_denormals
from .meter import Meter
from .outer.outer_state import OuterState
from .outer.step_length import Agreement
from .votes import refuse, vote, vote_of

T = TypeVar("T")


class Round:
    """
    Args:
        state: what the round reads, and writes in `apply` alone.
        view: who takes part.
        wire: how entries travel.
        encode: finds what this rank sends. If it raises, the round is refused by all ranks.
        copies: digests of the weights that other ranks of this site hold, too; by default as they are now.
        hooks: the user's, called at every phase.
        number: of the round; by default the one after those that are done.

    Attributes:
        phase: how far it has come.
        number: of the round, from 1.
        problem: why this rank votes against it.
        failed_here: this rank, or another one of its site, could not encode.
        left_out, contributions: the sites whose entries count as none, and what is added up.
        kept: sums that come back to this rank alone.
        meter, residual_norm: of seconds and bytes, and of e after it, for the report.
        is_promised: this rank has voted for the round, or is about to: others may count on it.
    """

    def __init__(
        self,
        state: OuterState,
        view: View,
        wire: WireConfig,
        *,
        encode: Callable[[], Encoded],
        copies: Callable[[], bytes] | None = None,
        hooks: Hooks[RoundProgress],
        number: int | None = None,
    ) -> None:
        self.state = state
        self.view = view
        self.number = state.rounds_done + 1 if number is None else number
        self.phase = Phase.BEGUN
        self.problem: Problem | None = None
        self.failed_here = self.is_promised = False
        self._wire = wire
        self._encode = encode
        self._copies = copies or partial(digests_of_copies, state.parameters, state.part)
        self._hooks = hooks
        self._encoded: Encoded | None = None
        self._codec: Codec = WHOLE
        self._norm = 0.0  # of what this rank would send
        self._announced: list[Announcement] = []
        self._opening: Opening | None = None
        self._agreement = Agreement()  # of the round before, by all ranks of the site
        self._enclosed: dict[int, Tensor] | None = None  # by peer, if all sites enclosed theirs
        self.left_out: tuple[int, ...] = ()
        self._own: Entries | None = None  # what this rank really sends
        self.kept: Entries | None = None
        self.contributions: Sequence[Entries] = ()
        self._exchange, self._payload_bytes, self.residual_norm = "", 0, 0.0
        self.meter = Meter(view)

    def run(self) -> None:
        """All steps, up to the moment when the round is certain to count.

        Raises:
            Refused: by all ranks together; nothing was written.
            TransportError, WireError: a link is lost. If `is_promised`, the log of verdicts has the verdict.
        """
        with self.state.memory.used():
            self.encode()
            self.announce()
            self.receive()
            self.vote()

    def encode(self) -> None:
        """2. Δ = c·(float(cast(θ)) − float(w))   3. s = Δ + e   4. visible?   5. what to send, exactly"""
        state = self.state
        self.view.liveness.say(f"round {self.number}, encoding")

        def encoded() -> Encoded:
            check_denormals()
            self._call_hooks()
            return self._encode()

        self._encoded = self._or_problem(encoded)
        if self._encoded is not None:
            own = self._own = self._encoded.entries
            self._norm = self._or_problem(lambda: state.part.norm(own, state.parameters.starts)) or 0.0
            if (bad := self._encoded.first_nonfinite) >= 0:
                self.problem = Problem(Status.NON_FINITE, state.parameters.index_at(state.start + bad))
        self._enter(Phase.ENCODED)
        self.failed_here = self.problem is not None

    def announce(self) -> None:
        """Every site's announcement to all, or why it refuses the round: then all ranks do."""
        state, view = self.state, self.view
        self.meter.begin("exchange")
        view.liveness.say(f"round {self.number}, exchanging")
        view.verdicts.prepare(self.number)
        copies = None if self._own is None else self._copies
        weight = self._encoded.factor if self._encoded else 0.0
        of_site = compare(view.inside, state, self._norm, weight, self.number, copies=copies)
        self.problem = self.problem or of_site.problem
        self._agreement = of_site.agreement
        self._opening = self._or_problem(lambda: self._open(of_site.norm))
        mine = self._opening or Opening(vote_of(view, self.problem, self.number))
        said = announce(view, mine.record, mine.frame)
        self.meter.all_have_come()
        self._announced = [one for one in said.records if isinstance(one, Announcement)]
        self.problem = self.problem or replica_problem(self.view.across, said.records)
        votes = [one for one in said.records if isinstance(one, Vote)]
        refuse(view, self.problem, votes, round=self.number, name_of=state.parameters.name_of)
        state.tuner.hear(self._announced)
        self.left_out = outliers(self._announced, state.settings.outlier_factor)
        if all(one.enclosed_bytes for one in self._announced):
            self._enclosed = {
                site: frame for site, frame in said.enclosed.items() if site not in self.left_out
            }
        self._enter(Phase.ANNOUNCED)

    def receive(self) -> None:
        """6. What g = (Σ s, in site order) / Σ c is the mean of: gathered, or already added up."""
        state, view, encoded = self.state, self.view, self._encoded
        assert encoded is not None
        numel, is_left_out = state.numel, view.site in self.left_out
        self._own = own = Entries.none(numel, state.device) if is_left_out else encoded.entries
        self._exchange = self._chosen_exchange(own)
        if self._exchange == "dense" and not self._codec.sizes_are_known:
            self._codec = WHOLE
        enclosed = self._opening.framing if self._opening and self._enclosed is not None else None
        framing = enclosed or self._framing(encoded)
        # What is sent as it lies in memory gives way to the sums, frame by frame.
        # Not where rounds overlap: what was sent is in the weights meanwhile.
        in_place = own.starts is None and self._codec.in_place and view.across.device == state.device
        in_place = in_place and state.settings.overlap is None
        sums = own.values if in_place else None
        margin = state.sums_margin(self._announced)
        transfer = Transfer(view.across, framing, problem=self.problem, sums=sums, margin=margin)
        began = time.perf_counter()
        if self._enclosed is None:
            self.contributions = EXCHANGES[self._exchange](transfer, own, numel)
        else:
            self.contributions = open_enclosed(transfer, own, numel, self._enclosed)
        seconds = time.perf_counter() - began if self._enclosed is None else None
        self._payload_bytes = framing.coded_bytes
        self.problem = transfer.verdict()
        self.kept = transfer.kept
        if self._or_problem(lambda: adds_up_to_infinity(self.contributions, numel)):
            self.problem = Problem(Status.OVERFLOW, seen=NonFiniteError(overflow_text(self.number)))
        if self.problem is None and not is_left_out:
            state.tuner.learn(self._codec, framing, seconds, self.contributions, own)
        self._enter(Phase.RECEIVED)

    def vote(self) -> None:
        """The last vote: has everything arrived, everywhere? If so the round is for all ranks to apply."""
        assert self._own is not None
        numel, mine = self.state.numel, vote_of(self.view, self.problem, self.number)
        mine = self.meter.last_vote(mine, numel=numel, entries=self._own.values.numel())
        self.is_promised = True
        try:
            votes = vote(self.view, mine, self.problem, name_of=self.state.parameters.name_of)
        except Refused:
            self.is_promised = False  # no rank has all votes
            raise
        self.meter.votes_of_site = votes
        self._enter(Phase.VOTED)

    def commit(self, vote: str = COMMIT) -> bool:
        """Write the verdict, unless another rank was quicker -> whether the round counts, on all ranks.

        Raises:
            TransportError: the store does not answer; it can be asked again.
        """
        self.learn_verdict(committed=self.view.verdicts.on(self.number, vote) == COMMIT)
        return self.phase is Phase.COMMITTED

    def learn_verdict(self, *, committed: bool) -> None:
        """As `commit`, where another site has told the verdict."""
        # In this order: Ctrl-C may come between any two lines.
        self.phase = Phase.COMMITTED if committed else self.phase
        self.is_promised = False
        if committed:
            self._enter(Phase.COMMITTED)

    def apply(self) -> None:
        """5. e = what was not sent   6. g = Σ / Σ c   7. m = μ·m + g, θ = θ − α·(g + μ·m)   8. w = cast(θ)"""
        state, encoded = self.state, self._encoded
        assert encoded is not None
        pieces = state.parameters.pieces(state.start, state.stop, write=True)
        with self.applying(encoded.factor) as step, pieces as weights:
            assert self._own is not None
            outer = (state.anchor, state.momentum, weights, state.residual)
            self.residual_norm = kernels.apply(*outer, self._own, self.contributions, step, self.kept)

    @contextmanager
    def applying(self, factor: float) -> Iterator[OuterStep]:
        """Around what writes a committed round into the state. `factor`: c, of the inner steps since."""
        state, view = self.state, self.view
        assert self.phase is Phase.COMMITTED
        assert self._own is not None
        self.meter.begin("apply")
        view.liveness.say(f"round {self.number}, applying")
        try:
            with state.rewriting():
                yield state.outer_step(self._announced, factor, self._agreement, self.contributions)
                self.meter.end()
                state.took_part |= dict.fromkeys(view.site_names, self.number)
                state.lacks_slices = len(state.part.slices) > 1
                self.phase = Phase.APPLIED  # before the state counts as whole: no round is applied twice
                state.rounds_done = self.number
        except BaseException:
            why = f"round {self.number} was stopped while it was being applied"
            view.liveness.leave(why, view.across.link)
            raise
        self._enter(Phase.APPLIED)

    def share(self, view: View) -> None:
        """8. w of the other ranks' slices, inside the site: over this round's links, or later ones."""
        before = view.bytes_so_far[2]
        share_anchor(self.state, view)
        self.meter.shared(view, view.bytes_so_far[2] - before)
        self.meter.end()

    @property
    def norms(self) -> tuple[float, ...]:
        """By site, of what it would have sent."""
        return tuple(fp32_of(announced.norm_bits) for announced in self._announced)

    def report(self) -> SyncReport:
        """Of a round that was applied."""
        assert self._own is not None
        numel, entries, sites = self.state.numel, self._own.values.numel(), self.view.num_sites
        return SyncReport(
            round=self.number,
            numel=numel,
            entries=entries,
            density=entries / numel if numel else 0.0,
            wire=self._codec.name,
            exchange=self._exchange,
            payload_bytes=self._payload_bytes,
            **self.meter.bytes(),
            dense_bytes=dense_bytes(numel, sites),
            update_norms=self.norms,
            left_out=tuple(map(self.view.across.name_of, self.left_out)),
            residual_norm=self.residual_norm,
            seconds=self.meter.seconds(),
            waited=self.meter.waited(),
            in_flight=self.meter.in_flight,
            outer_lr=self.state.outer_lr,
            site=self.meter.site(),
        )

    def _open(self, norm: float) -> Opening:
        """This site's announcement, once the code of its frames is chosen."""
        state, encoded = self.state, self._encoded
        assert encoded is not None
        is_dense, mark = encoded.entries.starts is None, state.step_length.mark if state.step_length else 0
        self._codec = DENSE.get(self._wire.codec, WHOLE) if is_dense else state.tuner.codec()
        framing = self._framing(encoded)
        may_enclose = self._codec.exact and (is_dense or self._wire.exchange == "auto")
        return opening(self.view, encoded, framing, state.tuner, norm, mark=mark, may_enclose=may_enclose)

    def _framing(self, encoded: Encoded) -> Framing:
        state, view = self.state, self.view
        known = Known(state.anchor, state.momentum, state.gate or kernels.Gate())
        return Framing(view.site, self._codec, known, round=self.number, digest=encoded.digest)

    def _chosen_exchange(self, own: Entries) -> str:
        """The same on all sites: by what the user said, or by all sites' announcements."""
        if own.starts is None:
            return "dense"  # DiLoCo, or an open gate
        if self._enclosed is not None:
            return "gather"  # they have all
        if self._wire.exchange != "auto":
            return self._wire.exchange
        return self.state.tuner.exchange(self._announced)

    def _or_problem(self, do: Callable[[], T]) -> T | None:
        """None if it failed, or if this rank had a problem before."""
        if self.problem is not None:
            return None
        try:
            return do()
        except Exception as error:
            self.problem = Problem(Status.FAILED, seen=error)
            return None

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase in (Phase.ENCODED, Phase.ANNOUNCED, Phase.RECEIVED):
            self._or_problem(self._call_hooks)
        else:  # too late to vote against the round
            self._call_hooks()

    def _call_hooks(self) -> None:
        if not self._hooks:
            return
        self._hooks.call(
            RoundProgress(
                phase=self.phase,
                number=self.number,
                view=self.view,
                state=self.state,
                entries=self._own,
                contributions=self.contributions,
            )
        )
