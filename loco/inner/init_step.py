"""Telling a training step from one that only gives an optimizer its state.

`get_optimizer_state_dict` and `set_optimizer_state_dict` of torch.distributed.checkpoint call `step()` on an
optimizer without state, with gradients of zero and a learning rate of zero (pytorch#164929); torchtitan does
so before it saves or loads one. The step's values don't tell it apart: the first step of a warm-up has a
learning rate of zero, and a batch without advantages has gradients of zero. Its caller does.
"""

import sys
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# The functions that do, and where they are.
_CALLERS = {
    "_init_optim_state": "torch.distributed.",
    "init_state": "torch.distributed.",
    "init_optim_state": "torchtitan.",
}


def only_initialises(optimizer: Optimizer) -> bool:
    """Whether this step is called to give the optimizer its state. Ask within the step."""
    if any(_is_nonzero(group.get("lr", 0.0)) for group in optimizer.param_groups):
        return False  # nearly always, so that the stack is read in rare steps only
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = _CALLERS.get(frame.f_code.co_name)
        if package is not None and frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False


def _is_nonzero(rate: Any) -> bool:
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return True  # torch puts its zero on the CPU, and reading this one would wait for the GPU
    return bool(rate != 0)
