"""An outer step that finds its own length: `saving=0.25`.

Where an outer step is too long, rounds undo each other: what is sent points against what was sent before. All
sites add up the same g, so all find the same α, and none has to tell it.

    p = g₋₂ + g₋₃/2 + g₋₄/4 + …        of the rounds before the last one
    n² = |g₋₂|² + |g₋₃|²/4 + …
    c = ⟨g, p⟩ / (|g|·n), or ⟨g, g₋₁⟩ / (|g|·|g₋₁|) + 0.06 if that is less
    α of the next round = α·2^(k/8)    k = 50·c, at most 4, where c > 0; 100·c, at least −8, where it is not

As in a line search, a step along g has its right length where later g are at a right angle to it. The first
round is plain averaging, α = 1; in the next ones, for which there is nothing to compare with, α is as long as
α·|g| ≤ |θ|/3200 allows, and at least 1. From then on α is shortened until α·|g| is at most |θ|/200, since c
tells some rounds late; k may be 8 where α·|g| is less than a quarter of that, and once a k was below −1,
later ones are at most 1. If only the limit keeps α from growing in more than six rounds, each further one
raises it by an eighth of an octave, up to |θ|/50.

Of a large vector a part of the elements is looked at. Sums are folded, one half on the other, and all else is
plain arithmetic of doubles, so that every processor finds the same bits.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loco.kernels import BLOCK, Entries

_GAIN, _LOSS = 50, 100
_TAKEN_BACK = 0.06  # coarse values overshoot what an element is to move, and the next round takes that back
_DOUBLED, _LONGER, _SHORTER = 8, 4, -8
_TURN = -2  # from which on rounds undo each other beyond what is chance
_LONGEST = 0.005  # of |θ| as it was at the start
_FIRST = 1 / 16  # of that, before anything can be compared
_FIRST_OF_ZEROS = 16  # α = 4
_HELD, _MOST_HELD = 6, 22  # rounds in which that alone keeps α from growing
_LOWEST, _HIGHEST = -16, 112  # 1/4 and 16,384: what nobody needs
_EIGHTH = math.sqrt(math.sqrt(math.sqrt(2.0)))  # roots are rounded alike everywhere, and powers are not
_LOOKED_AT = 1 << 20  # elements
_FADED = 2.0**-90  # x + this − this is 0 where x is so small that processors become slow with it
_NO_WEIGHTS = 2.0**-1000  # |θ|² of weights that begin as zeros, which limit nothing


class Agreement(NamedTuple):
    """Of a round with those before it: sums over what this rank looks at, or over all ranks of a site."""

    last: float = 0.0  # ⟨g, g₋₁⟩
    earlier: float = 0.0  # ⟨g, p⟩
    whole: float = 0.0  # ⟨g, g⟩
    whole_last: float = 0.0  # ⟨g₋₁, g₋₁⟩
    whole_earlier: float = 0.0  # n²
    anchor: float = 0.0  # ⟨θ, θ⟩ at the start; 0: not known yet

    @staticmethod
    def joined(parts: Sequence["Agreement"]) -> "Agreement":
        return Agreement(*(math.fsum(column) for column in zip(*parts, strict=True)))

    @property
    def cosine(self) -> float | None:
        """c. None: nothing was sent, or nothing before it that it can be compared with."""
        if not self.whole or not self.whole_earlier:
            return None
        # A product of the squares may be too small for a number.
        cosine = self.earlier / math.sqrt(self.whole) / math.sqrt(self.whole_earlier)
        if not self.whole_last:
            return cosine
        return min(cosine, self.last / math.sqrt(self.whole) / math.sqrt(self.whole_last) + _TAKEN_BACK)


@dataclass(frozen=True, kw_only=True)
class StepLength:
    """
    Attributes:
        eighths: α = 2^(eighths / 8), of the round that was applied last.
        agreement: of that round, by what this rank looks at.
        before: that round's g and p, of what this rank looks at. They are written in place.
        held: rounds in which only the limit of α·|g| kept α from growing; from _MOST_HELD on all the same.
        compared: whether rounds could be compared before.
        turned: whether they have undone each other before.
    """

    eighths: int = 0
    held: int = 0
    compared: bool = False
    turned: bool = False
    agreement: Agreement = field(default_factory=Agreement)
    before: Tensor

    @staticmethod
    def of(numel: int) -> "StepLength":
        """Before the first round. `numel`: of this rank's part."""
        stride = BLOCK * _stride(numel)
        looked_at = sum(min(BLOCK, numel - first) for first in range(0, numel, stride))
        return StepLength(before=torch.zeros(2, looked_at, dtype=torch.float32, device="cpu"))

    @property
    def outer_lr(self) -> float:
        """α."""
        return _two_to(self.eighths)

    def moved(self, agreement: Agreement) -> "StepLength":
        """That of the next round.

        Args:
            agreement: of the last one, by all ranks of this site.
        """
        if not agreement.whole:
            return self
        size, cosine, longest = math.sqrt(agreement.whole), agreement.cosine, math.inf
        if agreement.anchor > _NO_WEIGHTS:
            longest = _LONGEST * math.sqrt(agreement.anchor) * _two_to(max(0, self.held - _HELD))
        if cosine is None:
            if self.compared:  # what it was compared with is lost
                return replace(self, eighths=_shortened(self.eighths, size, longest))
            most = _HIGHEST if longest < math.inf else _FIRST_OF_ZEROS
            first = max(0, _shortened(most, size, longest * _FIRST))
            return replace(self, eighths=_shortened(first, size, longest))
        is_short = self.outer_lr * size < longest / 4 < math.inf
        most = 1 if self.turned else _DOUBLED if is_short else _LONGER
        change = min(round(max((_GAIN if cosine > 0 else _LOSS) * cosine, _SHORTER)), most)
        wanted = min(max(self.eighths + change, _LOWEST), _HIGHEST)
        eighths = _shortened(wanted, size, longest)
        held = self.held + 1 if change > 0 and eighths < wanted else self.held
        turned = self.turned or change <= _TURN
        return replace(self, eighths=eighths, held=min(held, _MOST_HELD), compared=True, turned=turned)

    def having_seen(self, contributions: Sequence[Entries], divisor: float, anchor: Tensor) -> "StepLength":
        """As it is after a round that adds this up, at θ."""
        last, earlier = self.before
        g = torch.zeros_like(last)
        for entries in contributions:
            _every(_stride(anchor.numel()), entries).add_to(g)
        g /= divisor
        at = g.nonzero().flatten()
        now = g[at].double()
        along_last, along_earlier, whole = (
            _sum(now * x) for x in (last[at].double(), earlier[at].double(), now)
        )
        known = self.agreement
        size = known.anchor
        if not size:
            theta = _every(_stride(anchor.numel()), Entries.whole(anchor)).values.double()
            size = max(_sum(theta * theta), _NO_WEIGHTS)
        whole_earlier = known.whole_earlier / 4 + known.whole_last
        agreement = Agreement(along_last, along_earlier, whole, known.whole, whole_earlier, size)
        earlier.mul_(0.5).add_(_FADED).sub_(_FADED).add_(last)
        last.copy_(g)
        return replace(self, agreement=agreement)

    @property
    def mark(self) -> int:
        """64 bits that tell sites apart which would go on with different lengths."""
        told = repr((self.eighths, self.held, self.compared, self.turned, *self.agreement)).encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")

    def state(self) -> dict[str, Any]:
        """As plain data."""
        return vars(self) | {"agreement": list(self.agreement)}

    @staticmethod
    def from_state(state: Any, numel: int) -> "StepLength":
        """
        Args:
            state: its "before" may be None, where another rank's part was looked at.
            numel: of this rank's part.

        Raises:
            ValueError: it is none.
        """
        fresh, damaged = StepLength.of(numel), "this state does not say how long the outer step is"
        try:
            eighths, held = operator.index(state["eighths"]), operator.index(state["held"])
            compared, turned, before = bool(state["compared"]), bool(state["turned"]), state["before"]
            agreement = Agreement._make(map(float, state["agreement"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{damaged}: it is damaged") from error
        is_one = all(map(math.isfinite, agreement)) and min(agreement[2:]) >= 0
        is_one = is_one and _LOWEST <= eighths <= _HIGHEST and 0 <= held <= _MOST_HELD
        if before is not None:
            is_one = is_one and isinstance(before, Tensor) and before.shape == fresh.before.shape
            is_one = is_one and before.dtype == torch.float32 and bool(before.isfinite().all())
        if not is_one:
            raise ValueError(f"{damaged}: it is damaged")
        found = replace(fresh, eighths=eighths, held=held, compared=compared, turned=turned)
        if before is None:
            return found
        fresh.before.copy_(before)  # which may have been loaded onto another device
        return replace(found, agreement=agreement)


def _two_to(eighths: int) -> float:
    octaves, rest = divmod(eighths, 8)
    return math.ldexp(math.prod([_EIGHTH] * rest), octaves)


def _shortened(eighths: int, size: float, longest: float) -> int:
    """The largest up to this one with which a g of this size moves θ by at most so much."""
    while eighths > _LOWEST and _two_to(eighths) * size > longest:
        eighths -= 1
    return eighths


def _stride(numel: int) -> int:
    return max(1, -(-numel // _LOOKED_AT))


def _sum(doubles: Tensor) -> float:
    """By additions element by element, which are the same everywhere: torch's sum has an order of its own."""
    while (numel := doubles.numel()) > 1:
        half = (numel + 1) // 2
        low, high = doubles[:half], doubles[half:]
        doubles = low.clone()
        doubles[: numel - half] += high
    return float(doubles) if doubles.numel() else 0.0


def _every(stride: int, entries: Entries) -> Entries:
    """Of every so many blocks one: what is looked at, as a vector of its own, in host memory."""
    starts, offsets, values = entries
    if starts is None or offsets is None:
        every = torch.arange(0, values.numel(), BLOCK * stride, device=values.device)
        where = (every[:, None] + torch.arange(BLOCK, device=values.device)).flatten()
        return Entries.whole(values[where[where < values.numel()]]).to("cpu")
    first, count = starts[:-1:stride], starts.diff()[::stride]
    edges = torch.cat([count.new_zeros(1), count.cumsum(0)])
    where = (first - edges[:-1]).repeat_interleave(count)
    where += torch.arange(where.numel(), device=where.device)
    return Entries(edges, offsets[where], values[where]).to("cpu")
