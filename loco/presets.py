"""Two ways to set a PulseLoCo, each a point on the measured frontier of learning against bytes.

    optimizer = loco.PulseLoCo(inner, **loco.SAVING)

MATCHING learns as DiLoCo with its published outer optimizer does, and sends every update whole: it is the
default, by name. SAVING sends a fifth of its bytes: plain steps of the same reach, α / (1 − μ) = 7, and no
momentum; values in sixteenths of a BF16 ulp, and none below a fifth of one. Both are chosen at the rates of
RL post-training, near 1e-6.
"""

from typing import Any

MATCHING: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "gate_gain": 3.5}
SAVING: dict[str, Any] = {
    "outer_lr": 7.0,
    "outer_momentum": 0.0,
    "gate_gain": 2.0,
    "gate_margin": 0.2,
    "value_steps": 16,
}
