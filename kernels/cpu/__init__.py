"""The ops for tensors in host memory, in C: one .c file for each, and shared code in .h files.

They use as many threads as torch does.
"""

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .. import reference, reference_entries, reference_tight
from ..recycle import recycled
from ..types import BLOCK, Encoded, Entries, Gate, Known, MalformedError, OuterStep
from .build import BUILDS, BuildError
from .library import builds_for_this_cpu, load
from .patches import CompiledPatches

__all__ = ["BUILDS", "BuildError", "Compiled", "best", "builds_for_this_cpu"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GATES = {torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}


class Compiled:
    """The ops of `reference`, from a library that is built with the given compiler flags.

    Raises:
        BuildError: there is no compiler, or what it makes can't be used.
    """

    def __init__(self, flags: tuple[str, ...]) -> None:
        self._library = library = load(flags)
        pieces = (c_int64, c_void_p, c_void_p, c_void_p)
        library.loco_encode.restype = c_int64
        library.loco_encode.argtypes = (
            *(c_int64, c_void_p, c_void_p, *pieces, c_float, c_int, c_float, c_float, c_int, c_int),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        )
        library.loco_apply.restype = c_double
        library.loco_apply.argtypes = (
            *(c_int64, c_void_p, c_void_p, c_void_p, *pieces, c_int64, c_void_p),
            *(c_float, c_float, c_float, c_float, c_int, c_int),
        )
        library.loco_write_weights.restype = None
        library.loco_write_weights.argtypes = (c_int64, c_void_p, *pieces, c_int)
        library.loco_cross.restype = c_int64
        library.loco_cross.argtypes = (
            *(c_int64, c_void_p, c_void_p, c_void_p, *pieces, c_int, c_int64, c_int64, c_void_p),
            *(c_float, c_float, c_float, c_float, c_int, c_float, c_float, c_int),
            *(c_int, c_float, c_float, c_int, c_int),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        )
        library.loco_first_changed.restype = c_int64
        library.loco_first_changed.argtypes = (c_int64, c_void_p, *pieces, c_int, c_void_p, c_float, c_int)
        library.loco_digest.restype = c_uint64
        library.loco_digest.argtypes = (c_void_p, c_int64, c_int)
        library.loco_add_up.restype = None
        library.loco_add_up.argtypes = (
            *(c_int64, c_int64, c_void_p, c_int, c_void_p, c_float, c_void_p, c_void_p),
        )
        library.loco_add_whole.restype = None
        library.loco_add_whole.argtypes = (c_int64, c_int64, c_void_p, c_int, c_void_p)
        library.loco_write_blocks.restype = c_int64
        library.loco_write_blocks.argtypes = (c_int64, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
        library.loco_check_blocks.restype = c_int
        library.loco_check_blocks.argtypes = (
            *(c_int64, c_void_p, c_int, c_int64, c_void_p, c_void_p, c_int64, c_int, c_void_p),
        )
        library.loco_pack_room.restype = c_int64
        library.loco_pack_room.argtypes = (c_int64, c_int64)
        library.loco_pack.restype = c_int64
        library.loco_pack.argtypes = (
            *(c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_int, c_int, c_uint32, c_uint32, c_int, c_void_p),
        )
        library.loco_unpack.restype = c_int
        library.loco_unpack.argtypes = (
            *(c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p),
            *(c_int, c_void_p, c_void_p, c_void_p),
        )
        self.patches = CompiledPatches(library)
        if not self._agrees_with_reference():
            raise BuildError("what the C compiler made computes other bits than it should")

    def encode(
        self,
        anchor: Tensor,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        gate: Gate | None,
        factor: float = 1.0,
    ) -> Encoded:
        n = anchor.numel()
        room, digest, first_nonfinite = _room_for(n, gate), c_uint64(), c_int64()
        pieces = _Pieces(weights, n)
        count = self._library.loco_encode(
            *(n, _address(anchor), _address(residual), *pieces.arguments, factor, *_seen(gate)),
            *(torch.get_num_threads(), *map(_address, room)),
            *(ctypes.addressof(digest), ctypes.addressof(first_nonfinite)),
        )
        return Encoded(_filled(room, count), digest.value, first_nonfinite.value)

    def apply(
        self,
        anchor: Tensor,
        momentum: Tensor | None,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        own: Entries,
        contributions: Sequence[Entries],
        outer: OuterStep,
        returned: Entries | None = None,
    ) -> float:
        n, pieces = anchor.numel(), _Pieces(weights, anchor.numel())
        entries = _addresses([own, returned or (), *contributions])
        squares = self._library.loco_apply(
            *(n, _address(anchor), _address(momentum), _address(residual), *pieces.arguments),
            *(len(contributions), entries.ctypes.data, outer.factor, outer.divisor, outer.lr, outer.momentum),
            *(outer.nesterov, torch.get_num_threads()),
        )
        return math.sqrt(squares)

    def write_weights(self, anchor: Tensor, weights: Sequence[Tensor]) -> None:
        pieces = _Pieces(weights, anchor.numel())
        threads = torch.get_num_threads()
        self._library.loco_write_weights(anchor.numel(), _address(anchor), *pieces.arguments, threads)

    def first_changed(
        self, anchor: Tensor, weights: Sequence[Tensor], sent: Entries | None, beta: float
    ) -> int:
        n, pieces, entries = anchor.numel(), _Pieces(weights, anchor.numel()), _addresses([sent or ()])
        return self._library.loco_first_changed(
            *(n, _address(anchor), *pieces.arguments, sent is not None, entries.ctypes.data, beta),
            torch.get_num_threads(),
        )

    def cross(
        self,
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
        n, pieces = anchor.numel(), _Pieces(weights, anchor.numel())
        room = _room_for(n, gate) if sends else Entries.none(n, anchor.device)
        digest, first_nonfinite, squares = c_uint64(), c_int64(), c_double()
        entries = _addresses([sent or (), *contributions, *returned])
        count = self._library.loco_cross(
            *(n, _address(anchor), _address(momentum), _address(residual), *pieces.arguments),
            *(sent is not None, len(contributions), len(returned), entries.ctypes.data),
            *(outer.factor, outer.divisor, outer.lr, outer.momentum, outer.nesterov),
            *(beta if beta_before is None else beta_before, beta, sends),
            *(*_seen(gate), torch.get_num_threads(), *(map(_address, room) if sends else (None, None, None))),
            *(ctypes.addressof(digest), ctypes.addressof(first_nonfinite), ctypes.addressof(squares)),
        )
        found = _filled(room, count)
        return Encoded(found, digest.value, first_nonfinite.value), math.sqrt(squares.value)

    def digest(self, data: Tensor) -> int:
        size = data.numel() * data.element_size()
        return self._library.loco_digest(_address(data), size, torch.get_num_threads())

    def add_up(self, contributions: Sequence[Entries], numel: int, out: Tensor | None = None) -> Entries:
        if contributions[0].starts is not None:
            return self._sums(contributions, numel)[0]
        some, threads = _addresses(contributions), torch.get_num_threads()
        values = recycled(numel, torch.float32) if out is None else out
        self._library.loco_add_whole(numel, len(contributions), some.ctypes.data, threads, _address(values))
        return Entries.whole(values)

    def add_and_split(
        self, contributions: Sequence[Entries], anchor: Tensor, margin: float
    ) -> tuple[Entries, Entries]:
        if contributions[0].starts is None:
            return reference_entries.add_and_split(contributions, anchor, margin)
        leave, stay = self._sums(contributions, anchor.numel(), anchor, margin)
        return leave, stay

    def _sums(
        self, contributions: Sequence[Entries], numel: int, anchor: Tensor | None = None, margin: float = 0.0
    ) -> list[Entries]:
        """The sums; or with an anchor those that leave, and those that stay."""
        assert all(entries.starts is not None for entries in contributions)
        most = sum(entries.length for entries in contributions)
        rooms = [
            Entries(
                recycled(-(-numel // BLOCK) + 1, torch.int64),
                recycled(most, torch.uint8),
                recycled(most, torch.float32),
            )
            for _ in range(1 if anchor is None else 2)
        ]
        some, places = _addresses(contributions), _addresses(rooms)
        self._library.loco_add_up(
            *(numel, len(contributions), some.ctypes.data, torch.get_num_threads(), _address(anchor), margin),
            *(places[k].ctypes.data if k < len(rooms) else None for k in range(2)),
        )
        return [room.filled() for room in rooms]

    def write_blocks(self, entries: Entries, ahead: int) -> Tensor:
        assert entries.starts is not None
        assert ahead % 8 == 0
        blocks = entries.starts.numel() - 1
        room = recycled(ahead + 5 * entries.length + 2 * blocks, torch.uint8)
        size = self._library.loco_write_blocks(
            *(blocks, _address(entries.starts), _address(entries.offsets), _address(entries.values)),
            *(torch.get_num_threads(), room.data_ptr() + ahead),
        )
        return room[: ahead + size]

    def read_blocks(self, body: Tensor, count: int, numel: int) -> Entries:
        counts = reference_entries.block_counts(body, count, numel)
        starts = torch.empty(counts.numel() + 1, dtype=torch.int64, device="cpu")
        offsets, values = body[4 * count : 5 * count], body[: 4 * count].view(torch.float32)
        fine = self._library.loco_check_blocks(
            *(counts.numel(), _address(counts), counts.dtype == torch.int16, count),
            *(_address(offsets), _address(values), numel, torch.get_num_threads(), _address(starts)),
        )
        # The reference finds out what is wrong, and says it.
        return Entries(starts, offsets, values) if fine else reference_entries.read_blocks(body, count, numel)

    def pack(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor | None:
        """A frame of the tight code, or None if a part of it would be larger than plain bytes."""
        assert entries.starts is not None
        assert ahead % 8 == 0  # the library writes words
        n, count = known.numel, entries.length
        if not count:
            return torch.empty(ahead, dtype=torch.uint8, device="cpu")
        room = recycled(ahead + self._library.loco_pack_room(n, count), torch.uint8, at_most=True)
        size = self._library.loco_pack(
            *(n, _address(known.anchor), _address(known.momentum)),
            *(_address(entries.starts), _address(entries.offsets), _address(entries.values)),
            *reference_tight.reach_of(known.gate),
            *(torch.get_num_threads(), room.data_ptr() + ahead),
        )
        if size < 0:
            raise MemoryError("no memory to code the entries of a round")
        return room[: ahead + size] if size else None

    def unpack(self, body: Tensor, count: int, known: Known) -> Entries:
        n = known.numel
        reference_tight.check_size(body, count, n)
        starts = torch.zeros(-(-n // BLOCK) + 1, dtype=torch.int64, device="cpu")
        offsets = recycled(count, torch.uint8)
        values = recycled(count, torch.float32)
        if count:
            wrong = self._library.loco_unpack(
                *(_address(body), body.numel(), count, n, _address(known.anchor), _address(known.momentum)),
                *(torch.get_num_threads(), _address(starts), _address(offsets), _address(values)),
            )
            if wrong > len(reference_tight.Wrong):
                raise MemoryError("no memory to read the entries of a round")
            if wrong:
                raise MalformedError(list(reference_tight.Wrong)[wrong - 1])
        return Entries(starts, offsets, values)

    def _agrees_with_reference(self) -> bool:
        """Compare a small round with the reference's: $CC may be any compiler, with any flags."""
        at = torch.arange(1003, dtype=torch.float32, device="cpu")
        anchor = (at * 0.37).sin() * 0.02 * 2.0 ** -(at % 140)
        flat = anchor * (1 + (at * 0.11).cos() * 2.0**-8)
        residual = anchor * 2.0**-9
        gates = [Gate(dtype=dtype, gain=1.7) for dtype in _GATES]
        gates.append(Gate(margin=0.3, value_steps=8))
        outer = OuterStep(divisor=3.2, factor=1.3, lr=0.7, momentum=0.9, nesterov=True)
        found: list[list[Tensor | int | None]] = []
        for home in (self, reference):
            theta, m, e = anchor.clone(), residual.clone(), residual.clone()
            w = [flat[:500].clone(), flat[500:700].bfloat16(), flat[700:].half()]
            results: list[Tensor | int | None] = []
            for gate in (None, *gates):
                encoded = home.encode(theta, w, e, gate, outer.factor)
                results += [*encoded.entries, encoded.digest, encoded.first_nonfinite]
            own = home.encode(theta, w, e, gates[-1]).entries
            entries = reference_entries if home is reference else self
            returned = entries.add_and_split([own, own], anchor, 0.6)[1]
            home.apply(theta, m, w, e, own, [own, Entries.whole(residual), own], outer, returned)
            for sent in (own, Entries.whole(residual), None):
                results.append(home.first_changed(theta, w, sent, 1.3) < 0)
                crossing = theta, m, w, e, sent, [own, own], outer, gates[-1], 1.3
                cross = self.cross if home is self else partial(reference.cross, reference)
                crossed = cross(*crossing, returned=[own, Entries.whole(residual)])
                results += [*crossed[0].entries, crossed[0].digest, crossed[0].first_nonfinite]
            results += entries.add_up([own, own], at.numel())
            results += [x for part in entries.add_and_split([own, own], anchor, 0.6) for x in part]
            tight, known = (reference_tight if home is reference else self), Known(anchor, residual, gates[0])
            results += [tight.pack(own, known), entries.write_blocks(own, 0)]
            found.append([*results, theta, m, e, *w])
        return all(_same(a, b) for a, b in zip(*found, strict=True))


def best() -> Compiled:
    """The fastest build that runs on this CPU."""
    return Compiled(BUILDS[builds_for_this_cpu()[-1]])


def _same(a: Tensor | int | None, b: Tensor | int | None) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or bool(a == b)
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _seen(gate: Gate | None) -> tuple[int, float, float, int]:
    """A gate as the library takes it."""
    if gate is None:
        return 0, 1.0, 0.0, 0
    return _GATES[gate.dtype], gate.gain, gate.margin, gate.value_steps or 0


def _room_for(numel: int, gate: Gate | None) -> Entries:
    """Of a vector: all of them, as far as a gate lets them pass."""
    values = recycled(numel, torch.float32, at_most=gate is not None)
    if gate is None:
        return Entries.whole(values)
    starts = recycled(-(-numel // BLOCK) + 1, torch.int64)
    return Entries(starts, recycled(numel, torch.uint8, at_most=True), values)


def _filled(room: Entries, count: int) -> Entries:
    if count < 0:
        raise MemoryError("no memory for the entries of a round")
    offsets = room.offsets
    return Entries(room.starts, None if offsets is None else offsets[:count], room.values[:count])


class _Pieces:
    """The pieces of the parameters as the library takes them: addresses, first elements and dtypes."""

    def __init__(self, weights: Sequence[Tensor], numel: int) -> None:
        weights = [w for w in weights if w.numel()]
        if sum(w.numel() for w in weights) != numel:
            raise ValueError(f"the weights must be {numel} elements together")
        self._columns = (
            np.array([_address(w) for w in weights], dtype=np.int64),
            np.array([*accumulate((w.numel() for w in weights), initial=0)], dtype=np.int64),
            np.array([_DTYPES[w.dtype] for w in weights], dtype=np.int32),
        )
        self.arguments = (len(weights), *(column.ctypes.data for column in self._columns))


def _addresses(entries: Sequence[Entries | tuple[()]]) -> np.ndarray:
    """The addresses of each one's starts, offsets and values; zeros of none."""
    return np.array([[_address(t) or 0 for t in some or (None,) * 3] for some in entries], dtype=np.int64)


def _address(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor in host memory."""
    if tensor is None:
        return None
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError("the C kernels take contiguous tensors in host memory")
    return tensor.data_ptr()
