"""Where each element of a checkpoint lies in an inference engine's parameters, learnt from its own loader.

An engine renames, fuses, splits and pads what it loads: `q_proj`, `k_proj` and `v_proj` become rows of one
weight, a rank of tensor parallelism keeps its slice. Only the model's `load_weights` knows how. So it is run
once over meta tensors. A view of a meta tensor has an offset and strides like any other, and torch itself
computes them through every narrow, chunk and transpose; each `copy_` into a parameter then tells which region
of which checkpoint tensor goes to which view of the engine's memory. It is recorded, not performed. After
that a changed weight is written where it lies, without the loader, in time that depends on the changes alone.

Nothing here is of one engine: vLLM and SGLang load their models by the same convention.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loco.sync import EngineSlice

from .boxes import Box, box_of, elements_outside, first_overlap, memory_order, sizes

aten = torch.ops.aten
COPIES = (aten.clone.default, aten._to_copy.default)
CONSTANTS = (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


def learn(
    model: nn.Module, checkpoint: Mapping[str, Tensor], *, spare: Collection[str] = ()
) -> dict[str, list[EngineSlice]]:
    """Where `model` keeps each tensor of `checkpoint`; changes nothing in the model.

    A tensor that is not loaded, or not on this rank, has no places.

    Args:
        model: has `load_weights(iterable of (name, tensor))`.
        checkpoint: meta tensors will do, since only names, shapes and dtypes are looked at.
        spare: parameters to which nothing need be loaded.

    Raises:
        ValueError: the loader computes with a weight instead of copying it; or it copies an element to two
            places, or two to the same; or it loads nothing to some element of a parameter.
    """
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise ValueError(f"{name} is empty: the engine has packed this weight, and none can be written")
    shapes = {name: whole.to("meta") for name, whole in checkpoint.items()}
    recorder = _Recorder(model, shapes, spare)
    engine: Any = model  # an nn.Module has no load_weights
    with torch.no_grad(), recorder:
        engine.load_weights(iter(shapes.items()))
    for target in recorder.targets:
        target.check()
    for name, pieces in recorder.places.items():
        if first_overlap([piece.region for piece in pieces]):
            raise ValueError(f"{name}: the loader copies some of its elements to two places")
    return recorder.places


def require_whole(places: Mapping[str, list[EngineSlice]], checkpoint: Mapping[str, Tensor]) -> None:
    """Every element of every tensor has a place.

    Raises:
        ValueError: names the first tensor of which that is not so.
    """
    for name, whole in checkpoint.items():
        missing = elements_outside([piece.region for piece in places[name]], whole.shape)
        if missing:
            raise ValueError(
                f"{name}: {missing:,} of its {whole.numel():,} elements are loaded to no parameter"
            )


def first_difference(places: Mapping[str, list[EngineSlice]], checkpoint: Mapping[str, Tensor]) -> str | None:
    """The first tensor of the checkpoint, by name, that the engine does not hold bit for bit in these places.

    Some engines rearrange weights after they have been loaded, and the loader doesn't know: then the places
    are wrong, and this is how to notice.
    """
    for name, pieces in places.items():
        for piece in pieces:
            loaded = checkpoint[name][piece.region].to(piece.view.device, piece.view.dtype)
            if not torch.equal(_bits(loaded), _bits(piece.view)):
                return name
    return None


def joined(
    places: Mapping[str, list[EngineSlice]], checkpoint: Mapping[str, Tensor]
) -> dict[str, Tensor | list[EngineSlice]]:
    """For each tensor one view of its shape, where the engine has it as a whole; else its places."""
    return {name: _joined(places[name], whole.shape) for name, whole in checkpoint.items()}


@dataclass
class _Target:
    """A parameter or a buffer, and what the loader writes to it."""

    name: str
    tensor: Tensor
    is_needed: bool
    written: list[tuple[str, Box]] = field(default_factory=list)  # from which checkpoint tensor
    padded: list[Box] = field(default_factory=list)  # a constant is written, perhaps before the weights

    def check(self) -> None:
        boxes = [box for _, box in self.written]
        if pair := first_overlap(boxes):
            one, other = (self.written[index][0] for index in pair)
            raise ValueError(f"{one} and {other} are both loaded to the same elements of {self.name}")
        missing = elements_outside(boxes + self.padded, self.tensor.shape) if self.is_needed else 0
        if missing:
            raise ValueError(f"nothing is loaded to {missing:,} elements of the engine's {self.name}")


class _Recorder(TorchDispatchMode):
    """Sees each operation of a loader: follows views of the checkpoint, and records what is copied where."""

    def __init__(self, model: nn.Module, checkpoint: Mapping[str, Tensor], spare: Collection[str]) -> None:
        super().__init__()
        self.places: dict[str, list[EngineSlice]] = {name: [] for name in checkpoint}
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        # Others that share the memory of such a one are its elements once more, as MLA's are of kv_b_proj.
        filling = [(_memory(one), name) for name, one in parameters.items() if _fills_its_memory(one)]
        whole = dict(reversed(filling))  # the first of each
        self.targets = [
            _Target(name, one, name not in spare and whole.get(_memory(one), name) == name)
            for name, one in parameters.items()
        ]
        self.targets += [_Target(name, one, False) for name, one in model.named_buffers()]
        self._sources = {_memory(whole): (name, whole) for name, whole in checkpoint.items()}
        self._targets: defaultdict[int, list[_Target]] = defaultdict(list)
        for one in self.targets:
            self._targets[_memory(one.tensor)].append(one)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for one in tree_leaves((args[:1], kwargs.get("out"))):
                if target := self._target(one):
                    self._record(func, target, one, *args[1:])
                    return args[0]
        sources = [one for one in tree_leaves((args, kwargs)) if self._is_source(one)]
        if sources and func in COPIES:
            return aten.alias(sources[0])  # the same elements, wherever they are copied to
        if sources and not func.is_view:
            name, _ = self._sources[_memory(sources[0])]
            raise ValueError(f"{name}: the loader computes with this weight ({func}) instead of copying it")
        return func(*args, **kwargs)

    def _record(self, func: Any, target: _Target, written: Tensor, *args: Any) -> None:
        if not written.numel():
            return
        box = box_of(written, target.tensor)
        if box is None:
            raise ValueError(f"{target.name}: the loader writes to elements that are no box in it")
        if func in CONSTANTS:
            target.padded.append(box)
            return
        if func is not aten.copy_.default or not self._is_source(args[0]):
            raise ValueError(f"{target.name}: the loader computes what it writes there ({func})")
        name, whole = self._sources[_memory(args[0])]
        target.written.append((name, box))
        self.places[name].append(_slice(name, args[0].expand(written.shape), whole, written))

    def _is_source(self, one: Any) -> bool:
        return isinstance(one, Tensor) and _memory(one) in self._sources

    def _target(self, one: Any) -> _Target | None:
        """Whose memory this is."""
        same = self._targets.get(_memory(one), []) if isinstance(one, Tensor) else []
        holding = (target for target in same if box_of(one, target.tensor) is not None)
        return next(holding, same[0] if same else None)


def _memory(tensor: Tensor) -> int:
    """Which storage: also of meta tensors, which have no address."""
    return tensor.untyped_storage()._cdata


def _fills_its_memory(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _slice(name: str, source: Tensor, whole: Tensor, written: Tensor) -> EngineSlice:
    """Of a view of a checkpoint tensor that is copied to `written`, which has the same shape."""
    region = box_of(source, whole)
    if region is None:
        raise ValueError(f"{name}: the loader copies elements that are no box in it")
    in_order = written.squeeze().permute(memory_order(source.squeeze()))
    try:
        return EngineSlice(region, in_order.view(sizes(region)))
    except RuntimeError as error:
        raise ValueError(
            f"{name}: the engine keeps {sizes(region)} of it as {list(written.shape)}"
        ) from error


def _joined(pieces: list[EngineSlice], shape: torch.Size) -> Tensor | list[EngineSlice]:
    """The view over all pieces. The first piece and its neighbour in each dimension tell the strides."""
    by_start = {tuple(cut.start for cut in piece.region): piece for piece in pieces}
    first = by_start.get((0,) * len(shape))
    if first is None or elements_outside([piece.region for piece in pieces], shape):
        return pieces
    strides = list(first.view.stride())
    for dim, size in enumerate(first.view.shape):
        start = tuple(size if other == dim else 0 for other in range(len(shape)))
        if size == 1 and start in by_start:
            strides[dim] = int(by_start[start].view.storage_offset() - first.view.storage_offset())
    try:
        whole = first.view.as_strided(shape, strides)
    except RuntimeError:  # it would reach over the end of the memory
        return pieces
    return whole if all(_is_same(whole[piece.region], piece.view) for piece in pieces) else pieces


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.squeeze().stride() == other.squeeze().stride()


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: −0.0 is not 0.0, and NaN is NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)
