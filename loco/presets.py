"""How much PulseLoCo saves, by one number, and the published setting.

    optimizer = loco.PulseLoCo(inner, saving=0.25)
    optimizer = loco.PulseLoCo(inner, **loco.PAPER)

docs/frontier.md says what each of them learned.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .config import matching_gain

PAPER: Mapping[str, Any] = MappingProxyType({"outer_lr": 0.7, "outer_momentum": 0.9, "gate_gain": 1.0})


def economies(saving: float) -> dict[str, Any]:
    """What is held back of an update, and how values are rounded.

    Args:
        saving: in BF16 ulps of a weight.
    """
    if isinstance(saving, bool) or not (saving == 0 or 2**-9 <= saving <= 64):
        raise ValueError(
            f"saving must be 0, or from 1/512 to 64 BF16 ulps, got {saving}: 0.25 is a place to start, and 0 "
            f"sends exact values"
        )
    if saving == 0:
        return {}
    # The gate looks at γ·s: with this gain it sees all that is larger than `saving`.
    steps = 2 ** min(max(0, round(math.log2(1 / (2 * saving)))), 8)
    return {
        "gate_gain": max(1.0, 1 / (2 * saving)),
        "gate_margin": saving,
        "value_steps": steps,
        "sums_margin": saving / 2,
    }


def outer_settings(
    saving: float | None,
    *,
    outer_lr: float | None,
    outer_momentum: float | None,
    gate: str,
    **given: Any,
) -> dict[str, Any]:
    """The settings of PulseLoCo's outer step, its gate and its economies.

    Args:
        given: of the gate and the economies; None: as `saving` says, or the default.
    """
    if saving is not None and gate == "open":
        raise ValueError(
            'gate="open" sends every entry, so there is nothing to save: leave saving out, or choose another '
            'gate, such as "bf16"'
        )
    found: dict[str, Any] = {"gate_margin": 0.0, "value_steps": None, "sums_margin": None}
    if saving is not None:
        found |= economies(saving)
    found |= {name: value for name, value in given.items() if value is not None}
    if outer_lr is None:
        outer_lr = 0.7 if saving is None else 7.0  # the published one, with its momentum and without
        if saving:
            outer_lr = 1.0
            found["finds_outer_lr"] = True
    if outer_momentum is None:
        outer_momentum = 0.9 if saving is None else 0.0
    found |= {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "gate": gate}
    return {"gate_gain": matching_gain(outer_lr, outer_momentum), **found}
