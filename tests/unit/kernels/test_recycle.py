"""Memory that one round leaves for the next: taken again, never twice at once, and given back in the end."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from loco.kernels.recycle import Recycler, joined, recycled

MIB = 1 << 20


def made(memory: Recycler, numel: int = MIB) -> Tensor:
    with memory.used():
        return recycled(numel, torch.uint8)


def test_what_was_given_back_is_taken_again() -> None:
    memory = Recycler()
    first = made(memory)
    first.fill_(7)
    at = first.data_ptr()
    view = first[10:20]
    del first
    assert made(memory).data_ptr() != at  # a view still holds it
    assert view.tolist() == [7] * 10
    del view
    again = [made(memory), made(memory)]
    assert at in {tensor.data_ptr() for tensor in again}
    assert again[0].data_ptr() != again[1].data_ptr()


def test_other_sizes_of_one_capacity_and_other_types_take_it_too() -> None:
    memory = Recycler()
    at = made(memory).data_ptr()
    with memory.used():
        smaller = recycled(MIB // 8 - 1, torch.int64)
    assert smaller.data_ptr() == at
    assert (smaller.dtype, smaller.shape) == (torch.int64, (MIB // 8 - 1,))


def test_room_of_which_little_is_written_is_never_memory_that_was_filled() -> None:
    """Nor the other way round: where they took turns, all of it came to be used."""
    memory = Recycler()
    filled = made(memory).data_ptr()
    with memory.used():
        room = recycled(MIB, torch.uint8, at_most=True).data_ptr()
    assert room != filled
    assert made(memory).data_ptr() == filled
    with memory.used():
        assert recycled(MIB, torch.uint8, at_most=True).data_ptr() == room


def test_what_is_not_taken_for_some_rounds_goes_back_to_the_system() -> None:
    memory = Recycler()
    made(memory)
    held = [m for free in memory._free.values() for _, m in free]
    assert len(held) == 1
    for _ in range(8):
        made(memory, 4 * MIB)  # another size, again and again
    left = [len(m) for free in memory._free.values() for _, m in free]
    assert left == [4 * MIB]


def test_it_goes_with_its_recycler_and_tensors_may_outlive_it() -> None:
    memory = Recycler()
    kept, gone = made(memory), weakref.ref(memory)
    kept.fill_(3)
    del memory
    gc.collect()
    assert int(kept.sum()) == 3 * MIB
    del kept
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_small_tensors_and_those_of_no_recycler_are_like_any_other(numel: int) -> None:
    memory = Recycler()
    assert made(memory, numel).shape == (numel,)
    assert not memory._free
    assert recycled(numel * 1000, torch.float32).shape == (numel * 1000,)


def test_joined_tensors_are_those_of_cat() -> None:
    parts = [torch.randn(size) for size in (3, 0, 100_000)]
    with Recycler().used():
        assert torch.equal(joined(parts), torch.cat(parts))
    assert torch.equal(joined(parts), torch.cat(parts))
