"""A LoRA adapter as PEFT saves it."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor


def is_peft(model: object) -> bool:
    # Where nobody has imported PEFT there is no model of it.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def lora_adapter(model: Any, name: str = "default") -> Callable[[], dict[str, Tensor]]:
    """A source for `Publisher`: one adapter of a PEFT model, by the names of its adapter_model.safetensors.

    Args:
        model: of PEFT.
        name: the adapter's.

    Raises:
        ValueError: it is no model of PEFT, or has no such adapter.
    """
    if not is_peft(model):
        raise ValueError(f"lora_adapter takes a model of PEFT, got {type(model).__name__}")
    if name not in model.peft_config:
        known = ", ".join(sorted(model.peft_config))
        raise ValueError(f"the model has no adapter named {name!r}, but these: {known}")
    from peft import get_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    return lambda: get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
