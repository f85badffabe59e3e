"""The specification: a round's work on one site's flat state, in plain torch, readable and exact.

Every FP32 operation is its own torch call, so each is rounded on its own: no fused multiply-add, no
reordering. Faster homes of these ops must give the same bits; this file defines which bits are right. The
only exception is a NaN that results from arithmetic, whose bits are not specified (such a round is refused).

The flat state is processed in chunks, so that the temporaries of an op stay small for a model of any size.

    anchor      θ  [n] float32      the parameters all sites agree on
    momentum    m  [n] float32      the outer momentum, or None for μ = 0
    residual    e  [n] float32      what this site has withheld, or None if nothing is ever withheld
    weights     w  1-D pieces of the parameters, in order, n elements together, any supported dtype
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .types import Encoded, Entries, Gate, OuterStep, all_finite

if TYPE_CHECKING:
    from .homes import Home

CHUNK = 1 << 18  # elements: temporaries fit in cache, and the fixed cost of a torch call is negligible


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 `x` to `dtype`, to nearest, ties to even.

    BF16 is rounded by integer arithmetic on the bits: hardware that rounds BF16 may flush denormals, and the
    result must not depend on the hardware. A NaN becomes the quiet NaN 0x7FC0 (FP16: 0x7E00). FP8 saturates
    at its largest value, as in receivers that scale; the other formats overflow to infinity.
    """
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype)
    if dtype == torch.float16:
        return torch.where(x.isnan(), 0x7E00, x.to(dtype).view(torch.int16)).view(dtype)
    if dtype != torch.bfloat16:
        return x.to(dtype)
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(x.isnan(), 0x7FC0, rounded).to(torch.int16).view(dtype)


def visible(anchor: Tensor, update: Tensor, gate: Gate) -> Tensor:
    """Step 4: cast(θ) ≠ cast(θ − γ·s) to the gate's dtype, compared as values, so that +0 equals −0.

    NaN differs from everything, itself included. -> [n] bool
    """
    moved = anchor - gate.gain * update
    return cast(anchor, gate.dtype).float() != cast(moved, gate.dtype).float()


def ulp(anchor: Tensor) -> Tensor:
    """The BF16 ulp of θ, 2^(E − 127 − 7) for a biased exponent E, which is 1 for zeros and denormals."""
    exponent = (anchor.view(torch.int32) & 0x7F800000).clamp_(min=0x00800000)
    return exponent.view(torch.float32) * 2.0**-7


def in_steps(anchor: Tensor, update: Tensor, value_steps: int) -> Tensor:
    """The multiple of ulp(θ) / V nearest to s, ties to the even one. -> [n] float32

    Where that would be 2^128, which FP32 can't represent, the multiple below it. Infinities and NaNs stay.
    """
    exact, step = update.double(), ulp(anchor).double() / value_steps
    largest = 2.0**128 - step
    nearest = ((exact / step).round() * step).clamp(-largest, largest)
    # From 2^23 steps on, every FP32 number is a multiple of the step.
    return torch.where(exact.abs() < step * 2.0**23, nearest.float(), update)


