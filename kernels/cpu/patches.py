"""The ops of `reference_patch` in C."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ..reference_patch import FORMATS, Format
from ..reference_ranked import CLASSES, PART, Wrong
from ..reserve import reserve
from ..types import Changes, MalformedError, Ranked

_VECTOR = (c_int64, c_int64, c_void_p, c_void_p, c_void_p)  # elements, pieces, addresses, starts, dtypes
_ENTRIES_OF_A_THREAD = 4096  # starting one takes as long
_FROM_FLOAT = {torch.bfloat16: 1, torch.float16: 2}  # the casts of numbers.h


class CompiledPatches:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.loco_patch_find.restype = c_int64
        library.loco_patch_find.argtypes = (
            *(c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_int, c_int, c_int, c_void_p, c_void_p),
        )
        library.loco_patch_swap.restype = None
        library.loco_patch_swap.argtypes = (
            *(*_VECTOR[1:], c_int, c_int64, c_void_p, c_void_p, c_int, c_void_p),
        )
        library.loco_patch_merge.restype = c_int64
        library.loco_patch_merge.argtypes = (
            *(*_VECTOR[1:], c_int, *2 * (c_int64, c_void_p, c_void_p)),
            *(c_int, c_void_p, c_void_p),
        )
        library.loco_patch_digest.restype = c_uint64
        library.loco_patch_digest.argtypes = (c_void_p, c_int64, c_int, c_int)
        library.loco_patch_room.restype = c_int64
        library.loco_patch_room.argtypes = (c_int64, c_int64)
        library.loco_patch_pack.restype = c_int64
        library.loco_patch_pack.argtypes = (
            *(*_VECTOR, c_int, c_int, c_int64, c_void_p, c_void_p, c_int, c_void_p),
        )
        library.loco_patch_count.restype = c_int64
        library.loco_patch_count.argtypes = (c_void_p, c_int64, c_int64)
        library.loco_patch_unpack.restype = c_int
        library.loco_patch_unpack.argtypes = (
            *(c_void_p, c_int64, *_VECTOR, c_int, c_int, c_int, c_void_p, c_void_p),
        )
        library.loco_patch_code.restype = c_int64
        library.loco_patch_code.argtypes = (c_int64, *[c_void_p] * 4, c_int, c_void_p)
        library.loco_patch_decode.restype = c_int
        library.loco_patch_decode.argtypes = (c_void_p, c_int64, c_int64, c_int, *[c_void_p] * 4)

    def find_changes(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes:
        if len({piece.dtype for piece in new}) > 1:
            return self._find_in_runs(old, new)
        new = [piece.contiguous() for piece in new]
        pieces, fresh = _Vector(old), _Vector(new)
        from_float = 0
        if old and new[0].dtype != old[0].dtype:
            if new[0].dtype != torch.float32 or old[0].dtype not in _FROM_FLOAT:
                raise ValueError(
                    f"{new[0].dtype} is not cast to {old[0].dtype}; new weights are that, or FP32"
                )
            from_float = _FROM_FLOAT[old[0].dtype]
        positions = reserve(pieces.numel, torch.int64)
        bits = reserve(pieces.numel, pieces.format.bits)
        found = self._library.loco_patch_find(
            *(pieces.numel, pieces.count, pieces.addresses, fresh.addresses, pieces.starts, pieces.dtypes),
            *(pieces.format.width, from_float, torch.get_num_threads()),
            *(positions.data_ptr(), bits.data_ptr()),
        )
        return Changes(positions[:found], bits[:found])

    def _find_in_runs(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes:
        """The library takes new pieces that are all FP32 or all of the old ones' format."""
        positions, bits, start = [], [], 0
        pairs = zip(old, new, strict=True)
        for _, run in groupby(pairs, key=lambda pair: pair[1].dtype):
            before, after = map(list, zip(*run, strict=True))
            found = self.find_changes(before, after)
            positions.append(found.positions.add_(start))
            bits.append(found.bits)
            start += sum(piece.numel() for piece in before)
        return Changes(torch.cat(positions), torch.cat(bits))

    def swap_bits(self, weights: Sequence[Tensor], changes: Changes) -> list[int]:
        pieces = _Vector(weights)
        entries = changes.positions.numel()
        shares = _shares(entries)
        digests = np.zeros((shares, pieces.count), dtype=np.uint64)
        self._library.loco_patch_swap(
            *(*pieces.arguments[1:], pieces.format.width, entries),
            *(changes.positions.data_ptr(), changes.bits.data_ptr(), shares, digests.ctypes.data),
        )
        found = iter(digests.sum(0, dtype=np.uint64).tolist())
        return [next(found) if piece.numel() else 0 for piece in weights]

    def merge_changes(self, old: Sequence[Tensor], earlier: Changes, later: Changes) -> Changes:
        pieces, entries = _Vector(old), earlier.positions.numel() + later.positions.numel()
        shares = _shares(entries)
        positions, bits = reserve(entries, torch.int64), reserve(entries, pieces.format.bits)
        lists = [(some.positions.contiguous(), some.bits.contiguous()) for some in (earlier, later)]
        found = self._library.loco_patch_merge(
            *(*pieces.arguments[1:], pieces.format.width),
            *(x for at, to in lists for x in (at.numel(), at.data_ptr(), to.data_ptr())),
            *(shares, positions.data_ptr(), bits.data_ptr()),
        )
        return Changes(positions[:found], bits[:found])

    def digest_bits(self, weights: Tensor) -> int:
        weights, width, threads = weights.contiguous(), weights.element_size(), torch.get_num_threads()
        return self._library.loco_patch_digest(weights.data_ptr(), weights.numel(), width, threads)

    def pack_patch(self, old: Sequence[Tensor], changes: Changes) -> Tensor:
        pieces, entries = _Vector(old), changes.positions.numel()
        room = reserve(self._library.loco_patch_room(pieces.numel, entries), torch.uint8)
        size = self._library.loco_patch_pack(
            *(*pieces.arguments, pieces.format.width, pieces.format.mantissa, entries),
            *(changes.positions.data_ptr(), changes.bits.data_ptr()),
            *(torch.get_num_threads(), room.data_ptr()),
        )
        return _made(room, size)

    def unpack_patch(self, old: Sequence[Tensor], body: Tensor) -> Changes:
        pieces = _Vector(old)
        entries = self._count(body, pieces.numel)
        # Not from the C library, which keeps what is freed: a process may never again need so much.
        positions, bits = reserve(entries, torch.int64), reserve(entries, pieces.format.bits)
        wrong = self._library.loco_patch_unpack(
            *(body.data_ptr(), body.numel(), *pieces.arguments),
            *(pieces.format.width, pieces.format.mantissa, torch.get_num_threads()),
            *(positions.data_ptr(), bits.data_ptr()),
        )
        _refuse(wrong)
        return Changes(positions, bits)

    def code_ranked(self, ranked: Ranked) -> Tensor:
        lowest, *columns = (column.contiguous() for column in ranked)
        parts, entries = lowest.numel(), ranked.ranks.numel()
        room = reserve(self._library.loco_patch_room(parts * PART, entries), torch.uint8)
        addresses = [column.data_ptr() for column in (lowest, *columns)]
        size = self._library.loco_patch_code(parts, *addresses, torch.get_num_threads(), room.data_ptr())
        return _made(room, size)

    def decode_ranked(self, body: Tensor, numel: int) -> Ranked:
        entries, parts = self._count(body, numel), -(-numel // PART)
        ranked = Ranked(
            torch.zeros(parts, dtype=torch.uint8, device="cpu"),
            torch.zeros(parts, CLASSES, dtype=torch.int32, device="cpu"),
            torch.empty(entries, dtype=torch.int32, device="cpu"),
            torch.empty(entries, dtype=torch.int64, device="cpu"),
        )
        wrong = self._library.loco_patch_decode(
            *(body.data_ptr(), body.numel(), numel, torch.get_num_threads()),
            *(column.data_ptr() for column in ranked),
        )
        _refuse(wrong)
        return ranked

    def _count(self, body: Tensor, numel: int) -> int:
        """How many of so many elements a patch changes."""
        entries = self._library.loco_patch_count(body.data_ptr(), body.numel(), numel)
        _refuse(-min(entries, 0))
        return entries


def _shares(entries: int) -> int:
    return min(torch.get_num_threads(), entries // _ENTRIES_OF_A_THREAD + 1, 256)


def _made(room: Tensor, size: int) -> Tensor:
    """The patch of so many bytes at the beginning of its room."""
    if size < 0:
        raise MemoryError("no memory to code the changes of some weights")
    return room[:size]


def _refuse(wrong: int) -> None:
    if wrong > len(Wrong):
        raise MemoryError("no memory to read the changes of some weights")
    if wrong:
        raise MalformedError(list(Wrong)[wrong - 1])


class _Vector:
    """1-D tensors in host memory, one after the other, as the library takes them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        pieces = [piece for piece in weights if piece.numel()]  # no element belongs to an empty one
        if not all(piece.is_contiguous() and piece.device.type == "cpu" for piece in pieces):
            raise ValueError("the C kernels take contiguous tensors in host memory")
        self.count = len(pieces)
        self.format: Format = FORMATS[weights[0].dtype if weights else torch.bfloat16]
        self._columns = (
            np.array([piece.data_ptr() for piece in pieces], dtype=np.int64),
            np.cumsum([0, *(piece.numel() for piece in pieces)], dtype=np.int64),
            np.zeros(self.count, dtype=np.int32),
        )
        self.numel = int(self._columns[1][-1])
        self.addresses, self.starts, self.dtypes = (column.ctypes.data for column in self._columns)
        self.arguments = (self.numel, self.count, self.addresses, self.starts, self.dtypes)
