"""Which tensors are published and held: of any strides and dtypes, in parts, others than before."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published import blank, model, same_bits
from torch import Tensor

from loco import kernels
from loco.sync import (
    EngineSlice,
    LayoutError,
    NotThisVersionError,
    Publisher,
    Subscriber,
)


def test_views_of_fused_and_strided_memory_are_written_in_place(
    tmp_path: Path, generator: torch.Generator
) -> None:
    """As engines hold them: rows of a fused matrix, columns of one, a transposed one."""
    trained = {name: torch.randn(6, 10, generator=generator) * 0.02 for name in ("q", "k", "v", "o", "t")}
    rows, columns = torch.zeros(18, 10, dtype=torch.bfloat16), torch.zeros(6, 33, dtype=torch.bfloat16)
    turned = torch.zeros(10, 6, dtype=torch.bfloat16)
    engine = {"q": rows[:6], "k": rows[6:12], "v": rows[12:], "o": columns[:, 7:17], "t": turned.t()}
    publisher, subscriber = Publisher(trained, tmp_path), Subscriber(engine, tmp_path)
    for version in range(1, 4):
        publisher.publish()
        subscriber.update()
        same_bits(engine, {name: kernels.reference.cast(t, torch.bfloat16) for name, t in trained.items()})
        subscriber.verify()
        if version < 3:
            for tensor in trained.values():
                tensor.mul_(1 + 0.01 * torch.randn(tensor.shape, generator=generator))
    assert not columns[:, :7].any()
    assert not columns[:, 17:].any()
    torch.use_deterministic_algorithms(True)
    try:
        assert subscriber.rollback() == 2
    finally:
        torch.use_deterministic_algorithms(False)
    subscriber.verify()


def test_ranks_that_hold_parts_of_tensors_write_theirs(tmp_path: Path, generator: torch.Generator) -> None:
    """As under tensor parallelism: fused rows of some heads, columns of a matrix, tensors of other ranks."""
    trained = {name: torch.randn(8, 12, generator=generator) * 0.02 for name in ("q", "k", "o", "elsewhere")}
    fused = [torch.zeros(8, 12, dtype=torch.bfloat16) for _ in range(2)]
    columns = [torch.zeros(8, 6, dtype=torch.bfloat16) for _ in range(2)]
    every = slice(0, 12)
    ranks = [
        {
            "q": [EngineSlice((slice(4 * r, 4 * r + 4), every), fused[r][:4])],
            "k": [
                EngineSlice((slice(4 * r, 4 * r + 2), every), fused[r][4:6]),
                EngineSlice((slice(4 * r + 2, 4 * r + 4), every), fused[r][6:]),
            ],
            "o": [EngineSlice((slice(0, 8), slice(6 * r, 6 * r + 6)), columns[r])],
            "elsewhere": [],
        }
        for r in range(2)
    ]
    publishers = [Publisher(trained, tmp_path, stream=(k, 2)) for k in range(2)]
    subscribers = [Subscriber(rank, tmp_path) for rank in ranks]

    def arrived() -> None:
        cast = {name: kernels.reference.cast(tensor, torch.bfloat16) for name, tensor in trained.items()}
        for r in range(2):
            at = slice(4 * r, 4 * r + 4)
            same_bits({"f": fused[r]}, {"f": torch.cat([cast["q"][at], cast["k"][at]])})
            same_bits({"o": columns[r]}, {"o": cast["o"][:, 6 * r : 6 * r + 6].contiguous()})
            subscribers[r].verify()

    for version in range(1, 5):
        for publisher in publishers:
            publisher.publish(version)
        for subscriber in subscribers:
            if version != 3:
                assert subscriber.update().version == version
        if version != 3:
            arrived()
        if version < 4:
            for tensor in trained.values():
                tensor.mul_(1 + 0.01 * torch.randn(tensor.shape, generator=generator))
    assert subscribers[1].rollback() == 2
    subscribers[1].verify()
    subscribers[1].update()
    arrived()
    columns[0][3, 3] += 1
    with pytest.raises(NotThisVersionError, match="not version 4: o differ"):
        subscribers[0].verify()
    subscribers[0].update()
    arrived()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool]
)
def test_any_dtype_arrives(tmp_path: Path, generator: torch.Generator, dtype: torch.dtype) -> None:
    values = torch.randn(1003, generator=generator)
    trained = {
        "a": values.to(dtype),
        "b": torch.randn(63, generator=generator).half(),
        "empty": torch.empty(0, 3),
    }
    published_as = torch.float32 if dtype == torch.float32 else torch.bfloat16
    engine = {name: torch.zeros_like(t) for name, t in trained.items()}
    if dtype != torch.float32:
        engine["empty"] = torch.empty(0, 3, dtype=torch.bfloat16)
    publisher, subscriber = Publisher(trained, tmp_path, dtype=published_as), Subscriber(engine, tmp_path)
    for _ in range(3):
        publisher.publish()
        subscriber.update()
        same_bits(engine, {**trained, "empty": engine["empty"]})
        values = values + (torch.rand(1003, generator=generator) < 0.1)
        trained["a"].copy_(values.to(dtype))


def test_special_values_arrive_with_all_their_bits(tmp_path: Path) -> None:
    """NaNs with payloads, infinities, zeros of both signs, denormals."""
    odd = torch.tensor([0x7FC1, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x8001, 0x3F80]).to(
        torch.int16
    )
    trained, engine = {"a": odd.view(torch.bfloat16)}, {"a": torch.ones(10, dtype=torch.bfloat16)}
    publisher, subscriber = Publisher(trained, tmp_path), Subscriber(engine, tmp_path)
    for shift in range(10):
        trained["a"].view(torch.int16).copy_(odd.roll(shift))
        publisher.publish()
        subscriber.update()
        same_bits(engine, trained)


def test_names_that_come_and_go_are_a_new_anchor_and_said(
    tmp_path: Path, generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    trained = {"a": torch.randn(9, generator=generator), "b": torch.randn(5, generator=generator)}
    publisher = Publisher(trained, tmp_path)
    publisher.publish()
    trained["c"] = torch.randn(3, generator=generator)
    published = publisher.publish()
    assert "the tensors are others than before: no c; then c, [3] of bfloat16" in published.reason
    assert published.reason in caplog.text
    assert [r.levelno for r in caplog.records if "version 2" in r.message] == [logging.WARNING]
    engine = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in trained.items()}
    Subscriber(engine, tmp_path).update()
    same_bits(engine, {name: kernels.reference.cast(t, torch.bfloat16) for name, t in trained.items()})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda e: e.pop("up.bias"), r"up.bias is published, and there is no such tensor here"),
        (lambda e: e.update(extra=torch.ones(3)), r"extra is held here, and is not published"),
        (
            lambda e: e.update({"up.bias": torch.zeros(97)}),
            r"published is up.bias, \[97\] of bfloat16; here it is \[97\] of float32",
        ),
        (lambda e: e.update({"up.bias": torch.zeros(96).bfloat16()}), r"here it is \[96\] of bfloat16"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], told: str
) -> None:
    trained = model()
    Publisher(trained, tmp_path).publish()
    engine = blank(trained)
    change(engine)
    with pytest.raises(LayoutError, match=told):
        Subscriber(engine, tmp_path).update()
    same_bits(
        {n: t for n, t in engine.items() if n == "down.weight"},
        {"down.weight": blank(trained)["down.weight"]},
    )
