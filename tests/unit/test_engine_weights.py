"""Where a checkpoint's elements lie in an engine is learnt from loaders as vLLM and SGLang have them.

tests/vllm_engine tries the same on vLLM's own models.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from loco.integrations.engines.engine_weights import (
    EngineSlice,
    first_difference,
    joined,
    learn,
    require_whole,
)

Loader = Callable[["Engine", Tensor], object]
ROWS, WIDTH, EXPERTS = 6, 4, 3


class Engine(nn.Module):
    """Parameters of the given shapes, and for each checkpoint name a loader."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], loaders: dict[str, Loader]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            values = torch.randn(shape).bfloat16()
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.loaders = loaders

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loaders[name](self, tensor)


def copied(engine: Engine, loaded: Tensor) -> None:
    engine.get_parameter("weight").data.copy_(loaded)


def to_rows(start: int, count: int = ROWS) -> Loader:
    """As vLLM's `weight_loader` of fused linear layers."""
    return lambda engine, loaded: engine.get_parameter("weight").data.narrow(0, start, count).copy_(loaded)


def checkpoint(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def loads_what_it_says(engine: Engine, tensors: dict[str, Tensor]) -> dict[str, list[EngineSlice]]:
    """Learn, with nothing changed; then writing through the places does what the loader does."""
    before = {name: parameter.clone() for name, parameter in engine.named_parameters()}
    places = learn(engine, tensors)
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.named_parameters())
    assert first_difference(places, tensors) == next(iter(tensors))
    engine.load_weights(iter(tensors.items()))
    assert first_difference(places, tensors) is None
    loaded = {name: parameter.clone() for name, parameter in engine.named_parameters()}
    for parameter in engine.parameters():
        parameter.zero_()
    for name, pieces in places.items():
        for piece in pieces:
            piece.view.copy_(tensors[name][piece.region])
    assert all(torch.equal(parameter, loaded[name]) for name, parameter in engine.named_parameters())
    return places


