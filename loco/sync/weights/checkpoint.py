"""The weights of a transformers model by the names and in the shapes of its checkpoint.

transformers keeps some of them otherwise in memory: the experts of a layer are two tensors there, and engines
that load checkpoints know them one by one. It goes back itself when it saves. Here the copies that it makes
on the way are views, so that what is published is read from the model's own memory, and what a subscriber
writes is written there.
"""

import logging
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)
aten = torch.ops.aten


class _Views(TorchDispatchMode):
    """A copy is the same elements once more."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return aten.alias(args[0]) if func is aten.clone.default else func(*args, **(kwargs or {}))


def as_in_checkpoint(model: nn.Module, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`held`, which are the model's tensors, as its checkpoint has them; as they are if it is no model of
    transformers, or they can't be views of the memory. `held` must be whole: no DTensors.
    """
    same, modeling = dict(held), sys.modules.get("transformers.modeling_utils")
    of_transformers: Any = model
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return same
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 both were the same
        return same
    try:
        with torch.no_grad(), _Views():
            found = revert_weight_conversion(of_transformers, dict(held))
    except RuntimeError as error:
        _tell(type(model).__name__, str(error))
        return same
    memory = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    for name, tensor in found.items():
        if tensor.untyped_storage().data_ptr() not in memory:
            _tell(type(model).__name__, f"{name} is computed")
            return same
    # Of two names of one tensor the model's first one stays the first.
    return {name: found[name] for name in (*held, *found) if name in found}


@cache
def _tell(kind: str, why: str) -> None:
    logger.warning(
        "the weights of this %s go by the names that they have in memory, which engines that load "
        "checkpoints may not know: its checkpoint has them in a form that is no view of them (%s)",
        kind,
        why,
    )
