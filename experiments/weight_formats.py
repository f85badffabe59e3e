"""Others' formats of changed BF16 weights, in bytes as they would be sent.

Headers with tensors' names and shapes are left out everywhere: they vanish in large models.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Shapes = list[tuple[int, ...]]
Tensors = Iterator[tuple[NDArray[np.int64], Bits, int]]


def grail(old: Bits, new: Bits, shapes: Shapes, *, level: int) -> int:
    """The authors' format 3.1 (github.com/one-covenant/grail, `sparse_codec.py`), where level is 1.

    Per tensor: gaps between the changed weights' rows, as bytes; gaps between columns within a row (the first
    of a row is the column itself), as 16 bits; values. All tensors together in one zstd frame.
    """
    parts = []
    for where, values, width in _changed(old, new, shapes):
        rows, columns = np.divmod(where, width)
        row_gaps = np.diff(rows, prepend=0)
        fresh = np.concatenate([[True], row_gaps[1:] != 0])
        column_gaps = np.where(fresh, columns, np.diff(columns, prepend=0))
        parts += [_smallest(row_gaps, np.uint8), _smallest(column_gaps, np.uint16), values.tobytes()]
    return _zstd(b"".join(parts), level)


def grail_flat(old: Bits, new: Bits, shapes: Shapes, *, level: int) -> int:
    """The authors' format 2: per tensor the gaps between flat indices as int32, then the values."""
    parts = []
    for where, values, _ in _changed(old, new, shapes):
        parts += [np.diff(where, prepend=0).astype(np.int32).tobytes(), values.tobytes()]
    return _zstd(b"".join(parts), level)


def xor(old: Bits, new: Bits, shapes: Shapes, *, level: int) -> int:
    """All weights, old XOR new, through zstd: slime, SkyRL, stitch."""
    return _zstd((old ^ new).tobytes(), level)


def index_and_value(old: Bits, new: Bits, shapes: Shapes) -> int:
    """int32 and BF16: vLLM's sparse patches, verl."""
    return 6 * int((old != new).sum())


FORMATS: dict[str, Callable[[Bits, Bits, Shapes], int]] = {
    "int32 + BF16": index_and_value,
    "XOR, zstd-1": lambda *x: xor(*x, level=1),
    "XOR, zstd-9": lambda *x: xor(*x, level=9),
    "grail v2, zstd-1": lambda *x: grail_flat(*x, level=1),
    "grail v3.1, zstd-1": lambda *x: grail(*x, level=1),
    "grail v3.1, zstd-9": lambda *x: grail(*x, level=9),
}


def usable_formats() -> dict[str, Callable[[Bits, Bits, Shapes], int]]:
    """Those that this machine can write: most of them need `zstandard`."""
    if importlib.util.find_spec("zstandard"):
        return FORMATS
    return {name: size for name, size in FORMATS.items() if "zstd" not in name}


def _changed(old: Bits, new: Bits, shapes: Shapes) -> Tensors:
    """Of each tensor that changed: flat indices, new values, columns per row."""
    first = 0
    for shape in shapes:
        size = int(np.prod(shape))
        part = slice(first, first + size)
        where = np.flatnonzero(old[part] != new[part])
        if where.size:
            yield where, new[part][where], shape[-1] if len(shape) > 1 else 1
        first += size


def _smallest(gaps: NDArray[np.int64], least: type[np.unsignedinteger]) -> bytes:
    for dtype in (least, np.uint16, np.int32):
        if gaps.max() <= np.iinfo(dtype).max:
            return gaps.astype(dtype).tobytes()
    raise ValueError(f"a gap of {gaps.max()} does not fit 32 bits")


def _zstd(data: bytes, level: int) -> int:
    import zstandard  # pyright: ignore[reportMissingImports]

    return len(zstandard.ZstdCompressor(level=level).compress(data))
