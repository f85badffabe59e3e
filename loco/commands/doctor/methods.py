"""What the presets send, as measured once: what a prediction assumes of a training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loco.kernels import Gate

from ...config import matching_gain
from ...presets import MATCHING, PAPER, SAVING, SMALLEST

MEASURED_SITES = 4


@dataclass(frozen=True, kw_only=True)
class Method:
    """
    Attributes:
        settings: of `loco.PulseLoCo`; None: it is `loco.DiLoCo`.
        density: the share of the elements that a site sends.
        payload: bytes a parameter that they take in the tight code; with DiLoCo in FP32.
        sums: bytes a parameter that the sums of MEASURED_SITES sites take.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_dense: bool = False
    density: float
    payload: float
    sums: float

    @property
    def gate(self) -> Gate | None:
        """None: every element is sent."""
        if self.is_dense:
            return None
        told: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, **self.settings}
        return Gate(
            gain=told.get("gate_gain", matching_gain(told["outer_lr"], told["outer_momentum"])),
            margin=told.get("gate_margin", 0.0),
            value_steps=told.get("value_steps"),
        )

    def sums_of(self, sites: int) -> float:
        """Bytes a parameter of the sums. As many entries more for each site more as were measured."""
        return self.payload + (self.sums - self.payload) * (sites - 1) / (MEASURED_SITES - 1)


# Of models of 828,544 parameters and width 128, AdamW at 1e-6, H 8, four sites, the second half of 30 rounds:
# docs/results.md and docs/frontier.md. `payload` is payload_per_parameter of experiments/results/rl/paper
# (the default) and …/equal-arithmetic (the presets). `sums` is the rest of what the owner exchange sent.
METHODS = (
    Method(name="DiLoCo", is_dense=True, density=1.0, payload=4.0, sums=4.0),
    Method(name="PulseLoCo", density=0.110, payload=0.225, sums=0.372),
    Method(name="PAPER", settings=PAPER, density=0.0461, payload=0.105, sums=0.127),
    Method(name="MATCHING", settings=MATCHING, density=0.0371, payload=0.0905, sums=0.214),
    Method(name="SAVING", settings=SAVING, density=0.0408, payload=0.0163, sums=0.0184),
    Method(name="SMALLEST", settings=SMALLEST, density=0.00658, payload=0.00271, sums=0.00432),
)
