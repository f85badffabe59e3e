"""Named settings of PulseLoCo, each a point on the measured frontier of learning against bytes.

    optimizer = loco.PulseLoCo(inner, **loco.SAVING)
    optimizer = loco.PulseLoCo(inner, **loco.SAVING | {"gate_gain": 3.5})  # the same but for one argument

PAPER is the paper's setting, whose gate looks at the raw update. MATCHING, the default, learns as DiLoCo does
with its published outer optimizer, and sends every update exactly. SAVING sends a fifth of MATCHING's bytes:
it takes plain steps of the same effective size, α / (1 − μ) = 7, without momentum, rounds values to
sixteenths of a BF16 ulp, and sends no update below a fifth of one. MATCHING and SAVING were chosen at the
learning rates of RL post-training, near 1e-6.

They can't be changed: `dict(loco.SAVING)` is a copy that can.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PAPER: Mapping[str, Any] = MappingProxyType({"outer_lr": 0.7, "outer_momentum": 0.9, "gate_gain": 1.0})
MATCHING: Mapping[str, Any] = MappingProxyType({"outer_lr": 0.7, "outer_momentum": 0.9, "gate_gain": 3.5})
SAVING: Mapping[str, Any] = MappingProxyType(
    {"outer_lr": 7.0, "outer_momentum": 0.0, "gate_gain": 2.0, "gate_margin": 0.2, "value_steps": 16}
)
