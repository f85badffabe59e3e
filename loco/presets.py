"""Named settings of PulseLoCo, each a point on the measured frontier of learning against bytes.

    optimizer = loco.PulseLoCo(inner, **loco.SAVING)
    optimizer = loco.PulseLoCo(inner, **loco.SAVING | {"wire": "tight"})  # the same but for one argument
    optimizer = loco.PulseLoCo(inner, **loco.holding_back(0.25, width=4096, lr=1e-6))

PAPER is the published setting. The others take long outer steps without momentum, which learn more. They
differ in how much of a BF16 ulp they hold back until it has grown: MATCHING an eighth, and it sends values
exactly; SAVING a quarter, and SMALLEST a whole one, and these two round values.

Their outer steps are a quarter of the longest that learned well on the four small tasks they were chosen on:
on other tasks, and where samples come from older weights, the longest ones climb and fall again.

They are for models of a width of up to 128, an inner learning rate of 1e-6, as in RL post-training, and
rounds of 8 steps. A wider model needs a shorter outer step. Where weights move further in a round, the step
must be shorter, too, and more must be held back. `holding_back` makes settings for other widths, learning
rates and rounds. docs/frontier.md says what all this was chosen by.

The presets can't be changed: `dict(loco.SAVING)` is a copy that can. `holding_back` makes a new dict.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_WIDTH, _LR, _STEPS = 128, 1e-6, 8
_SHORTEST = 56  # α that is safe, however little is held back
_PUBLISHED = 7.0  # α / (1 − μ) of the published outer optimizer, which models of any width bear


def _times_as_wide(width: int) -> float:
    """As the models that the presets are for. What narrower ones bear was not tried."""
    return max(1.0, width / _WIDTH)


def _distance(width: int, lr: float, sync_every: int) -> float:
    """How many ulps weights move in a round, in units of what they do in one that the presets are for: an
    inner optimizer like Adam moves a weight by about its learning rate in each step, and the weights of a
    model that is four times as wide are half as large."""
    return math.sqrt(_times_as_wide(width)) * lr * sync_every / (_LR * _STEPS)


def _longest(ulps: float) -> float:
    """The recommended α while so much is held back, in rounds that the presets are for: a quarter of the
    longest that learned well on the tasks they were chosen on."""
    return min(896 * ulps, 448)


def longest_outer_lr(margin: float, *, width: int, lr: float, sync_every: int) -> float:
    """The longest outer step that is recommended while updates of up to `margin` are held back."""
    distance = _distance(width, lr, sync_every)
    longest = max(_SHORTEST, _longest(margin / distance)) / distance / _times_as_wide(width)
    return max(longest, _PUBLISHED / _distance(_WIDTH, lr, sync_every))


def holding_back(
    ulps: float,
    *,
    width: int,
    lr: float = _LR,
    sync_every: int | Mapping[Any, int] = _STEPS,
    exact: bool = False,
) -> dict[str, Any]:
    """Settings of PulseLoCo by one number, for an inner optimizer of Adam's kind.

    An update is sent once it is more than `gate_margin`, which is `ulps`, or as many times more as weights
    move further in a round. Values travel in steps of twice that (of an ulp at most), and a sum is sent back
    once it is more than twice that.

    Args:
        ulps: how much is held back, of a BF16 weight, where width is 128, lr is 1e-6 and a round has 8 steps:
            the more, the fewer bytes. From 0.125 to 2 was tried.
        width: of the model, its hidden size: the wider, the shorter the outer step. 128 to 512 were tried.
        lr: the inner optimizer's largest learning rate.
        sync_every: H; or that of each site, of which the largest decides for all.
        exact: values and sums are sent as they are, whole.
    """
    if not 2**-9 <= ulps <= 2:
        raise ValueError(f"ulps must be from 1/512 to 2, got {ulps}")
    if not (width == int(width) and width >= 1):
        raise ValueError(f"width must be a whole number >= 1, got {width}")
    if not 0 < lr < float("inf"):
        raise ValueError(f"lr must be > 0 and finite, got {lr}")
    steps = max(sync_every.values(), default=0) if isinstance(sync_every, Mapping) else sync_every
    if not (steps == int(steps) and steps >= 1):
        raise ValueError(f"sync_every must be a whole number >= 1, got {steps}")
    distance = _distance(width, lr, steps)
    settings = _holding_back(ulps, exact=exact, distance=distance)
    # What all weights of an activation do to it together grows with their number.
    shorter = settings["outer_lr"] / _times_as_wide(width)
    settings["outer_lr"] = max(shorter, _PUBLISHED / _distance(_WIDTH, lr, steps))
    return {"sync_every": sync_every, **settings}


def _holding_back(ulps: float, *, exact: bool = False, distance: float = 1.0) -> dict[str, Any]:
    """As `holding_back`, in rounds of any number of steps in which weights move as far as this."""
    margin = ulps * distance
    settings: dict[str, Any] = {
        "outer_lr": _longest(ulps) / distance,
        "outer_momentum": 0.0,
        "gate_gain": max(1.0, 1 / (2 * ulps)) / distance,
        "gate_margin": margin,
    }
    if not exact:
        settings["value_steps"] = 2 ** min(max(0, round(math.log2(1 / (2 * margin)))), 8)
        settings["sums_margin"] = 2 * margin
    return settings


PAPER: Mapping[str, Any] = MappingProxyType({"outer_lr": 0.7, "outer_momentum": 0.9, "gate_gain": 1.0})
MATCHING: Mapping[str, Any] = MappingProxyType(_holding_back(0.125, exact=True))
SAVING: Mapping[str, Any] = MappingProxyType(_holding_back(0.25))
SMALLEST: Mapping[str, Any] = MappingProxyType(_holding_back(1.0))
