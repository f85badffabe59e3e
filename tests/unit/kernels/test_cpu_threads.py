"""The C home cuts its work among threads: however many there are, the results are the same."""

from collections.abc import Iterator

import pytest
import torch
from selection import ALL_VALUES

from loco.kernels import Gate, OuterStep, cpu, reference

NUMEL = 40 * 64 * 256 + 1003  # work for 41 threads: fewer are not worth starting


@pytest.fixture(autouse=True)
def threads_again() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.check(ALL_VALUES, sample=r"1\.0-(1|3)")
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("gain", [0.1, 1.0, 1e6])
def test_any_number_of_threads_gives_the_same_bits(threads: int, gain: float) -> None:
    try:
        home = cpu.best()
    except cpu.BuildError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    anchor = 0.02 * torch.randn(NUMEL)
    flat = anchor - 3e-6 * torch.randn(NUMEL)
    flat[100_000::200_000] = float("inf") if gain == 0.1 else 0.0
    pieces = list(flat.split([NUMEL // 3, 1, NUMEL - NUMEL // 3 - 1]))
    residual = 3e-6 * torch.randn(NUMEL)
    gate, outer = Gate(gain=gain), OuterStep(divisor=3, lr=0.7, momentum=0.9, nesterov=True)
    torch.set_num_threads(threads)
    mine = home.encode(anchor, pieces, residual, gate)
    theirs = reference.encode(anchor, pieces, residual, gate)
    assert mine[1:] == theirs[1:]
    assert (mine.first_nonfinite == 100_000) == (gain == 0.1)
    for a, b in zip(mine.entries, theirs.entries, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    results = []
    for ops in (home, reference):
        theta, m, e = anchor.clone(), residual.clone(), residual.clone()
        w = [p.clone() for p in pieces]
        norm = ops.apply(theta, m, w, e, mine.entries, [mine.entries] * 3, outer)
        results.append((norm, theta, m, e, *w))
    (norm, *tensors), (expected, *others) = results
    assert norm == pytest.approx(expected, nan_ok=True)  # the threads' sums are added in another order
    for a, b in zip(tensors, others, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert home.digest(anchor) == reference.digest(anchor)


@pytest.mark.parametrize("build", cpu.builds_for_this_cpu())
@pytest.mark.parametrize("cut", [0, 1003])
def test_a_dense_round_of_a_vector_that_no_cache_keeps(build: str, cut: int) -> None:
    """Stored past the caches where addresses allow it: pieces that begin anywhere, and a last block that is
    not whole."""
    try:
        home = cpu.Compiled(cpu.BUILDS[build])
    except cpu.BuildError as error:
        pytest.skip(str(error))
    torch.set_num_threads(3)
    numel = (1 << 20) + 1003
    anchor, m = 0.02 * torch.randn(numel), 1e-5 * torch.randn(numel)
    flat = anchor - 3e-6 * torch.randn(numel)
    pieces = [flat] if not cut else [flat[:cut], flat[cut : 2 * cut].bfloat16(), flat[2 * cut :]]
    outer = OuterStep(divisor=2, lr=0.7, momentum=0.9, nesterov=True)
    found = []
    for ops in (home, reference):
        own = ops.encode(anchor, pieces, None, None)
        theta, momentum, w = anchor.clone(), m.clone(), [piece.clone() for piece in pieces]
        ops.apply(theta, momentum, w, None, own.entries, [own.entries], outer)
        written = [piece.clone() for piece in pieces]
        ops.write_weights(theta, written)
        found.append([own.entries.values, theta, momentum, *w, *written])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
