"""Outer state in host memory: the same bits, and the parameters only pass through in chunks."""

from typing import Any

import pytest
import torch
from sites import run_ranks
from states import assert_same, small_model, snapshot, train

import loco
from loco import kernels
from loco.kernels import Streamed


def rounds(rank: int, kind: str, mode: str) -> Any:
    """Three rounds of two sites; `streamed` treats the model as if it were on another device."""
    model = small_model()
    if mode == "cuda, offloaded" or mode == "cuda":
        model.cuda()
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        if mode == "streamed":
            home = Streamed(kernels.home("cpu"))
            patch.setattr(kernels, "_home_of", lambda *_: calls.append(1) or home)
        optimizer = getattr(loco, kind)(
            torch.optim.SGD(model.parameters(), lr=0.01), sync_every=2, offload=mode != "cuda"
        )
        train(model, optimizer, rank, range(6))
        assert bool(calls) == (mode == "streamed")
    assert optimizer.outer_state.anchor.device.type == ("cuda" if mode == "cuda" else "cpu")
    assert optimizer.last_report.residual_norm > 0 or kind == "DiLoCo"
    return snapshot(optimizer), optimizer.last_report.entries


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_streaming_the_parameters_changes_no_bit(kind: str) -> None:
    for here, streamed in zip(
        run_ranks(2, rounds, kind, "here"), run_ranks(2, rounds, kind, "streamed"), strict=True
    ):
        assert_same(here[0], streamed[0])
        assert here[1] == streamed[1] > 0


def test_a_chunk_is_whole_blocks_and_under_way_before_the_last_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loco.kernels import streamed

    monkeypatch.setattr(streamed, "CHUNK", 512)
    weights = [torch.arange(float(n)) for n in (700, 1, 0, 5, 1300)]
    made: list[slice] = []
    chunk = streamed._Chunk

    def note(at: slice, *arguments: Any, read: bool) -> Any:
        made.append(at)
        return chunk(at, *arguments, read=read)

    monkeypatch.setattr(streamed, "_Chunk", note)
    values: list[torch.Tensor] = []
    for part in Streamed(kernels.home("cpu"))._chunks(weights, read=True):
        assert part.at.start % 256 == 0
        assert len(made) == min(len(values) + 2, 8)
        values.append(torch.cat(part.arrived()))
    # 2006 parameters in at least 64 chunks would be 32 a chunk: a block is the least.
    assert [at.stop - at.start for at in made] == [256] * 7 + [2006 - 7 * 256]
    assert torch.equal(torch.cat(values), torch.cat(weights))


@pytest.mark.gpu
def test_a_model_on_a_gpu_with_its_outer_state_in_host_memory() -> None:
    (here,), (offloaded,) = (
        run_ranks(1, rounds, "PulseLoCo", "cuda"),
        run_ranks(1, rounds, "PulseLoCo", "cuda, offloaded"),
    )
    assert_same(here[0], offloaded[0])


@pytest.mark.gpu
def test_slots_are_not_taken_again_too_early() -> None:
    """Hundreds of chunks of mixed dtypes, behind a GPU that is busy, so that its copies come late."""
    generator = torch.Generator().manual_seed(0)
    numel = 1 << 24
    anchor = 0.02 * torch.randn(numel, generator=generator)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    pieces = (anchor - 3e-6 * torch.randn(numel, generator=generator)).split(99_991)
    residual = 3e-6 * torch.randn(numel, generator=generator)
    outer = kernels.OuterStep(divisor=1, lr=0.7, momentum=0.9, nesterov=True)
    home = kernels.home("cpu")
    results = []
    for device in ("cpu", "cuda"):
        w = [p.to(device, dtypes[i % 3], copy=True) for i, p in enumerate(pieces)]
        theta, m, e = (t.clone().pin_memory() for t in (anchor, residual, residual))
        ops = home if device == "cpu" else Streamed(home)
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(3):
            for _ in range(20):
                busy = busy @ busy
            own = ops.encode(theta, w, e, kernels.Gate()).entries
            ops.apply(theta, m, w, e, own, [own], outer)
            for p in w:
                p.mul_(1 + 2**-7)
        results.append([theta, m, e, *(p.cpu() for p in w)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
