"""The settings that must be equal on all sites."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

# The format whose changes the gate looks for; None: every entry is sent.
GATES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "open": None,
}
VALUE_STEPS = (None, *(2**k for k in range(9)))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that must be equal on all sites: checked here, compared between the sites when the
    optimizer is built, and stored in checkpoints."""

    kind: str  # the optimizer's class
    sync_every: int  # H
    outer_lr: float  # α
    outer_momentum: float  # μ
    nesterov: bool
    gate: str  # one of GATES
    gate_gain: float  # γ
    gate_margin: float  # f
    value_steps: int | None  # V
    outlier_factor: float | None = None
    sums_margin: float | None = None  # F
    overlap: bool | float | str | None = None  # once checked: β, or "auto", the latest α; None: off
    steps_by_site: dict[str, int] | None = None  # H of each, where it differs; `sync_every` is this site's
    finds_outer_lr: bool | None = None  # True: outer_lr is that of the first round alone

    def __post_init__(self) -> None:
        for steps in (self.sync_every, *(self.steps_by_site or {}).values()):
            if not 1 <= steps < float("inf") or steps != int(steps):
                raise ValueError(f"sync_every must be a whole number >= 1, got {steps}")
        for name in ("outer_lr", "gate_gain"):
            value = getattr(self, name)
            # A round computes in FP32.
            if not 2.0**-126 <= _in_fp32(value) < float("inf"):
                raise ValueError(f"{name} must be > 0 and finite in FP32, got {value}")
        if not 0 <= _in_fp32(self.outer_momentum) < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if self.nesterov not in (True, False):
            raise ValueError(f"nesterov must be True or False, got {self.nesterov!r}")
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {', '.join(GATES)}, got {self.gate!r}")
        if self.finds_outer_lr and (self.outer_momentum or self.sums_margin is None):
            # Where all is sent, exactly, most of it is noise, which hides that rounds undo each other.
            raise ValueError(
                f"an outer step that finds its own length has no momentum, and sends no small sums: leave "
                f"out outer_momentum (got {self.outer_momentum}), or give outer_lr, too"
            )
        for name, off in (("gate_margin", 0), ("sums_margin", None)):
            value = getattr(self, name)
            if value != off and not 2.0**-126 <= _in_fp32(value) < float("inf"):
                raise ValueError(f"{name} must be {off}, or > 0 and finite in FP32, got {value}")
        if self.value_steps not in VALUE_STEPS:
            raise ValueError(
                f"value_steps must be None or a power of two from 1 to 256, got {self.value_steps!r}"
            )
        for name, off in (("gate_margin", 0), ("value_steps", None), ("sums_margin", None)):
            if GATES[self.gate] is None and getattr(self, name) != off:
                raise ValueError(
                    f'gate="open" sends every entry exactly, so {name} must be {off}, got '
                    f'{getattr(self, name)}: leave it out, or choose another gate, such as "bf16"'
                )
        if self.sums_margin is not None:
            if self.value_steps is None:
                raise ValueError(
                    f"sums_margin adds small sums to a residual, which is exact only for values rounded to "
                    f"steps: choose value_steps, such as 16, or leave sums_margin out, got {self.sums_margin}"
                )
            object.__setattr__(self, "sums_margin", float(self.sums_margin))
        if self.outlier_factor is not None:
            if not 1 < self.outlier_factor < float("inf"):
                raise ValueError(f"outlier_factor must be None or > 1, got {self.outlier_factor}")
            if GATES[self.gate] is None:
                raise ValueError(
                    f'outlier_factor leaves a site\'s update in its residual, and with gate="open" there is '
                    f"none: leave it out (got {self.outlier_factor}), or choose another gate"
                )
            object.__setattr__(self, "outlier_factor", float(self.outlier_factor))
        if self.overlap is True:  # as the outer step does with v, if all sites send the same
            ahead = self.outer_lr * (1 + self.outer_momentum if self.nesterov else 1)
            object.__setattr__(self, "overlap", "auto" if self.finds_outer_lr else ahead)
        if self.overlap is False:
            object.__setattr__(self, "overlap", None)
        if self.overlap is not None and not (self.finds_outer_lr and self.overlap == "auto"):
            if isinstance(self.overlap, str) or not 0 <= _in_fp32(self.overlap) < float("inf"):
                raise ValueError(
                    f"overlap must be True, False or how far a site runs ahead by its own update, "
                    f"finite and >= 0, got {self.overlap}"
                )
            object.__setattr__(self, "overlap", float(self.overlap))
        # Plain types, so that 8, 8.0 and a numpy number are one setting on all sites.
        for name, kind in (
            ("sync_every", int),
            ("outer_lr", float),
            ("outer_momentum", float),
            ("nesterov", bool),
            ("gate_gain", float),
            ("gate_margin", float),
        ):
            object.__setattr__(self, name, kind(getattr(self, name)))
        if self.value_steps is not None:
            object.__setattr__(self, "value_steps", int(self.value_steps))
        if self.steps_by_site is not None:
            each = {str(site): int(steps) for site, steps in self.steps_by_site.items()}
            object.__setattr__(self, "steps_by_site", dict(sorted(each.items())))

    def of_site(self, site: str | int) -> "Settings":
        """
        Args:
            site: by its name or number.

        Raises:
            ValueError: nobody says how many inner steps it makes.
        """
        if self.steps_by_site is None:
            return self
        if str(site) not in self.steps_by_site:
            raise ValueError(
                f"sync_every says how many inner steps the sites {', '.join(self.steps_by_site)} make: give "
                f"site {site} a number, too, on all sites"
            )
        return replace(self, sync_every=self.steps_by_site[str(site)])

    def agreement(self) -> dict[str, Any]:
        """What all sites compare."""
        own = {"sync_every"} if self.steps_by_site else set[str]()
        return {name: value for name, value in vars(self).items() if name not in own}


def checked_weight(weight: float) -> float:
    """-> it, as the FP32 number that travels."""
    # What was withheld under one weight is divided by the sum of another round's.
    if isinstance(weight, str) or weight is None or not 1 / 64 <= weight <= 64:
        raise ValueError(
            f"weight must be from 1/64 to 64, and 1 for a usual round of a usual site, got {weight!r}: give "
            f"what this site has learned from, as tokens, over what a site usually learns from"
        )
    return _in_fp32(weight)


def inner_steps(sync_every: int | Mapping[Any, int]) -> dict[str, Any]:
    """The settings that say how many there are."""
    if not isinstance(sync_every, Mapping):
        return {"sync_every": sync_every}
    if not sync_every:
        raise ValueError("sync_every names no site: give each site's number of inner steps")
    return {"sync_every": next(iter(sync_every.values())), "steps_by_site": dict(sync_every)}


def matching_gain(outer_lr: float, outer_momentum: float) -> float:
    """The gate's gain with which PULSELoCo learns as DiLoCo does: half of the outer effective step size.

    An update that repeats every round moves θ by up to α / (1 − μ) times itself. With γ = 1 the gate
    withholds updates that become visible through this; with γ = α / (1 − μ) it sends about half as many
    entries again and learns hardly more.
    """
    if not 0 <= outer_momentum < 1:
        return 1.0  # `Settings` refuses it
    half = outer_lr / (1 - outer_momentum) / 2
    return max(1.0, float(f"{half:.6g}"))  # 3.5, without the rounding error of 1 − 0.9


def _in_fp32(value: float) -> float:
    return ctypes.c_float(value).value