def to_send(anchor: Tensor, update: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Step 5: which entries to send, and which values. -> [n] bool, [n] float32"""
    sent, values = visible(anchor, update, gate), update
    if gate.margin:
        sent &= update.abs() > gate.margin * ulp(anchor)
    if gate.value_steps is not None:
        values = in_steps(anchor, update, gate.value_steps)
        sent &= values != 0
    return sent, values


def encode(
    anchor: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    gate: Gate | None,
    factor: float = 1.0,
) -> Encoded:
    """Steps 2 to 5, read-only: the entries to send, the digest of θ, the first position that is not finite.

        Δ = c·(float(cast(θ)) − float(w))
        s = Δ + e
        send (i, v_i) for the visible i with |s_i| > f·ulp(θ_i) and v_i ≠ 0;
            v = s, or rounded to a multiple of ulp(θ) / V; without a gate send every s_i

    Nothing is changed, so that a round whose exchange fails can be repeated; `apply` writes the residual.
    """
    first_nonfinite = -1
    indices: list[Tensor] = []
    values: list[Tensor] = []
    for at, w in _chunks(weights):
        update = _update(anchor, w, residual, at, factor)
        if first_nonfinite < 0:
            bad = update.isfinite().logical_not_().nonzero()
            if bad.numel():
                first_nonfinite = at.start + int(bad[0])
        if gate is None:
            values.append(update)
            continue
        sent, rounded = to_send(anchor[at], update, gate)
        where = sent.nonzero().view(-1)
        indices.append(where + at.start)
        values.append(rounded[where])
    entries = Entries.whole(_join(values, torch.float32, anchor.device))
    if gate is not None:
        where = _join(indices, torch.int64, anchor.device)
        entries = Entries.at(where, entries.values, anchor.numel())
    return Encoded(entries, digest(anchor), first_nonfinite)


def apply(
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    own: Entries,
    contributions: Sequence[Entries],
    outer: OuterStep,
    returned: Entries | None = None,
) -> float:
    """Steps 5 to 8, in place: the residual, the mean, the outer step, the weights.

    e = s − (v − r)                         v was sent, r came back to this site alone; s elsewhere
    g = ((0 + v_0) + v_1 + …) / R           contributions in site order
    m = μ·m + g
    θ = θ − α·(g + μ·m)                     Nesterov; θ − α·m plain; θ − α·g for μ = 0
    w = cast(θ)

    Returns the L2 norm of e for reports; its last bits are not specified.
    """
    divisor = torch.full((), outer.divisor, dtype=torch.float32, device=anchor.device)
    squares = 0.0
    for at, w in _chunks(weights):
        if residual is not None:
            kept = _update(anchor, w, residual, at, outer.factor)
            if own.starts is None:
                kept.zero_()
            else:
                sent = torch.zeros_like(kept)
                where, what = own.within(at)
                sent[where] = what
                if returned is not None:
                    where, what = returned.within(at)
                    sent[where] -= what
                kept -= sent
            residual[at] = kept
            squares += float(kept.double().square_().sum())

        total = torch.zeros(at.stop - at.start, dtype=torch.float32, device=anchor.device)
        for contribution in contributions:
            if contribution.starts is None:
                total += contribution.values[at]
            else:
                where, what = contribution.within(at)
                total[where] += what  # a contribution names an index once, so this is one addition
        # Divided by a tensor: CUDA divides by a Python scalar through its reciprocal, in other bits.
        mean = total / divisor

        if momentum is None:
            direction = mean
        else:
            m = outer.momentum * momentum[at] + mean
            momentum[at] = m
            direction = mean + outer.momentum * m if outer.nesterov else m
        anchor[at] -= outer.lr * direction
        w.copy_(cast(anchor[at], w.dtype))
    return math.sqrt(squares)


def cross(
    passes: "Home",
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor,
    sent: Entries | None,
    contributions: Sequence[Entries],
    outer: OuterStep,
    gate: Gate | None,
    beta: float,
    *,
    returned: Sequence[Entries] = (),
    sends: bool = True,
    beta_before: float | None = None,
) -> tuple[Encoded, float]:
    """Where rounds overlap: apply the round that has come, and find what the next one sends, in place.

    e = e + what was returned               one after the other
    Δ = c·(float(ŵ) − float(w))             ŵ = cast(θ − β·v): v was sent at the boundary before
    s = Δ + e                               or 0 + e, where that is infinite or NaN
    m, θ                                    as in `apply`
    v = what `encode` finds of s            or nothing, if nothing is sent
    e = s − v
    w = cast(θ − β·v)

    Where nothing was sent ŵ is cast(θ), so Δ is that of `encode` and `apply`. So these two do all elements,
    once those that were sent are changed to what they find no Δ at: e = s and w = cast(θ). A zero that they
    add makes +0 of −0, which is taken back.

    Args:
        passes: the home whose `encode` and `apply` are used.
        sent: v of the boundary before; None: nothing.
        beta_before: β of it; by default as now.
        returned: of earlier rounds, what was not used.

    Returns what is sent, with the first position at which Δ counts as 0 since s is not finite, and the L2
    norm of e as `apply` does.
    """
    nothing = Entries.none(anchor.numel(), anchor.device)
    for entries in returned:
        entries.add_to(residual)
    bad, were_sent = [], slice(0)
    ran_ahead = beta if beta_before is None else beta_before
    if sent is not None:
        bad += _collect_sent(anchor, weights, residual, sent, ran_ahead, outer.factor)
        were_sent = slice(None) if sent.starts is None else sent.indices()
    bad += _drop_bad(anchor, weights, residual, outer.factor)
    first_bad, collected = min(bad, default=-1), residual[were_sent].clone()
    norm = passes.apply(anchor, momentum, weights, residual, nothing, contributions, outer)
    residual[were_sent] = collected
    if not sends:
        return Encoded(nothing, 0, first_bad), norm
    encoded = passes.encode(anchor, weights, residual, gate)._replace(first_nonfinite=first_bad)
    for piece, at, inside, v in _by_piece(encoded.entries, weights):
        residual[at] -= v
        piece[inside] = cast(anchor[at] - beta * v, piece.dtype).to(piece.device)
    squares = sum(float(part.double().square_().sum()) for part in residual.split(CHUNK))
    return encoded, math.sqrt(squares)


def _collect_sent(
    anchor: Tensor, weights: Sequence[Tensor], residual: Tensor, sent: Entries, beta: float, factor: float
) -> list[int]:
    """Of what was sent, e = s and w = cast(θ) -> where s is not finite, at least the first position."""
    bad = []
    for piece, at, inside, v in _by_piece(sent, weights):
        theta, e = anchor[at], residual[at]
        began = cast(theta - beta * v, piece.dtype).float()
        s = (began - piece[inside].to(theta.device, torch.float32)) * factor + e
        residual[at] = torch.where(s.isfinite(), s, 0.0 + e)
        piece[inside] = cast(theta, piece.dtype).to(piece.device)
        if not all_finite(s):
            first = int(s.isfinite().logical_not().nonzero()[0])
            bad.append(at.start + first if isinstance(at, slice) else int(at[first]))
    return bad


def _drop_bad(anchor: Tensor, weights: Sequence[Tensor], residual: Tensor, factor: float) -> list[int]:
    """w = cast(θ) where s is not finite -> where that is, at least the first position."""
    # Three numbers below 2^125 add up to no infinity, and a cast to FP16 makes none below 2^15. A norm takes
    # no memory, and is NaN if one of them is.
    bound = (2.0**15 if any(w.dtype == torch.float16 for w in weights) else 2.0**125) / max(1.0, factor)
    if all(float(vector_norm(x, math.inf)) < bound for x in (anchor, residual, *weights) if x.numel()):
        return []
    bad = []
    for at, w in _chunks(weights):
        s = _update(anchor, w.to(anchor.device), residual, at, factor)
        if not all_finite(s):
            where = s.isfinite().logical_not()
            bad.append(at.start + int(where.nonzero()[0]))
            w[where.to(w.device)] = cast(anchor[at][where], w.dtype).to(w.device)
    return bad


def run_ahead(anchor: Tensor, sent: Entries | None, beta: float, at: slice) -> Tensor:
    """θ − β·v of some elements; θ itself if nothing was sent."""
    if sent is None:
        return anchor[at]
    if sent.starts is None:
        return anchor[at] - beta * sent.values[at]
    ahead = anchor[at].clone()
    where, v = sent.within(at)
    ahead[where] -= beta * v
    return ahead


def first_changed(anchor: Tensor, weights: Sequence[Tensor], sent: Entries | None, beta: float) -> int:
    """A position at or before the first weight that is not cast(θ − β·v), in values, and in its piece; −1 if
    all are.

    Args:
        sent: v; None: nothing.
    """
    for at, w in _chunks(weights):
        if not torch.equal(cast(run_ahead(anchor, sent, beta, at), w.dtype).to(w.device), w):
            return at.start
    return -1


def write_weights(anchor: Tensor, weights: Sequence[Tensor]) -> None:
    """Step 8 alone: w = cast(θ)."""
    for at, w in _chunks(weights):
        w.copy_(cast(anchor[at], w.dtype))


def digest(data: Tensor) -> int:
    """A 64-bit digest of the bytes of a contiguous 1-D tensor, as 32-bit little-endian words u_0, u_1, …

        k_i = i · 0x9E3779B1                mod 2^32
        v_i = (u_i + k_i) mod 2^32, then v_i ^= v_i >> 15
        digest = Σ v_i · (k_i | 1)          mod 2^64

    The last word is padded with zero bytes. A change of one word is always detected, since v_i is a bijection
    of u_i and its factor is odd; other changes go undetected with a probability of about 2^-32. The sum does
    not depend on the order, so any chunk size and any number of threads give the same digest.
    """
    words = words_of(data)
    total = 0
    for start in range(0, words.numel(), CHUNK):
        u = words[start : start + CHUNK].to(torch.int64)
        position = torch.arange(start, start + u.numel(), device=data.device)
        k = (position * 0x9E3779B1) & 0xFFFFFFFF
        v = (u + k) & 0xFFFFFFFF
        v ^= v >> 15
        total += int((v * (k | 1)).sum())  # wraps mod 2^64, as intended
    return total & 0xFFFF_FFFF_FFFF_FFFF


def _update(anchor: Tensor, w: Tensor, residual: Tensor | None, at: slice, factor: float) -> Tensor:
    """Steps 2 and 3: s = Δ + e."""
    pseudo_grad = (cast(anchor[at], w.dtype).float() - w.float()) * factor
    # Adding a zero e has an effect: it turns −0 into +0, so that dense and sparse rounds send equal bits.
    return pseudo_grad + (0.0 if residual is None else residual[at])


def _chunks(weights: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Split the flat state at the borders of the pieces and into at most CHUNK elements."""
    start = 0
    for piece in weights:
        for chunk in piece.split(CHUNK):
            yield slice(start, start + chunk.numel()), chunk
            start += chunk.numel()


def _by_piece(
    entries: Entries, weights: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor | slice, Tensor | slice, Tensor]]:
    """By piece of the weights: it, where its entries lie in the vector and in the piece, and values."""
    starts = [0, *accumulate(w.numel() for w in weights)]
    if entries.starts is None:
        for piece, (start, end) in zip(weights, pairwise(starts), strict=True):
            yield piece, slice(start, end), slice(None), entries.values[start:end]
        return
    where = entries.indices()
    cuts = torch.searchsorted(where, torch.tensor(starts, device=where.device)).tolist()
    for piece, start, (first, last) in zip(weights, starts[:-1], pairwise(cuts), strict=True):
        if first < last:
            at = where[first:last]
            yield piece, at, (at - start).to(piece.device), entries.values[first:last]


def _join(pieces: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)


def words_of(data: Tensor) -> Tensor:
    """The bytes of a tensor as words, the last one padded with zeros. -> [bytes / 4] int32"""
    size = data.numel() * data.element_size()
    if size % 4 == 0 and data.storage_offset() * data.element_size() % 4 == 0:
        return data.view(torch.int32)
    padded = torch.zeros(-(-size // 4) * 4, dtype=torch.uint8, device=data.device)
    padded[:size] = data.view(torch.uint8)
    return padded.view(torch.int32)
