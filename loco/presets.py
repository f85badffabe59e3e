"""Named settings of PulseLoCo, each a point on the measured frontier of learning against bytes.

    optimizer = loco.PulseLoCo(inner, **loco.SAVING)
    optimizer = loco.PulseLoCo(inner, **loco.SAVING | {"sync_every": 16})  # the same but for one argument

PAPER is the published setting. The others take long outer steps without momentum, which learn more. They
differ in how much of a BF16 ulp they hold back until it has grown: MATCHING an eighth, and it sends values
exactly; SAVING a quarter, and SMALLEST a whole one, and these two round values.

Their outer_lr was chosen at inner learning rates near 1e-6, those of RL post-training. What counts is the
product of the two: at 1e-5 divide outer_lr by ten. docs/frontier.md says what they were chosen by.

They can't be changed: `dict(loco.SAVING)` is a copy that can.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _holding_back(ulps: float, outer_lr: float) -> Mapping[str, Any]:
    """What goes together: an update is sent once it is more than `ulps`, in steps of twice that (of an ulp at
    most), and a sum is sent back once it is more than 2 · `ulps`."""
    steps = max(1, round(1 / (2 * ulps)))
    return MappingProxyType(
        {
            "outer_lr": outer_lr,
            "outer_momentum": 0.0,
            "gate_gain": float(steps),
            "gate_margin": ulps,
            "value_steps": steps,
            "sums_margin": 2 * ulps,
        }
    )


PAPER: Mapping[str, Any] = MappingProxyType({"outer_lr": 0.7, "outer_momentum": 0.9, "gate_gain": 1.0})
MATCHING: Mapping[str, Any] = MappingProxyType(
    {"outer_lr": 448.0, "outer_momentum": 0.0, "gate_gain": 4.0, "gate_margin": 0.125}
)
SAVING = _holding_back(0.25, outer_lr=896.0)
SMALLEST = _holding_back(1.0, outer_lr=1792.0)
