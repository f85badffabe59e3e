"""The parameters of an optimizer as one flat vector: which element lies where."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .sharding import GatheredCopies, check_sharded, is_sharded, layout_of, local, shard_of

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


class FlatParameters:
    """Every trained parameter once, in the order of the parameter groups, each in its row-major order. Of a
    DTensor it is the elements that this rank holds.

    Parameters that are frozen (`requires_grad` is False) have no place in it and cost nothing. Thawing them
    later is refused, since the other sites would not know. Those that freeze later keep their place.

    Args:
        inner: whose parameters they are.
        site_ranks: the ranks of this site in the process group, beyond which no DTensor may reach; None: not
            known.

    Attributes:
        params: as the optimizer has them; see `tensors`.
        shapes: of what this rank holds.
        is_sharded: any of them is a DTensor.

    Raises:
        ValueError: a parameter that can't be synchronised, and why.
    """

    def __init__(self, inner: Optimizer, site_ranks: Collection[int] | None = None) -> None:
        named = _named_parameters(inner)
        if not named:
            raise ValueError("the inner optimizer has no parameters")
        self._given = [p for _, p in named]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        named = [(name, p) for name, p in named if p.requires_grad]
        if not named:
            raise ValueError(
                "all of the inner optimizer's parameters are frozen (requires_grad is False): build it on "
                "those that are trained"
            )
        self.device = named[0][1].device
        self._gathered = GatheredCopies(named)
        for name, p in named:
            if is_sharded(p):
                check_sharded(name, p, site_ranks)
            elif is_traceable_wrapper_subclass(p):
                raise ValueError(f"parameter {name} is a {type(p).__name__}; loco synchronises plain tensors")
            self._check(name, local(p) if is_sharded(p) else p)
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.is_sharded = any(is_sharded(p) for p in self.params)
        tensors = self.tensors
        self.shapes = [tuple(t.shape) for t in tensors]
        self.dtypes = [t.dtype for t in tensors]
        self.starts = list(accumulate((t.numel() for t in tensors), initial=0))
        self.numel = self.starts.pop()
        # Two parameters on one memory would be written twice, from two places of the flat vector.
        spans = sorted(
            (t.data_ptr(), _end(t), name) for name, t in zip(self.names, tensors, strict=True) if t.numel()
        )
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(
                    f"parameters {name} and {other} share their memory, or interleave in it, but are two "
                    f"Parameters: tie weights by using one Parameter in both places"
                )

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank holds of each parameter, in the memory where it lies now."""
        return [local(p) for p in self.params]

    def _check(self, name: str, p: Tensor) -> None:
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"parameter {name} is of FullyShardedDataParallel (FSDP1), whose shards do not say what "
                f"they are part of: use torch.distributed.fsdp.fully_shard"
            )
        if isinstance(p, UninitializedParameter) or p.is_meta:
            raise ValueError(f"parameter {name} has no values yet: give the model its weights first")
        if p.dtype not in SUPPORTED:
            raise ValueError(
                f"parameter {name} is {p.dtype}; loco synchronises float32, bfloat16 and float16"
            )
        if p.layout != torch.strided:
            raise ValueError(f"parameter {name} is {p.layout}; it must be dense")
        if any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ValueError(f"parameter {name} is expanded: its elements share their memory")
        if p.is_inference():
            raise ValueError(f"parameter {name} was made under inference_mode, and can't be updated")
        if p.device != self.device:
            raise ValueError(
                f"parameters lie on {self.device} and ({name}) on {p.device}; "
                f"all parameters of one optimizer must be on one device"
            )
        memory = p.untyped_storage()
        if p.numel() and _end(p) > memory.data_ptr() + memory.nbytes():
            raise ValueError(
                f"parameter {name} has no memory, a framework has freed it: build the inner optimizer from "
                f"the model's parameters as they are between two steps"
            )

    def describe(self) -> list[list]:
        """Names, shapes and dtypes of the parameters, and how DTensors are divided, as the sites compare
        them: the same on all ranks of a site."""
        columns = zip(self.names, self.params, self.dtypes, strict=True)
        return [[name, list(p.shape), str(dtype), *layout_of(p)] for name, p, dtype in columns]

    def shards(self) -> list[list]:
        """Which part of each parameter this rank holds; empty if it holds all of them whole."""
        return [shard_of(p) for p in self.params] if self.is_sharded else []

    def name_of(self, index: int) -> str:
        """A parameter's name by its number; the number may come from a peer, and be none."""
        return self.names[index] if index < len(self.names) else f"parameter number {index}"

    def name_at(self, position: int) -> str:
        return self.names[self.index_at(position)]

    def index_at(self, position: int) -> int:
        """Which parameter the flat position belongs to (empty parameters own none)."""
        return bisect_right(self.starts, position) - 1

    def check_unchanged(self, inner: Optimizer) -> None:
        """The parameters are still those the sites agreed on.

        Raises:
            ValueError: some were added, replaced, thawed, moved or converted since, or all of them frozen.
        """
        now = _named_parameters(inner)
        if [id(p) for _, p in now] != [id(p) for p in self._given]:
            raise ValueError(
                "the inner optimizer's parameters have changed since the sites agreed on them: "
                "build a new optimizer with all of them"
            )
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"parameter {name} was frozen when the sites agreed on what is trained, and now requires "
                    f"gradients: thaw it before you build the optimizer, or build a new one"
                )
        if not any(p.requires_grad for p in self.params):
            raise ValueError(
                "all parameters that the sites agreed on have been frozen since, as a peft_config does: "
                "build the optimizer on the parameters that are trained now"
            )
        for name, p, shape, dtype in zip(self.names, self.tensors, self.shapes, self.dtypes, strict=True):
            if p.device != self.device or p.dtype != dtype or tuple(p.shape) != shape:
                raise ValueError(
                    f"parameter {name} was {dtype} {shape} on {self.device} when the sites agreed, and is "
                    f"now {p.dtype} {tuple(p.shape)} on {p.device}: convert and move the model before you "
                    f"build the optimizer"
                )

    def over(self, tensors: Sequence[Tensor]) -> "FlatParameters":
        """The same vector over other tensors of these shapes and dtypes, such as a saved state's weights; a
        ValueError if they have others."""
        if [(tuple(t.shape), t.dtype) for t in tensors] != list(zip(self.shapes, self.dtypes, strict=True)):
            raise ValueError("the tensors have other shapes or dtypes than the optimizer's parameters")
        other = copy(self)
        other.params = list(tensors)
        other._gathered = GatheredCopies([])
        return other

    def drop_gathered_copies(self) -> None:
        """Before the parameters are written: have the next forward pass read them anew."""
        self._gathered.drop()

    def of(self, indices: Sequence[int]) -> list[Tensor]:
        """The elements of some parameters, by number, as contiguous 1-D tensors; to be read only."""
        tensors = self.tensors
        return [flat for k in indices if (flat := tensors[k].reshape(-1).contiguous()).numel()]

    @contextmanager
    def pieces(self, start: int, stop: int, *, write: bool = False) -> Iterator[list[Tensor]]:
        """The parameters' elements start … stop, as 1-D tensors in order.

        Contiguous parameters are seen through views. Others are copied, and with `write` copied back.
        """
        pieces: list[Tensor] = []
        copied: list[tuple[Tensor, Tensor]] = []
        if write:
            self.drop_gathered_copies()
        for param, begin in zip(self.tensors, self.starts, strict=True):
            low, high = max(start, begin), min(stop, begin + param.numel())
            if low >= high:
                continue
            flat = param.reshape(-1).contiguous()
            if not param.is_contiguous():
                copied.append((param, flat))
            pieces.append(flat[low - begin : high - begin])
        yield pieces
        if write:
            for param, flat in copied:
                param.copy_(flat.view(param.shape))


def _named_parameters(inner: Optimizer) -> list[tuple[str, Tensor]]:
    """Each parameter once, by the name it was given (`AdamW(model.named_parameters())`) or its place.

    Names are for people; groups may use one twice (two models' "weight"), and then say whose it is.
    """
    named: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    given = [name for group in inner.param_groups for name in group.get("param_names") or []]
    is_unique = len(set(given)) == len(given)
    for g, group in enumerate(inner.param_groups):
        names = group.get("param_names") or [f"param{k}" for k in range(len(group["params"]))]
        prefix = "" if "param_names" in group and is_unique else f"group{g}."
        for name, p in zip(names, group["params"], strict=True):
            if id(p) not in seen:
                seen.add(id(p))
                named.append((prefix + name, p))
    return named


def _end(p: Tensor) -> int:
    """The address behind the last byte that a tensor's elements reach."""
    last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return p.data_ptr() + (last + 1) * p.element_size()
