"""The flat view drops nothing: buckets that lose the last tensor, or one larger than the bucket, are the
classic mistake."""

from typing import Any

import torch
from scripted import parameters
from torch import nn

from loco.parameters.flat_parameters import FlatParameters


def layout_of(*params: torch.Tensor) -> FlatParameters:
    return FlatParameters(torch.optim.SGD(list(params), lr=0.1))


def test_every_window_of_the_flat_vector_is_covered_once_and_in_order() -> None:
    """Sizes 40, 40 and 20 in windows of 60, and all other windows: no element is lost or seen twice."""
    params = [nn.Parameter(torch.arange(n, dtype=torch.float32)) for n in (40, 0, 40, 1, 20)]
    whole = torch.cat([p.detach() for p in params])
    layout = layout_of(*params)
    assert layout.numel == 101
    for width in (1, 7, 20, 60, 100, 101):
        seen = []
        for start in range(0, 101, width):
            with layout.pieces(start, min(start + width, 101)) as pieces:
                seen += pieces
        assert torch.equal(torch.cat(seen), whole), width


def test_pieces_are_in_logical_order_and_written_back() -> None:
    params = parameters(seed=0, numel=30)
    assert not params[0].is_contiguous()
    expected = torch.cat([p.detach().reshape(-1) for p in params])
    layout = layout_of(*params)
    with layout.pieces(3, 20, write=True) as pieces:
        assert torch.equal(torch.cat(pieces), expected[3:20])
        for piece in pieces:
            piece.neg_()
    expected[3:20] *= -1
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in params]), expected)


def test_a_round_that_fails_writes_no_piece_back() -> None:
    params = parameters(seed=0, numel=30)
    before = [p.detach().clone() for p in params]
    try:
        with layout_of(*params).pieces(0, 12, write=True) as pieces:
            pieces[0].zero_()  # a copy, since the matrix is not contiguous
            raise ConnectionError
    except ConnectionError:
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))


def test_names_that_two_groups_share_hide_no_parameter() -> None:
    """torch takes two models' `named_parameters()`, each with a "weight", as two groups."""
    nets = [nn.Linear(2, 3), nn.Linear(3, 4)]
    inner = torch.optim.SGD([{"params": list(net.named_parameters())} for net in nets], lr=0.1)
    layout = FlatParameters(inner)
    assert layout.numel == 9 + 16
    assert layout.names == ["group0.weight", "group0.bias", "group1.weight", "group1.bias"]


def test_names_of_one_model_in_several_groups_stay_what_they_are() -> None:
    """As where biases are not decayed."""
    weight, bias = nn.Linear(2, 3).named_parameters()
    groups: list[Any] = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}]
    assert FlatParameters(torch.optim.SGD(groups, lr=0.1)).names == ["weight", "bias"]


def test_a_position_belongs_to_the_parameter_that_holds_it() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (2, 0, 3)]
    layout = layout_of(*params)
    assert [layout.name_at(k) for k in range(5)] == ["group0.param0"] * 2 + ["group0.param2"] * 3
