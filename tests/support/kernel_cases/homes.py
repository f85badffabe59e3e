"""Every home of the ops, for tests that ask all of them the same questions.

A home is a module with `encode`, `apply`, `write_weights` and `digest`. The Triton package is here twice:
its kernels become interpreted or compiled ones when they are defined, and tests want both.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

import loco.kernels
import loco.kernels.triton
from loco.kernels import Changes, Encoded, Entries, Streamed, cpu, reference
from loco.kernels.types import Ranked

OPS = ("encode", "apply", "write_weights", "digest")
PATCH_OPS = ("find_changes", "swap_bits", "digest_bits", "rank_changes", "place_ranked")


def interpreted_package() -> ModuleType:
    """A second copy of the Triton package, whose kernels the interpreter runs on CPU tensors."""
    name = "loco.kernels.interpreted"
    if name not in sys.modules:
        folder = Path(loco.kernels.__file__).parent / "triton"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with mock.patch.dict("os.environ", TRITON_INTERPRET="1"):
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@contextmanager
def interpreting() -> Iterator[None]:
    """What the interpreter lacks when Triton itself was imported to compile.

    Reductions are then kernels too, which can only be called from compiled ones. And numpy warns where
    the hardware does not: of infinities and NaNs, which are tested on purpose.
    """

    def reduction(combine: str) -> Callable[..., Any]:
        function = getattr(tl.standard, combine)
        return lambda input, axis=None: tl.reduce(input, axis, function)

    def cumsum(input: tl.tensor, axis: int = 0) -> tl.tensor:
        return tl.associative_scan(input, axis, tl.standard._sum_combine)

    with (
        mock.patch.object(tl, "sum", reduction("_sum_combine")),
        mock.patch.object(tl, "min", reduction("_elementwise_min")),
        mock.patch.object(tl, "max", reduction("_elementwise_max")),
        mock.patch.object(tl, "cumsum", cumsum),
        np.errstate(all="ignore"),
    ):
        yield


def interpreted(ops: Sequence[str] = OPS) -> SimpleNamespace:
    package = interpreted_package()

    def op(name: str) -> Callable[..., Any]:
        function = getattr(package, name)

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            with interpreting():
                return function(*args)

        return run

    return SimpleNamespace(**{name: op(name) for name in ops})


def on_the_gpu(ops: Sequence[str] = OPS) -> SimpleNamespace:
    """The Triton package on the GPU, for tensors that lie on the CPU: they go there and come back."""
    return elsewhere(loco.kernels.triton, "cuda", ops)


def elsewhere(home: Any, device: str, ops: Sequence[str] = OPS) -> SimpleNamespace:
    """A home whose tensors lie on a device of its own."""

    def op(name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            there = Moving(device)
            moved = [there(x) for x in args]
            result = getattr(home, name)(*moved)
            if name in ("apply", "write_weights", "swap_bits"):
                for x, y in there.tensors:
                    x.copy_(y)
            return Moving("cpu")(result)

        return run

    return SimpleNamespace(**{name: op(name) for name in ops})


class Moving:
    """Copies to a device: of tensors by whole storages, and of one object one copy.

    So views keep their offsets, since whether an address is aligned is part of a test.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.storages: dict[int, Tensor] = {}
        self.entries: dict[int, Entries] = {}
        self.tensors: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Entries):
            if id(x) not in self.entries:
                self.entries[id(x)] = Entries(*map(self, x))
            return self.entries[id(x)]
        if isinstance(x, Encoded):
            return x._replace(entries=self(x.entries))
        if isinstance(x, Changes | Ranked):
            return type(x)(*map(self, x))
        if isinstance(x, list):
            return [self(y) for y in x]
        return self.tensor(x) if isinstance(x, Tensor) else x

    def tensor(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.storages:
            bytes_of = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)  # pyright: ignore[reportCallIssue,reportArgumentType]
            self.storages[storage.data_ptr()] = bytes_of.to(self.device, copy=True)
        moved = self.storages[storage.data_ptr()].view(x.dtype)
        moved = moved.as_strided(x.size(), x.stride(), x.storage_offset())
        self.tensors.append((x, moved))
        return moved


@functools.cache
def builds() -> list[Any]:
    """Each build of the C home that runs here. Not to be changed: all get this list."""
    try:
        return [
            pytest.param(cpu.Compiled(cpu.BUILDS[name]), id=f"c-{name}") for name in cpu.builds_for_this_cpu()
        ]
    except cpu.BuildError as error:
        return [pytest.param(None, id="c", marks=pytest.mark.skip(reason=str(error)))]


def compiled() -> list[Any]:
    """The C home, and its best build with the parameters streamed to it."""
    homes = builds()
    return homes if homes[0].marks else [*homes, pytest.param(Streamed(cpu.best()), id="c-streamed")]


HOMES = [
    pytest.param(reference, id="reference"),
    *compiled(),
    pytest.param(interpreted(), id="triton-interpreted"),
    pytest.param(on_the_gpu(), id="triton-gpu", marks=pytest.mark.gpu),
]


def use_tiles_of(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones bring a test's edges near, large ones cost the interpreter less."""
    for package in ("loco.kernels.interpreted", "loco.kernels.triton"):
        monkeypatch.setattr(sys.modules[f"{package}.tiles"], "TILE", elements)


def same_bits(got: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    """Of all tensors, such as those of Entries."""
    for a, b in zip(got, expected, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
