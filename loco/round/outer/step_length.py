"""An outer step that finds its own length: `saving=0.25`.

Where an outer step is too long, rounds undo each other: what is sent of an element points against what was
sent of it before. All sites add up the same g, so all find the same α, and none has to tell it.

    l: of each element, the last g_i that was not 0
    c = ⟨g, l⟩ / (|g|·|l|)             over the elements of which both are not 0
    α of the next round = α·2^(k/8)    k = 14·(c + 0.08), rounded, from −2 to 4
    l_i = g_i, where that is not 0

As in a line search, a step along g has its right length where the next g is at a right angle to it. The
first round that sends anything is plain averaging, and the next one begins at FIRST_OUTER_LR. And α is
shortened until α·|g| is at most 1/200 of |θ|, since c tells some rounds late.

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

from ...config import FIRST_OUTER_LR

_GAIN, _UNDONE = 14, 0.08
_LONGER, _SHORTER = 4, 2  # at most: a sum of several rounds tells late that a step is too long
_LONGEST = 0.005  # of |θ| as it was at the start
_LOWEST, _HIGHEST = -40, 88  # 7/32 and 14,336: what nobody needs
_FIRST = -22  # 1.04, nearly the sites' mean: nothing is known of how long a g is before the first one
_EIGHTH = math.sqrt(math.sqrt(math.sqrt(2.0)))  # roots are rounded alike everywhere, and powers are not
_LOOKED_AT = 1 << 20  # elements
_NO_WEIGHTS = 2.0**-1000  # |θ|² of weights that begin as zeros, which limit nothing


class Agreement(NamedTuple):
    """Of a round with those before it: sums over what this rank looks at, or over all ranks of a site."""

    both: float = 0.0  # ⟨g, l⟩
    now: float = 0.0  # ⟨g, g⟩ where l is not 0
    last: float = 0.0  # ⟨l, l⟩ where g is not 0
    whole: float = 0.0  # ⟨g, g⟩
    anchor: float = 0.0  # ⟨θ, θ⟩ at the start; 0: not known yet

    @staticmethod
    def joined(parts: Sequence["Agreement"]) -> "Agreement":
        return Agreement(*(math.fsum(column) for column in zip(*parts, strict=True)))

    @property
    def change(self) -> int:
        """Of α, in eighths of an octave."""
        if not self.now or not self.last:
            return 0
        cosine = self.both / math.sqrt(self.now * self.last)
        return round(min(max(_GAIN * (cosine + _UNDONE), -_SHORTER), _LONGER))


@dataclass(frozen=True, kw_only=True)
class StepLength:
    """
    Attributes:
        eighths: α = FIRST_OUTER_LR · 2^(eighths / 8), of the round that was applied last.
        agreement: of that round, by what this rank looks at.
        last: l, of what this rank looks at. It is written in place.
    """

    eighths: int = _FIRST
    agreement: Agreement = field(default_factory=Agreement)
    last: Tensor

    @staticmethod
    def of(numel: int) -> "StepLength":
        """Before the first round. `numel`: of this rank's part."""
        stride = BLOCK * _stride(numel)
        looked_at = sum(min(BLOCK, numel - first) for first in range(0, numel, stride))
        return StepLength(last=torch.zeros(looked_at, dtype=torch.float32, device="cpu"))

    @property
    def outer_lr(self) -> float:
        """α."""
        octaves, rest = divmod(self.eighths, 8)
        return math.ldexp(math.prod([FIRST_OUTER_LR] + [_EIGHTH] * rest), octaves)

    def moved(self, agreement: Agreement) -> "StepLength":
        """That of the next round.

        Args:
            agreement: of the last one, by all ranks of this site.
        """
        has_begun = self.eighths != _FIRST or not agreement.whole or agreement.now > 0
        begun = self.eighths if has_begun else 0
        found = replace(self, eighths=min(max(begun + agreement.change, _LOWEST), _HIGHEST))
        longest = _LONGEST * math.sqrt(agreement.anchor) if agreement.anchor > _NO_WEIGHTS else math.inf
        while found.eighths > _LOWEST and found.outer_lr * math.sqrt(agreement.whole) > longest:
            found = replace(found, eighths=found.eighths - 1)
        return found

    def having_seen(self, contributions: Sequence[Entries], divisor: float, anchor: Tensor) -> "StepLength":
        """As it is after a round that adds this up, at θ."""
        g = torch.zeros_like(self.last)
        for entries in contributions:
            _every(_stride(anchor.numel()), entries).add_to(g)
        g /= divisor
        at = g.nonzero().flatten()
        new, old = g[at].double(), self.last[at].double()
        products = (new * old, new * new * (old != 0), old * old, new * new)
        size = self.agreement.anchor
        if not size:
            theta = _every(_stride(anchor.numel()), Entries.whole(anchor)).values.double()
            size = max(_sum(theta * theta), _NO_WEIGHTS)
        self.last[at] = g[at]
        return replace(self, agreement=Agreement(*map(_sum, products), anchor=size))

    @property
    def mark(self) -> int:
        """64 bits that tell sites apart which would go on with different lengths."""
        told = repr((self.eighths, *self.agreement)).encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")

    def state(self) -> dict[str, Any]:
        """As plain data."""
        return {"eighths": self.eighths, "agreement": list(self.agreement), "last": self.last}

    @staticmethod
    def from_state(state: Any, numel: int) -> "StepLength":
        """
        Args:
            state: its "last" may be None, where another rank's part was looked at.
            numel: of this rank's part.

        Raises:
            ValueError: it is none.
        """
        fresh, damaged = StepLength.of(numel), "this state does not say how long the outer step is"
        try:
            eighths, last = operator.index(state["eighths"]), state["last"]
            agreement = Agreement._make(map(float, state["agreement"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{damaged}: it is damaged") from error
        is_one = all(map(math.isfinite, agreement)) and min(agreement[1:]) >= 0
        is_one = is_one and _LOWEST <= eighths <= _HIGHEST
        if last is not None:
            is_one = is_one and isinstance(last, Tensor) and last.shape == fresh.last.shape
            is_one = is_one and last.dtype == torch.float32 and bool(last.isfinite().all())
        if not is_one:
            raise ValueError(f"{damaged}: it is damaged")
        if last is None:
            return StepLength(eighths=eighths, last=fresh.last)
        fresh.last.copy_(last)  # which may have been loaded onto another device
        return StepLength(eighths=eighths, agreement=agreement, last=fresh.last)


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
