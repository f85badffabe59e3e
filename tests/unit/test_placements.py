"""Which elements of a tensor its shards hold."""

import pytest
import torch

from loco.parameters.placements import describe_placement, held_elements, placement_of


@pytest.mark.parametrize("length", [1, 3, 5, 7, 8, 10, 16])
@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_fsdp_over_tensor_parallel_shards_is_a_strided_shard(length: int, outer: int, inner: int) -> None:
    """FSDP2 chunks what tensor parallelism has chunked; together the shards hold every element once."""
    whole = torch.arange(length * 3).view(length, 3)

    def chunk(tensor: torch.Tensor, count: int, at: int) -> torch.Tensor:
        pieces = tensor.chunk(count)
        return pieces[at] if at < len(pieces) else tensor[:0]

    placements = [["StridedShard", 0, inner], ["Shard", 0]]
    sizes, parts = [], []
    for first in range(outer):
        for second in range(inner):
            expected = chunk(chunk(whole, inner, second), outer, first)
            found = held_elements([length, 3], placements, [outer, inner], [[0, first], [1, second]])
            sizes.append((expected.shape, found.shape))
            parts.append((expected, found))
    assert torch.cat([found.flatten() for _, found in parts]).sort().values.equal(whole.flatten())
    if all(a == b for a, b in sizes):
        assert all(torch.equal(a, b) for a, b in parts)
    else:
        assert length % (outer * inner)


def test_shards_along_other_dimensions_and_replicas() -> None:
    whole = torch.arange(4 * 6).view(4, 6)
    found = held_elements([4, 6], [["Replicate"], ["Shard", 1]], [2, 3], [[1, 2]])
    assert torch.equal(found, whole[:, 4:])
    assert torch.equal(held_elements([4, 6], [["Replicate"]], [2], []), whole)
    assert held_elements([1], [["Shard", 0]], [2], [[0, 1]]).numel() == 0


def test_a_placement_is_described_and_read_back() -> None:
    for described in (["Replicate"], ["Shard", 1], ["StridedShard", 0, 2]):
        assert describe_placement(placement_of(described)) == described
    with pytest.raises(ValueError, match="which loco does not write"):
        placement_of(["Shard", "0"])
