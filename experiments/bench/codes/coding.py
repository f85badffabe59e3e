"""Entries to bodies of frames and back, frame by frame, as an exchange does it between its messages."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loco.kernels import Entries, Known
from loco.wire.codecs import Codec
from loco.wire.framing import Frames


class Body(NamedTuple):
    codec: Codec  # that was used: entries that are not for the one asked for go by another
    raw: Tensor
    entries: int


def spans(numel: int) -> list[slice]:
    """The elements of every frame."""
    frames = Frames.of(numel)
    return [frames.span(slice(0, numel), number) for number in range(frames.count)]


def encode(codec: Codec, known: Known, entries: Entries) -> Iterator[Body]:
    for at in spans(known.numel):
        part, some = known.part(at), entries.cut(at)
        used = codec
        while (body := used.encode(some, part)) is None:
            assert used.fallback is not None
            used = used.fallback
        yield Body(used, body, some.values.numel())


def decode(bodies: Sequence[Body], known: Known) -> Iterator[Entries]:
    for at, body in zip(spans(known.numel), bodies, strict=True):
        yield body.codec.decode(body.raw, body.entries, known.part(at))


def checked(codec: Codec, known: Known, entries: Entries) -> list[Body]:
    """The bodies, which have come back as the same entries; or the end."""
    bodies = list(encode(codec, known, entries))
    back = Entries.join(list(decode(bodies, known)))
    for sent, got in zip(entries, back, strict=True):
        assert sent is not None
        assert got is not None
        if sent.shape != got.shape or not torch.equal(sent.view(torch.uint8), got.view(torch.uint8)):
            sys.exit(f"what the {codec.name} code brings back is not what was sent: nothing was measured")
    return bodies


def plain_sizes(sites: Sequence[Entries]) -> dict[str, int]:
    """All sites' bytes by codes that know nothing of θ: what the tight code is measured against."""
    counts = [site.values.numel() for site in sites]
    squeezed = 0
    for site in sites:
        planes = site.values.numpy().view(np.uint8).reshape(-1, 4).T
        parts = [gap_bytes(site.indices().numpy()), *planes]
        squeezed += sum(len(zlib.compress(part.tobytes(), 1)) for part in parts)
    return {
        "int64 + FP32, padded": 12 * max(counts) * len(sites),
        "gap bytes, byte planes, zlib-1": squeezed,
    }


def gap_bytes(where: np.ndarray) -> np.ndarray:
    """How many elements lie between two entries: 255 as often as that goes, and the rest. -> uint8"""
    gaps = np.diff(where, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1)
    raw = np.full(ends[-1] if len(ends) else 0, 255, dtype=np.uint8)
    raw[ends - 1] = gaps % 255
    return raw
