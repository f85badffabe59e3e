"""What the Triton kernels read and write for each parameter, and what an op takes beside it: counted."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from homes import interpreted, interpreting, use_tiles_of
from scratch import scratch_bytes
from selection import ALL_VALUES, GPU_TARGETS, MEMORY
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from loco.kernels import Entries, Gate, OuterStep

home = interpreted()
ENCODING = sys.modules["loco.kernels.interpreted.encoding"]
TILES = sys.modules["loco.kernels.interpreted.tiles"]
TILE = 1024
N = 64 * TILE
ENTRY = 5  # bytes


class Traffic(NamedTuple):
    loaded: float  # bytes per parameter
    stored: float


@contextmanager
def counted() -> Iterator[dict[str, Traffic]]:
    """Of each kernel: the distinct bytes that each program touches, as if it had a cache of its own."""
    traffic: dict[str, Traffic] = {}
    touched: dict[str, dict[Any, list[np.ndarray]]] = {"load": defaultdict(list), "store": defaultdict(list)}
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def note(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
        touched[kind][interpreter_builder.grid_idx, size].append(addresses.ravel())

    def counted_load(pointers: Any, mask: Any, *args: Any) -> Any:
        note("load", pointers, mask)
        return load(pointers, mask, *args)

    def counted_store(pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        note("store", pointers, mask)
        return store(pointers, value, mask, *args)

    def total(kind: str) -> float:
        sizes = ((size, np.unique(np.concatenate(a)).size) for (_, size), a in touched[kind].items())
        return sum(size * count for size, count in sizes) / N

    launch = TILES.launch

    def counted_launch(kernel: Any, *args: Any) -> None:
        for addresses in touched.values():
            addresses.clear()
        launch(kernel, *args)
        name = kernel.fn.__name__
        before = traffic.get(name, Traffic(0.0, 0.0))
        traffic[name] = Traffic(before.loaded + total("load"), before.stored + total("store"))

    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "create_masked_load", counted_load)
        patch.setattr(interpreter_builder, "create_masked_store", counted_store)
        patch.setattr(TILES, "launch", counted_launch)
        yield traffic


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector of a billion is sampled at one tile in 61; this one, of 64 tiles, at 2."""
    use_tiles_of(TILE, monkeypatch)
    monkeypatch.setattr(ENCODING, "SAMPLED", 2)
    monkeypatch.setattr(ENCODING, "STRIDE", 32)


def state(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(0)
    anchor, update, residual = (torch.from_numpy(rng.standard_normal(N).astype(np.float32)) for _ in range(3))
    anchor *= 0.02
    return anchor, (anchor - scale * update).to(dtype), scale * residual


@pytest.mark.check(GPU_TARGETS, sample=r"8e-08.*")
@pytest.mark.parametrize(
    ("scale", "low", "high"), [(8e-8, 0.004, 0.01), (1.8e-6, 0.05, 0.08), (3.3e-6, 0.1, 0.13)]
)
def test_an_encode_reads_the_state_once(scale: float, low: float, high: float) -> None:
    """θ, w and e: 12 bytes per parameter, and the tiles of the sample a second time.

    Beside them each tile has the row of its piece, and leaves its digest; each block has its number of
    entries.
    """
    anchor, weights, residual = state(scale, torch.float32)
    with counted() as traffic:
        entries = home.encode(anchor, [weights], residual, Gate()).entries
    density = entries.values.numel() / N
    assert low < density < high
    sampled = 2 / 64
    encode, place = traffic["encode_kernel"], traffic["place_kernel"]
    print(f"encode at {density:.1%}: {encode}, {place}")
    assert encode.loaded == pytest.approx((12 + 36 / TILE) * (1 + sampled), abs=0.01)
    assert encode.stored == pytest.approx(ENTRY * density + 16 / TILE + 8 / 256 * (1 + sampled), abs=0.01)
    assert place.loaded == pytest.approx(ENTRY * density + 16 / TILE, abs=0.01)
    assert place.stored == pytest.approx(ENTRY * density, abs=0.001)


@pytest.mark.check(ALL_VALUES)
def test_a_dense_encode_reads_once_and_writes_once() -> None:
    anchor, weights, _ = state(3e-6, torch.bfloat16)
    with counted() as traffic:
        home.encode(anchor, [weights], None, None)
    assert traffic["encode_kernel"].loaded == pytest.approx(4 + 2, abs=0.1)
    assert traffic["encode_kernel"].stored == pytest.approx(4, abs=0.05)


@pytest.mark.check(GPU_TARGETS)
@pytest.mark.parametrize("sites", [1, 4])
def test_an_apply_reads_and_writes_the_state_once(sites: int) -> None:
    """θ, m, e and w: 16 bytes read and 16 written per parameter, and each payload read once."""
    anchor, weights, residual = state(3e-6, torch.float32)
    own = home.encode(anchor, [weights], residual, Gate()).entries
    payload = ENTRY * own.values.numel() / N + 8 / 256
    outer = OuterStep(divisor=sites, lr=0.7, momentum=0.9, nesterov=True)
    with counted() as traffic:
        home.apply(anchor, torch.zeros(N), [weights], residual, own, [own] * sites, outer)
    print(f"apply, {sites} sites: {traffic['apply_kernel']}")
    # [own] * sites is one payload, and so one set of addresses.
    tables = 32 * (sites + 1) / TILE  # one row of addresses for each payload, one for the piece
    assert traffic["apply_kernel"].loaded == pytest.approx(16 + payload + tables, abs=0.05)
    assert traffic["apply_kernel"].stored == pytest.approx(16, abs=0.05)


@pytest.mark.check(ALL_VALUES)
def test_a_dense_apply_touches_nothing_it_need_not() -> None:
    anchor, weights, _ = state(3e-6, torch.bfloat16)
    mean = Entries.whole(torch.zeros(N))
    outer = OuterStep(divisor=1, lr=0.7, momentum=0.9, nesterov=True)
    with counted() as traffic:
        home.apply(anchor, torch.zeros(N), [weights], None, mean, [mean], outer)
    assert traffic["apply_kernel"].loaded == pytest.approx(4 + 4 + 4, abs=0.1)
    assert traffic["apply_kernel"].stored == pytest.approx(4 + 4 + 2, abs=0.05)


@pytest.mark.check(MEMORY)
@pytest.mark.parametrize("sampled", [16, 1024], ids=["sampled", "counted"])
@pytest.mark.parametrize("scale", [0.0, 3.3e-6])
def test_scratch_is_below_half_a_byte_per_parameter(
    scale: float, sampled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENCODING, "SAMPLED", sampled)
    use_tiles_of(2048, monkeypatch)
    anchor, weights, residual = state(scale, torch.float32)
    given = [anchor, weights, residual]

    def entries(encoded: Any) -> list[Tensor]:
        return [t for t in encoded.entries if t is not None]

    taken = scratch_bytes(lambda: home.encode(anchor, [weights], residual, Gate()), entries, given) / N
    print(f"encode's scratch: {taken:.3f} bytes per parameter")
    assert 0 < taken < 0.5
    own = home.encode(anchor, [weights], residual, Gate()).entries
    momentum = torch.zeros(N)
    outer = OuterStep(divisor=2, lr=0.7, momentum=0.9, nesterov=True)
    given += [momentum, own.starts, own.offsets, own.values]
    apply = lambda: home.apply(anchor, momentum, [weights], residual, own, [own, own], outer)  # noqa: E731
    taken = scratch_bytes(apply, lambda _: [], given) / N
    print(f"apply's scratch: {taken:.3f} bytes per parameter")
    assert 0 < taken < 0.1
