"""Triton's kernels as ops launch them, compiled for GPUs that need not be here.

The launches are recorded: an op runs on CPU tensors, and instead of starting a kernel its arguments are
kept. So what is compiled is what a GPU would run, with the same constants and the same promises of alignment.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import loco.kernels.triton  # noqa: F401  # of which the tiles are one module

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TILES = sys.modules["loco.kernels.triton.tiles"]


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: Any) -> Any:
        return dict(self.constants)[name] if isinstance(name, str) else tuple.__getitem__(self, name)


def record(op: Callable[[], Any]) -> list[Launch]:
    """What an op launches. No kernel runs: what it would have written, and the op reads, is zeros."""
    launches: list[Launch] = []

    def keep(kernel: Any, programs: int, *args: Any) -> None:
        assert programs > 0
        constants = [(p.name, a) for p, a in zip(kernel.params, args, strict=True) if p.is_constexpr]
        launches.append(Launch(kernel, args, tuple(constants)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TILES, "launch", keep)
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        op()
    return launches


def compile_launch(launch: Launch, target: str) -> Any:
    """As Triton's launcher would: what it promises the compiler of each argument depends on the argument."""
    kernel, args, _ = launch
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    promises: dict[tuple[int], list[list[Any]]] = {}
    types = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"}
    types |= {torch.uint8: "*u8", torch.int16: "*i16"}
    for i, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
        if param.is_constexpr or arg is None:
            signature[param.name] = "constexpr"
            constants[(i,)] = arg
        elif isinstance(arg, torch.Tensor):
            signature[param.name] = types[arg.dtype]
            if arg.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment:
                promises[(i,)] = [["tt.divisibility", 16]]
        else:
            assert param.do_not_specialize  # a number must not make a variant of its own
            signature[param.name] = "fp32" if isinstance(arg, float) else "i32"
    source = ASTSource(kernel, signature, constants, promises)
    options = {"num_warps": TILES.WARPS, "enable_fp_fusion": False}
    return triton.compile(source, target=TARGETS[target], options=options)


def sass(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assert_numbers_are_widened(ttir: str) -> None:
    """The program's number, times what a program covers, passes 2^31: it is widened before anything else."""
    numbers = set(re.findall(r"(%\S+) = tt\.get_program_id", ttir))
    assert numbers
    for number in numbers:
        uses = [line for line in ttir.splitlines() if re.search(rf"{re.escape(number)}\b(?! =)", line)]
        assert uses
        assert all(re.search(r"arith\.extsi .* : i32 to i64", use) for use in uses)
