"""Plain data: what can be written to a file and read back without running anything that the file says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_EXACTLY = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def mapped(tree: Any, leaf: Callable[[str, Any], Any], where: str = "") -> Any:
    """The same dicts, lists and tuples with `leaf(where, value)` in the place of every other value, where
    "a.0.b" is the way to it. Their subclasses become the plain ones."""
    if isinstance(tree, dict):
        return {
            leaf(where, key): mapped(value, leaf, f"{where}.{key}" if where else str(key))
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        items = [mapped(value, leaf, f"{where}.{k}" if where else str(k)) for k, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return leaf(where, tree)


def host_copy(tree: Any) -> Any:
    """A copy in host memory, that training goes on without changing.

    Raises:
        ValueError: something that is not plain data; names where it is.
    """
    return mapped(tree, _copied)


def _copied(where: str, value: Any) -> Any:
    if type(value) in (Tensor, Parameter):
        return value.detach().to("cpu", copy=True)
    if type(value) in _EXACTLY:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # a numpy.float64 is a float, and an IntEnum's member an int
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, "
        f"strings, tensors, and dicts, lists and tuples of them, so that reading one never runs code"
    )