def whole_views(places: dict[str, list[EngineSlice]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor is there as a whole."""
    found = {name: view for name, view in joined(places, tensors).items() if isinstance(view, Tensor)}
    assert {name: view.shape for name, view in found.items()} == {n: t.shape for n, t in tensors.items()}
    return found


def test_fused_rows_are_views_into_one_weight() -> None:
    tensors = checkpoint(q=(ROWS, WIDTH), k=(2, WIDTH), v=(2, WIDTH))
    loaders = {"q": to_rows(0), "k": to_rows(ROWS, 2), "v": to_rows(ROWS + 2, 2)}
    engine = Engine({"weight": (ROWS + 4, WIDTH)}, loaders)
    views = whole_views(loads_what_it_says(engine, tensors), tensors)
    views["k"][1, 2] = 7.0
    assert engine.get_parameter("weight")[ROWS + 1, 2] == 7.0


def test_a_transposed_weight_is_a_view_of_the_checkpoints_shape() -> None:
    tensors = checkpoint(w=(ROWS, WIDTH))
    engine = Engine({"weight": (WIDTH, ROWS)}, {"w": lambda e, w: copied(e, w.t().contiguous())})
    places = loads_what_it_says(engine, tensors)
    assert places["w"][0].view.shape == (ROWS, WIDTH)


def test_heads_with_a_dimension_of_their_own_are_a_view_of_the_checkpoints_shape() -> None:
    tensors = checkpoint(w=(ROWS, WIDTH))
    engine = Engine({"weight": (2, 3, WIDTH)}, {"w": lambda e, w: copied(e, w.view(2, 3, WIDTH))})
    assert loads_what_it_says(engine, tensors)["w"][0].view.shape == (ROWS, WIDTH)


def test_padding_that_the_loader_fills_is_nobodys() -> None:
    def load(engine: Engine, loaded: Tensor) -> None:
        parameter = engine.get_parameter("weight")
        parameter[: len(loaded)].data.copy_(loaded)
        parameter[len(loaded) :].data.fill_(0)

    def load_over(engine: Engine, loaded: Tensor) -> None:
        engine.get_parameter("other").data.fill_(0)
        engine.get_parameter("other").data[:, :WIDTH].copy_(loaded)

    tensors = checkpoint(w=(ROWS, WIDTH), o=(ROWS, WIDTH))
    engine = Engine({"weight": (8, WIDTH), "other": (ROWS, 8)}, {"w": load, "o": load_over})
    loads_what_it_says(engine, tensors)


def test_experts_that_are_loaded_one_by_one_are_one_view_if_they_lie_so() -> None:
    def load(engine: Engine, loaded: Tensor) -> None:
        for expert, gate_and_up in enumerate(loaded.unbind()):
            for half, part in enumerate(gate_and_up.chunk(2, dim=0)):
                engine.get_parameter("weight").data[expert].narrow(0, 3 * half, 3).copy_(part)

    tensors = checkpoint(w=(EXPERTS, ROWS, WIDTH))
    engine = Engine({"weight": (EXPERTS, ROWS, WIDTH)}, {"w": load})
    places = loads_what_it_says(engine, tensors)
    assert len(places["w"]) == 2 * EXPERTS
    views = whole_views(places, tensors)
    assert views["w"].data_ptr() == engine.get_parameter("weight").data_ptr()
    assert views["w"].stride() == engine.get_parameter("weight").stride()


def test_pieces_in_another_order_stay_pieces() -> None:
    def load(engine: Engine, loaded: Tensor) -> None:
        first, second = loaded.chunk(2)
        engine.get_parameter("weight").data[3:].copy_(first)
        engine.get_parameter("weight").data[:3].copy_(second)

    tensors = checkpoint(w=(ROWS, WIDTH))
    engine = Engine({"weight": (ROWS, WIDTH)}, {"w": load})
    places = loads_what_it_says(engine, tensors)
    assert joined(places, tensors) == places


def test_one_rank_of_several_has_its_slice_and_no_whole_views() -> None:
    tensors = checkpoint(w=(ROWS, WIDTH))
    engine = Engine({"weight": (ROWS, 2)}, {"w": lambda e, w: copied(e, w.narrow(1, 2, 2))})
    places = loads_what_it_says(engine, tensors)
    with pytest.raises(ValueError, match="w: 12 of its 24 elements are loaded to no parameter"):
        require_whole(places, tensors)
    assert [piece.region for piece in places["w"]] == [(slice(0, ROWS), slice(2, 4))]
    assert joined(places, tensors) == places
    assert joined({"w": []}, tensors) == {"w": []}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (63,), (1, 63)])
def test_scalars_and_single_rows_have_places(shape: tuple[int, ...]) -> None:
    tensors = checkpoint(w=shape)
    engine = Engine({"weight": shape}, {"w": copied})
    whole_views(loads_what_it_says(engine, tensors), tensors)


def exponential(engine: Engine, loaded: Tensor) -> None:
    copied(engine, -torch.exp(loaded))


def scaled_later(engine: Engine, loaded: Tensor) -> None:
    copied(engine, loaded)
    engine.get_parameter("weight").data.mul_(2)


def into_the_result(engine: Engine, loaded: Tensor) -> None:
    copied(engine, loaded)
    torch.add(engine.get_parameter("weight"), 1, out=engine.get_parameter("weight"))


def several_at_once(engine: Engine, loaded: Tensor) -> None:
    torch.ops.aten._foreach_copy_([engine.get_parameter("weight")], [loaded])


def by_a_detour(engine: Engine, loaded: Tensor) -> None:
    staged = torch.empty(loaded.shape)
    staged.copy_(loaded)
    copied(engine, staged)


def every_second(engine: Engine, loaded: Tensor) -> None:
    engine.get_parameter("weight").data[:3].copy_(loaded[::2])
    engine.get_parameter("weight").data[3:].copy_(loaded[1::2])


def interleaved(engine: Engine, loaded: Tensor) -> None:
    engine.get_parameter("weight").data.copy_(loaded.view(2, 3, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH))


def interleaved_in_place(engine: Engine, loaded: Tensor) -> None:
    engine.get_parameter("weight").data.view(3, 2, WIDTH).copy_(loaded.view(2, 3, WIDTH).transpose(0, 1))


def twice(engine: Engine, loaded: Tensor) -> None:
    to_rows(0, 3)(engine, loaded[:3])
    to_rows(3, 3)(engine, loaded[:3])


def repeated(engine: Engine, loaded: Tensor) -> None:
    copied(engine, loaded[0].expand(ROWS, WIDTH))


@pytest.mark.parametrize(
    ("load", "refusal"),
    [
        (exponential, "w: the loader computes with this weight"),
        (scaled_later, "weight: the loader computes what it writes there"),
        (into_the_result, "weight: the loader computes what it writes there"),
        (several_at_once, "weight: the loader computes what it writes there"),
        (by_a_detour, "w: the loader computes with this weight"),
        (every_second, "w: the loader copies elements that are no box in it"),
        (interleaved, "w: the loader computes with this weight"),
        (interleaved_in_place, r"w: the engine keeps \[6, 4\] of it as \[3, 2, 4\]"),
        (twice, "w: the loader copies some of its elements to two places"),
        (repeated, "w: the loader copies elements that are no box in it"),
        (lambda engine, loaded: None, "nothing is loaded to 24 elements of the engine's weight"),
        (to_rows(0, 3), "size"),
        (lambda e, w: to_rows(0, 3)(e, w[:3]), "nothing is loaded to 12 elements of the engine's weight"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_refused(load: Loader, refusal: str) -> None:
    engine = Engine({"weight": (ROWS, WIDTH)}, {"w": load})
    before = engine.get_parameter("weight").clone()
    with pytest.raises((ValueError, RuntimeError), match=refusal):
        learn(engine, checkpoint(w=(ROWS, WIDTH)))
    assert torch.equal(engine.get_parameter("weight"), before)


def test_two_tensors_for_the_same_elements_are_both_named() -> None:
    engine = Engine({"weight": (ROWS, WIDTH)}, {"embed": copied, "head": copied})
    with pytest.raises(ValueError, match="embed and head are both loaded to the same elements of weight"):
        learn(engine, checkpoint(embed=(ROWS, WIDTH), head=(ROWS, WIDTH)))


def test_a_tensor_that_the_loader_skips_has_no_places() -> None:
    tensors = checkpoint(w=(ROWS, WIDTH), head=(ROWS, WIDTH))
    engine = Engine({"weight": (ROWS, WIDTH)}, {"w": copied, "head": lambda engine, loaded: None})
    places = loads_what_it_says(engine, tensors)
    assert not places["head"]
    with pytest.raises(ValueError, match="head: 24 of its 24 elements are loaded to no parameter"):
        require_whole(places, tensors)


def test_a_packed_weight_is_named() -> None:
    with pytest.raises(ValueError, match="weight is empty: the engine has packed this weight"):
        learn(Engine({"weight": (0,)}, {"w": copied}), checkpoint(w=(ROWS, WIDTH)))


def test_weights_that_were_rearranged_after_loading_are_noticed() -> None:
    tensors = checkpoint(a=(ROWS, WIDTH), b=(ROWS, WIDTH))
    engine = Engine({"weight": (2 * ROWS, WIDTH)}, {"a": to_rows(0), "b": to_rows(ROWS)})
    engine.load_weights(iter(tensors.items()))
    engine.get_parameter("weight").copy_(engine.get_parameter("weight").roll(ROWS, 0))
    assert first_difference(learn(engine, tensors), tensors) == "a"
