"""How long this machine works on a round, found by doing the same work on fewer elements."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loco import kernels
from loco.kernels import Entries, Gate, Known, OuterStep
from loco.kernels.recycle import Recycler

from ...wire.codecs import FAST, TIGHT, WHOLE, Codec
from ...wire.framing import Framing
from ...wire.records import Kind
from .methods import Method

_LEAST, _MOST = 1 << 17, 1 << 22  # elements
_ENOUGH = 0.5  # seconds: with plain torch a few elements take as long
_REPEATS = 4  # the first one maps memory that the next ones, and a round, have already
_SIGMA = 0.02  # of the weights


@dataclass(kw_only=True)
class CodecWork:
    """Seconds for each element of the vector, of one site's entries.

    seal: into frames. open: of frames. add: to another site's.
    """

    seal: float
    open: float
    add: float


@dataclass(kw_only=True)
class Work:
    """Seconds for each element. `codecs`: those that a round may use here, by name."""

    encode: float
    apply: float
    codecs: dict[str, CodecWork] = field(default_factory=dict)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Work":
        """What another rank has told."""
        codecs = {name: CodecWork(**one) for name, one in told["codecs"].items()}
        return cls(encode=told["encode"], apply=told["apply"], codecs=codecs)


def slowest(each: Sequence[Work]) -> Work:
    """A round waits for the slowest rank, in each part. Its code is one that all of them may choose."""
    names = [name for name in each[0].codecs if all(name in one.codecs for one in each)]
    return Work(
        encode=max(one.encode for one in each),
        apply=max(one.apply for one in each),
        codecs={
            name: CodecWork(
                seal=max(one.codecs[name].seal for one in each),
                open=max(one.codecs[name].open for one in each),
                add=max(one.codecs[name].add for one in each),
            )
            for name in names
        },
    )


def measure_work(method: Method, device: torch.device) -> Work:
    """On noise of the method's density. It takes a tenth of a second with compiled kernels."""
    numel = _LEAST
    while True:
        began = time.perf_counter()
        with Recycler().used():
            work = _measure(method, device, numel)
        if time.perf_counter() - began > _ENOUGH or numel >= _MOST:
            return work
        numel *= 4


def _measure(method: Method, device: torch.device, numel: int) -> Work:
    chance = torch.Generator().manual_seed(0)
    anchor = (torch.randn(numel, generator=chance) * _SIGMA).bfloat16().float()
    # Of so many entries the weight has moved by some ulps, which every gate sees, and of no others.
    moved = torch.rand(numel, generator=chance) < method.density
    moves = torch.randn(numel, generator=chance).abs_().add_(2).mul_(anchor.abs()).mul_(2.0**-7)
    weights = [torch.where(moved, anchor - moves, anchor).to(device)]
    anchor = anchor.to(device)
    momentum = torch.zeros_like(anchor) if method.settings.get("outer_momentum", 0.9) else None
    residual = None if method.gate is None else torch.zeros_like(anchor)
    outer = OuterStep(divisor=2, lr=0.0, momentum=0.9 if momentum is not None else 0.0, nesterov=True)

    encoded = kernels.encode(anchor, weights, residual, method.gate)
    encode = _seconds(lambda: kernels.encode(anchor, weights, residual, method.gate))
    own = encoded.entries
    apply = _seconds(lambda: kernels.apply(anchor, momentum, weights, residual, own, [own], outer))
    work = Work(encode=encode / numel, apply=apply / numel)
    for codec in _codecs_of(method):
        framing = Framing(0, codec, Known(anchor, momentum, method.gate or Gate()), round=1, digest=0)
        work.codecs[codec.name] = _codec_work(framing, own, numel)
    return work


def _codec_work(framing: Framing, own: Entries, numel: int) -> CodecWork:
    at = slice(0, numel)
    frame = framing.seal(own, at, 0, Kind.ENTRIES)
    return CodecWork(
        seal=_seconds(lambda: framing.seal(own, at, 0, Kind.ENTRIES)) / numel,
        open=_seconds(lambda: framing.open(frame.header, frame.body, at)) / numel,
        add=_seconds(lambda: kernels.add_up([own, own], numel)) / 2 / numel,
    )


def _codecs_of(method: Method) -> list[Codec]:
    """Those that `wire="auto"` may choose here."""
    if method.gate is None:
        return [WHOLE]
    return [codec for codec in (TIGHT, FAST) if codec.quick]


def _seconds(do: Callable[[], object]) -> float:
    """The least of a few times: what disturbs one makes it longer."""
    found: list[float] = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        do()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)
