"""Several optimizers, each with parameters of its own, that step together: Muon beside AdamW, for example."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def as_one(inner: Optimizer | Iterable[Optimizer]) -> Optimizer:
    """What a user gives as `inner`: an optimizer, or some that step together.

    Raises:
        TypeError, ValueError: as `SeveralOptimizers`.
    """
    if isinstance(inner, Optimizer):
        return inner
    if not isinstance(inner, Iterable):
        raise TypeError(
            f"inner must be a torch.optim.Optimizer, or a list of them, got {type(inner).__name__}"
        )
    several = SeveralOptimizers(list(inner))
    first, *others = several.optimizers
    return several if others else first


def each_of(inner: Optimizer) -> tuple[Optimizer, ...]:
    """The user's own optimizers."""
    return inner.optimizers if isinstance(inner, SeveralOptimizers) else (inner,)


class SeveralOptimizers(Optimizer):
    """A torch optimizer whose parameter groups and state are those of several others, one after the other.

    Attributes:
        optimizers: these.

    Raises:
        TypeError: one of them is no optimizer.
        ValueError: there are none, or two of them hold the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers: tuple[Optimizer, ...] = tuple(optimizers)
        if not self.optimizers:
            raise ValueError("inner must be an optimizer or a list of them, got an empty list")
        for k, optimizer in enumerate(self.optimizers):
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"inner[{k}] must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        owner: dict[int, int] = {}
        for k, optimizer in enumerate(self.optimizers):
            for p in _parameters(optimizer):
                if owner.setdefault(id(p), k) != k:
                    raise ValueError(
                        f"optimizers {owner[id(p)]} and {k} hold the same parameter, of shape "
                        f"{tuple(p.shape)}: each parameter may have one inner optimizer"
                    )
        self._is_built = False
        super().__init__(self.param_groups, {})
        self._is_built = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each of them, in order; a closure is evaluated once, before the first one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_built:  # torch's constructor adds the groups that are there
            raise ValueError("add the group to one of these optimizers, before they are put together")

    def state_dict(self) -> dict[str, Any]:
        """In the shape of one optimizer's: the second one's parameters are numbered after the first one's.

        What else an optimizer saves is under "others", in the order of the optimizers.
        """
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        others: list[dict[str, Any]] = []
        offset = 0
        for k, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            if foreign := [key for key in state["state"] if not isinstance(key, int)]:
                raise ValueError(
                    f"inner[{k}], a {type(optimizer).__name__}, keeps state under {foreign[0]!r}, which is "
                    f"none of its parameters: such an optimizer can't be saved together with others"
                )
            joined["state"] |= _shifted(state.pop("state"), offset)
            for group in state.pop("param_groups"):
                joined["param_groups"].append({**group, "params": [n + offset for n in group["params"]]})
            others.append(state)
            offset += sum(1 for _ in _parameters(optimizer))
        if any(others):
            joined["others"] = others
        return joined

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is of other optimizers; nothing was changed.
        """
        pieces = self._split(state_dict)
        before = [optimizer.state_dict() for optimizer in self.optimizers]
        loaded = 0
        try:
            for optimizer, piece in zip(self.optimizers, pieces, strict=True):
                loaded += 1
                optimizer.load_state_dict(piece)
        except BaseException:
            for optimizer, was in list(zip(self.optimizers, before, strict=True))[:loaded]:
                optimizer.load_state_dict(was)
            raise

    def _split(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        groups = list(state_dict["param_groups"])
        expected = sum(len(optimizer.param_groups) for optimizer in self.optimizers)
        if len(groups) != expected:
            raise ValueError(
                f"this state has {len(groups)} parameter groups, and these {len(self.optimizers)} optimizers "
                f"have {expected}: load it into the optimizers that it was saved from, in the same order"
            )
        others = state_dict.get("others") or [{} for _ in self.optimizers]
        pieces, offset = [], 0
        for optimizer, other in zip(self.optimizers, others, strict=True):
            count = sum(1 for _ in _parameters(optimizer))
            own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            state = {k: v for k, v in state_dict["state"].items() if offset <= k < offset + count}
            pieces.append(
                {
                    **other,
                    "state": _shifted(state, -offset),
                    "param_groups": [{**g, "params": [k - offset for k in g["params"]]} for g in own],
                }
            )
            offset += count
        return pieces

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"

    # torch's constructor assigns these two; the assignment is ignored, as the optimizers hold them.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    @property
    def state(self) -> Any:
        return _States(self.optimizers)

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass


class _States(MutableMapping[Tensor, Any]):
    """Each parameter's state in the optimizer that holds it."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, p: Tensor) -> MutableMapping[Tensor, Any]:
        for optimizer in self._optimizers:
            if p in optimizer.state or any(p is own for own in _parameters(optimizer)):
                return optimizer.state
        raise KeyError(p)

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p)[p]

    def __setitem__(self, p: Tensor, state: Any) -> None:
        self._of(p)[p] = state

    def __delitem__(self, p: Tensor) -> None:
        del self._of(p)[p]

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _shifted(state: dict[int, Any], offset: int) -> dict[int, Any]:
    return {k + offset: v for k, v in state.items()}
