"""What some settings send, as measured once: what a prediction assumes of a training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loco.kernels import Gate

from ...presets import PAPER, outer_settings

MEASURED_SITES = 4


@dataclass(frozen=True, kw_only=True)
class Method:
    """
    Attributes:
        settings: of `loco.PulseLoCo`.
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
        given: dict[str, Any] = {"saving": None, "outer_lr": None, "outer_momentum": None, **self.settings}
        told = outer_settings(**given, gate="bf16")
        return Gate(gain=told["gate_gain"], margin=told["gate_margin"], value_steps=told["value_steps"])

    def sums_of(self, sites: int) -> float:
        """Bytes a parameter of the sums. As many entries more for each site more as were measured."""
        return self.payload + (self.sums - self.payload) * (sites - 1) / (MEASURED_SITES - 1)


# Of models of 828,544 parameters and width 128, AdamW at 1e-6, H 8, four sites, the second half of 30 rounds:
# docs/results.md and docs/frontier.md. `payload` is payload_per_parameter of experiments/results/rl/paper
# (the default), …/equal-arithmetic (PAPER) and …/saving. `sums` is the rest of what the owner exchange sent.
METHODS = (
    Method(name="DiLoCo", is_dense=True, density=1.0, payload=4.0, sums=4.0),
    Method(name="PulseLoCo", density=0.110, payload=0.225, sums=0.372),
    Method(name="PAPER", settings=PAPER, density=0.0461, payload=0.105, sums=0.127),
    Method(name="saving 0.25", settings={"saving": 0.25}, density=0.0388, payload=0.0157, sums=0.0187),
    Method(name="saving 1", settings={"saving": 1}, density=0.00594, payload=0.00243, sums=0.00516),
)
