"""Anchors: all weights of a vector, coded without loss in less than they take in memory.

An exponent of trained weights holds about 2.6 bits of information; sign and mantissa are nearly random. So
the bits of each element are rotated left by one, which puts the sign last, and the bytes are sorted into
planes: the first holds the exponents (of BF16; most of them of other formats). A plane is deflated by
Huffman's code alone if that makes it smaller. Parts of 2^20 elements are coded on their own, by as many
threads as torch uses.
"""

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from loco import kernels
from loco.kernels import PART, MalformedError
from loco.kernels.reserve import give_back

_SAMPLE = 1 << 16
RAW, DEFLATED = 0, 1
_PLANE_HEAD = 5  # bytes: how it is coded, and its size


def pack_anchor(vector: Tensor) -> Iterator[bytes]:
    """All elements of a 1-D tensor in host memory, in chunks: no more of them are in memory than are coded at
    once."""
    threads = torch.get_num_threads()
    parts = vector.split(PART) if vector.numel() else ()
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(parts), threads):
            yield from pool.map(_pack_part, parts[first : first + threads])
    give_back()


def anchor_bytes(vectors: Iterable[Tensor]) -> int:
    """What an anchor of these would take; it is coded for that."""
    return sum(len(chunk) for vector in vectors for chunk in pack_anchor(vector))


def _pack_part(part: Tensor) -> bytes:
    return b"".join(_pack_plane(plane) for plane in _planes(part))


def _planes(part: Tensor) -> Iterator[np.ndarray]:
    width = part.element_size()
    bits = part.view(kernels.FORMATS[part.dtype].bits).numpy().view(f"<u{width}")
    rotated = bits << 1 | bits >> 8 * width - 1
    for k in reversed(range(width)):
        yield (rotated >> 8 * k).astype(np.uint8)


def _pack_plane(plane: np.ndarray) -> bytes:
    raw = plane.tobytes()
    # Mantissas are noise, and deflating noise takes long: a sample tells.
    if len(_deflated(raw[:_SAMPLE])) < 0.97 * len(raw[:_SAMPLE]):
        coded = _deflated(raw)
        if len(coded) < len(raw):
            return bytes([DEFLATED]) + len(coded).to_bytes(4, "little") + coded
    return bytes([RAW]) + len(raw).to_bytes(4, "little") + raw


def _deflated(raw: bytes) -> bytes:
    coder = zlib.compressobj(level=1, wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(raw) + coder.flush()


def unpack_anchor(body: memoryview, numel: int, format: torch.dtype) -> Iterator[Tensor]:
    """The elements, part by part. `body` is untrusted: any bytes take no more memory than a part.

    Raises:
        MalformedError: this is no anchor of so many elements.
    """
    width, at = format.itemsize, 0
    for first in range(0, numel, PART):
        size = min(PART, numel - first)
        rotated = np.zeros(size, dtype=f"<u{width}")
        for _ in range(width):
            plane, at = _unpack_plane(body, at, size)
            rotated = (rotated << 8 if width > 1 else rotated) | plane
        bits = rotated >> 1 | rotated << 8 * width - 1
        yield torch.from_numpy(bits.astype(rotated.dtype).view(f"<i{width}")).view(format)
    if at != len(body):
        raise MalformedError("something is left over")


def _unpack_plane(body: memoryview, at: int, size: int) -> tuple[np.ndarray, int]:
    begin = at + _PLANE_HEAD
    end = begin + int.from_bytes(body[at + 1 : begin], "little")
    if len(body) < end or len(body) < begin:
        raise MalformedError("it ends too early")
    raw = body[begin:end]
    if body[at] == DEFLATED:
        decoder = zlib.decompressobj(wbits=-15)
        try:
            raw = decoder.decompress(raw, size + 1)
        except zlib.error as error:
            raise MalformedError(f"a plane can't be inflated ({error})") from error
        if not decoder.eof or decoder.unused_data:
            raise MalformedError("a plane does not end where it says")
    elif body[at] != RAW:
        raise MalformedError("a plane is coded in an unknown way")
    if len(raw) != size:
        raise MalformedError("a plane has another size than its part")
    return np.frombuffer(raw, dtype=np.uint8), end
