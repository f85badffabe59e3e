"""A view of a tensor is a box of its elements, or none."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loco.integrations.engines.boxes import box_of, elements_outside, first_overlap


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A tensor whose elements are numbered, and a view of it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    whole = torch.arange(prod(shape)).view(shape)
    part = whole
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        part = part.narrow(dim, start, draw(st.integers(1, size - start)))
        if draw(st.booleans()):
            part = part.unfold(dim, 1, draw(st.integers(1, 2))).squeeze(-1)
    part = part.permute(draw(st.permutations(range(part.ndim))))
    return whole, part.unsqueeze(0) if draw(st.booleans()) else part


@given(views())
def test_a_box_holds_the_elements_of_its_view_and_no_others(pair: tuple[Tensor, Tensor]) -> None:
    whole, part = pair
    box = box_of(part, whole)
    elements = part.flatten().sort().values
    if box is not None:
        assert torch.equal(whole[box].flatten().sort().values, elements)
    else:  # then no box holds them: the smallest one around them has more
        at = torch.stack(torch.unravel_index(elements, whole.shape))
        around = (at.amax(1) - at.amin(1) + 1).tolist()
        assert prod(around) > len(elements)


def test_overlaps_and_gaps_are_found() -> None:
    left, right = (slice(0, 3), slice(0, 2)), (slice(0, 3), slice(2, 4))
    middle = (slice(1, 2), slice(1, 3))
    assert first_overlap([left, right]) is None
    assert first_overlap([left, right, middle]) == (0, 2)
    assert elements_outside([left], torch.Size((3, 4))) == 6
    assert elements_outside([left, middle], torch.Size((3, 4))) == 5
    assert elements_outside([left, right], torch.Size((3, 4))) == 0
    assert elements_outside([], torch.Size((3, 4))) == 12
    assert elements_outside([()], torch.Size(())) == 0
