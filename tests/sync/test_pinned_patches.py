"""Patches have pinned bytes; a reader of docs/sync-format.md alone refuses what the library refuses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import independent_store
import numpy as np
import pytest
import torch
from independent_patch_decoder import decode_anchor, decode_patch
from patch_cases import of_bits, trained
from selection import ALL_VALUES
from torch import Tensor

from loco import kernels
from loco.errors import AuthenticationError
from loco.kernels import FORMATS, MalformedError, reference_patch
from loco.sync import DamagedError, Publisher
from loco.sync.versions.anchors import pack_anchor, unpack_anchor
from loco.sync.versions.manifest import Manifest

KEY = b"sixteen bytes or more"


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = [pytest.param(dtype, id=names(dtype)) for dtype in FORMATS]


def numbers_of(tensor: Tensor) -> list[int]:
    return reference_patch.unsigned(reference_patch.bits_of(tensor)).tolist()


class Golden(NamedTuple):
    dtype: torch.dtype
    n: int
    one_in: int  # of how many weights one changes
    near: bool  # by few ulps, or to any bits
    patch: str

    def weights(self) -> tuple[list[int], list[int]]:
        """From a generator that no version of anything changes."""
        width, mantissa = FORMATS[self.dtype].width, FORMATS[self.dtype].mantissa
        old, new, x = [], [], self.n
        for _ in range(self.n):
            x = (x * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            bits = (x >> 20) % (1 << 8 * width)
            if self.near:  # of six exponents
                bits = (
                    bits % (1 << mantissa) | (4 + (x >> 50) % 6) << mantissa | (x >> 60) % 2 << 8 * width - 1
                )
            old.append(bits)
            other = bits ^ (1 + (x >> 40) % 3) if self.near else (x >> 30) % (1 << 8 * width)
            new.append(bits if (x >> 53) % self.one_in else other)
        return old, new


GOLDEN = {
    "few": Golden(
        *(torch.bfloat16, 400, 20, True),
        "220000000000000000040302020200000000000000d03307a4f3f85f2156d6d13680e0f296db",
    ),
    "any": Golden(
        *(torch.float32, 60, 2, False),
        "c60000007c0b010100000000000000000001000010500000001e1d1b4254a02a23502987effe76d075addd7dbc"
        "3ea4d2516761cb2ab32a5f4e9be94b749d4c58f8fe2ca7fd3f3dbbf7e54df794db104bcf33e8784479b76084e0"
        "004176f1cfa0ad6000008534c97f112a81a8003035fa02d3e9cbc5850cb1b9243e2a308c7c33b5af9c651d025d"
        "2ef24cd59a0879901a7ca2766435a2a447a0ef3fcf4a43bb678956d9061832f28c71634324edb99eb0247c316f"
        "70f5fc6ef2863fd99053e5070455a78a94a54f9526d8",
    ),
    "all": Golden(
        *(torch.float16, 80, 1, True),
        "2e00000000000000000a0e0b0f0f0f000000000000df2ebcfc2d6a8320b28acad0670550666d8a9fb80c1be899"
        "696a5c1b86",
    ),
    "bytes": Golden(
        *(torch.uint8, 100, 4, False),
        "33000000000400010102020004020001000100000151f38655e1b13b621a0fe4773e67d82d352268a8df2b7961"
        "ca2fffd19ca70e9114c4",
    ),
}


def as_tensors(golden: Golden) -> tuple[Tensor, Tensor]:
    old, new = (of_bits(np.array(bits), golden.dtype) for bits in golden.weights())
    return old, new


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_patches(name: str) -> None:
    golden = GOLDEN[name]
    old, new = as_tensors(golden)
    for home in (kernels, reference_patch):
        assert home.pack_patch([old], home.find_changes([old], [new])).numpy().tobytes().hex() == golden.patch
    read = decode_patch(bytes.fromhex(golden.patch), numbers_of(old), names(golden.dtype))
    assert read == [(i, b) for i, (a, b) in enumerate(zip(*golden.weights(), strict=True)) if a != b]


@pytest.mark.check(ALL_VALUES)
def test_the_mean_of_the_gaps_is_bounded() -> None:
    """One change among zeros, a part away, before those of the largest classes."""
    old = torch.zeros(kernels.PART, dtype=torch.bfloat16)
    old[:2000] = trained(2000, torch.bfloat16, np.random.default_rng(5))
    changes = kernels.Changes(
        torch.tensor([5, 700, 1999, kernels.PART - 1]), torch.zeros(4, dtype=torch.int16)
    )
    changes.bits.copy_(reference_patch.bits_of(old)[changes.positions] + 1)
    body = kernels.pack_patch([old], changes).numpy().tobytes()
    assert decode_patch(body, numbers_of(old), "bfloat16") == read_patch(old, body)


# ---- refusals ----


def agree(theirs: Callable[[], Any], mine: Callable[[], Any]) -> bool:
    """-> whether both read it, and then the same; else both refuse"""
    try:
        expected = theirs()
    except MalformedError:
        with pytest.raises(ValueError, match=", got "):
            mine()
        return False
    assert mine() == expected
    return True


def read_patch(old: Tensor, body: bytes) -> list[tuple[int, int]]:
    """By the library."""
    changes = kernels.unpack_patch([old], torch.tensor(list(body), dtype=torch.uint8))
    bits = reference_patch.unsigned(changes.bits).tolist()
    return list(zip(changes.positions.tolist(), bits, strict=True))


def damages(whole: bytes, draw: np.random.Generator, count: int) -> list[bytes]:
    """Turned bits, bytes, and every length."""
    found = [whole[:size] for size in range(len(whole))] + [whole + b"\0"]
    for _ in range(count):
        raw = bytearray(whole)
        at = int(draw.integers(len(raw)))
        raw[at] = int(draw.integers(256)) if draw.random() < 0.5 else raw[at] ^ 1 << int(draw.integers(8))
        found.append(bytes(raw))
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_both_decoders_refuse_the_same_patches(name: str) -> None:
    golden = GOLDEN[name]
    (old, _), format = as_tensors(golden), names(golden.dtype)
    bits, read = numbers_of(old), 0
    for body in damages(bytes.fromhex(golden.patch)[4:], np.random.default_rng(0), 80):
        whole = len(body).to_bytes(4, "little") + body  # sizes that add up let damage go deep
        read += agree(partial(read_patch, old, whole), partial(decode_patch, whole, bits, format))
    assert read


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_decoders_refuse_the_same_anchors(dtype: torch.dtype) -> None:
    n, format = 300, names(dtype)
    vector = trained(n, dtype, np.random.default_rng(3))
    whole = b"".join(pack_anchor(vector))
    assert decode_anchor(whole, n, format) == numbers_of(vector)

    def theirs(body: bytes) -> list[int]:
        return numbers_of(torch.cat(list(unpack_anchor(memoryview(body), n, dtype))))

    read = 0
    for body in damages(whole, np.random.default_rng(4), 200):
        read += agree(partial(theirs, body), partial(decode_anchor, body, n, format))
    assert read  # a plain byte is as good as another


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "key"])
def test_both_readers_refuse_a_manifest_that_is_damaged(tmp_path: Path, key: bytes | None) -> None:
    with Publisher({"w": torch.zeros(5)}, tmp_path, key=key) as publisher:
        publisher.publish()
    (path,) = (tmp_path / "versions").iterdir()
    whole, name = path.read_bytes(), f"versions/{path.name}"
    assert independent_store.read_manifest(whole, key)["digest"] == Manifest.load(whole, name, key).digest
    for bit in range(0, 8 * len(whole), 3):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=", got "):
            independent_store.read_manifest(bytes(raw), key)
        with pytest.raises((DamagedError, AuthenticationError)):
            Manifest.load(bytes(raw), name, key)
