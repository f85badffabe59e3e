"""The memory that an op takes for itself, counted."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocated(TorchDispatchMode):
    """The bytes of every tensor that is made, freed or not: at least what an op takes at its height."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.storages[id(made.untyped_storage())] = made.untyped_storage()
        return result


def scratch_bytes(
    op: Callable[[], Any], returned: Callable[[Any], Iterable[Tensor]], given: Iterable[Tensor]
) -> int:
    """What an op takes beside its arguments and its result."""
    with Allocated() as made:
        result = op()
    known = {t.untyped_storage().data_ptr() for t in given}
    sizes = {s.data_ptr(): s.nbytes() for s in made.storages.values() if s.data_ptr() not in known}
    kept = sum(t.numel() * t.element_size() for t in returned(result))
    return sum(sizes.values()) - kept
