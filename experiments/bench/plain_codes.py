"""How entries could be sent without knowing anything of θ: what the tight code is measured against.

Sizes only, in bytes, for the entries of all sites.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from loco.kernels import Entries


def _compressor() -> tuple[str, Callable[[bytes], bytes]]:
    """zstd at level 1 where Python has it, from 3.14 on or by a package; else its own zlib at level 1."""
    for module in ("compression.zstd", "zstandard"):
        try:
            return "zstd-1", partial(_second_is_level, importlib.import_module(module).compress)
        except ImportError:
            pass
    return "zlib-1", partial(_second_is_level, zlib.compress)


def _second_is_level(function: Callable[[bytes, int], bytes], raw: bytes) -> bytes:
    return function(raw, 1)


NAME, compress = _compressor()


def sizes(sites: Sequence[Entries]) -> dict[str, int]:
    """All sites' bytes, by code."""
    counts = [site.values.numel() for site in sites]
    gaps = [gap_bytes(site.indices().numpy()) for site in sites]
    planes = [site.values.numpy().view(np.uint8).reshape(-1, 4).T for site in sites]
    gap_size = sum(len(gap) for gap in gaps)
    squeezed = sum(len(compress(gap.tobytes())) for gap in gaps)
    squeezed += sum(len(compress(plane.tobytes())) for of_site in planes for plane in of_site)
    return {
        "int64 + FP32, padded": 12 * max(counts) * len(sites),
        "int32 + FP32": 8 * sum(counts),
        "gap byte + FP32": gap_size + 4 * sum(counts),
        f"gap bytes, byte planes, {NAME}": squeezed,
    }


def gap_bytes(where: np.ndarray) -> np.ndarray:
    """How many elements lie between two entries: 255 as often as that goes, and the rest. -> uint8"""
    gaps = np.diff(where, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1)
    raw = np.full(ends[-1] if len(ends) else 0, 255, dtype=np.uint8)
    raw[ends - 1] = gaps % 255
    return raw
