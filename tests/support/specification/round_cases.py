"""Rounds to compare with a specification: every option, and what goes with what."""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from scripted import flat, parameters

NUMEL, SEED = 1003, 7


@dataclass(frozen=True)
class Case:
    kind: str
    sync_every: int = 1
    saving: float | None = None  # and α is found; all others are as they are here
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    gate: str = "bf16"
    gate_gain: float = 1.0
    gate_margin: float = 0.0
    value_steps: int | None = None
    sums_margin: float | None = None
    bf16: bool = False


CASES = [
    Case(kind, sync_every=h, outer_momentum=mu, nesterov=nesterov, bf16=bf16)
    for kind, h, (mu, nesterov), bf16 in product(
        ("PulseLoCo", "DiLoCo"), (1, 3), ((0.9, True), (0.9, False), (0.0, True)), (False, True)
    )
]
CASES += [
    Case("PulseLoCo", gate_gain=7.0),
    Case("PulseLoCo", sync_every=2, outer_lr=1.0, outer_momentum=0.0),
    Case("PulseLoCo", gate="fp16"),
    Case("PulseLoCo", gate="fp8_e4m3", gate_gain=50.0),
    Case("PulseLoCo", gate="fp8_e5m2", gate_gain=50.0),
    Case("PulseLoCo", gate_margin=0.25),
    Case("PulseLoCo", value_steps=2),
    Case("PulseLoCo", value_steps=256, bf16=True),
    Case("PulseLoCo", sync_every=2, gate_margin=0.1, value_steps=16, bf16=True),
    Case("PulseLoCo", gate="fp16", gate_margin=0.03, value_steps=64, outer_momentum=0.0),
    Case("PulseLoCo", gate="fp8_e4m3", gate_gain=50.0, gate_margin=0.3, value_steps=4),
    Case("PulseLoCo", value_steps=16, sums_margin=0.25),
    Case("PulseLoCo", sync_every=2, gate_margin=0.1, value_steps=4, sums_margin=0.375, bf16=True),
    Case("PulseLoCo", outer_lr=4.0, outer_momentum=0.0, gate_gain=2.0, value_steps=1, sums_margin=1.0),
    Case("PulseLoCo", saving=1.0, outer_momentum=0.0, gate_gain=3.5, value_steps=256, sums_margin=0.01),
    Case(
        "PulseLoCo",
        sync_every=2,
        saving=0.25,
        outer_momentum=0.0,
        value_steps=2,
        sums_margin=0.125,
        bf16=True,
    ),
]


DILOCO_TAKES = ("sync_every", "outer_lr", "outer_momentum", "nesterov")


def options_of(case: Case) -> dict[str, Any]:
    """Of the optimizer."""
    options = asdict(case)
    kind, _ = options.pop("kind"), options.pop("bf16")
    if case.saving is not None:
        del options["outer_lr"]
    return {name: options[name] for name in DILOCO_TAKES} if kind == "DiLoCo" else options


def paper_of(case: Case, sites: int) -> dict[str, Any]:
    """What a specification is told."""
    is_bf16 = np.zeros(NUMEL, dtype=bool)
    is_bf16[13:] = case.bf16
    return {
        "anchor": flat(parameters(SEED, NUMEL, case.bf16)),
        "bf16": is_bf16,
        "sites": sites,
        "lr": case.outer_lr if case.saving is None else None,
        "mu": case.outer_momentum,
        "nesterov": case.nesterov,
        "gain": case.gate_gain,
        "gate": case.gate,
        "margin": case.gate_margin,
        "value_steps": case.value_steps,
        "sums_margin": case.sums_margin,
        "dense": case.kind == "DiLoCo",
    }
