"""The specification of what an exchange does with entries: it adds them up, writes them and checks them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import ulp
from .types import BLOCK, Entries, MalformedError, all_finite


def add_up(contributions: Sequence[Entries], numel: int, out: Tensor | None = None) -> Entries:
    """((0 + c_0) + c_1) + …, in the order given.

    The result has the entries that occur in any contribution, or all elements. A contribution adds nothing
    where it has no entry.

    Args:
        out: where the values of all elements are put; may be where one of the contributions has them.
    """
    device = contributions[0].values.device
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    if contributions[0].starts is None:
        for contribution in contributions:
            total += contribution.values
        return Entries.whole(total if out is None else out.copy_(total))
    present = torch.zeros(numel, dtype=torch.bool, device=device)
    for contribution in contributions:
        assert contribution.starts is not None
        where = contribution.indices()
        total[where] += contribution.values[slice(*contribution.ends)]
        present[where] = True
    where = present.nonzero().view(-1)
    return Entries.at(where, total[where], numel)


def add_and_split(contributions: Sequence[Entries], anchor: Tensor, margin: float) -> tuple[Entries, Entries]:
    """The sums larger than F · ulp(θ), which go back to all sites, and the others, which their owner keeps.

    Args:
        margin: F.
    """
    numel = anchor.numel()
    sums = add_up(contributions, numel)
    if sums.starts is None:
        small = sums.values.abs() <= margin * ulp(anchor)
        stay = (small & (sums.values != 0)).nonzero().view(-1)
        return Entries.whole(sums.values.masked_fill(small, 0.0)), Entries.at(stay, sums.values[stay], numel)
    where = sums.indices()
    large = sums.values.abs() > margin * ulp(anchor[where])
    leave, stay = (Entries.at(where[kept], sums.values[kept], numel) for kept in (large, ~large))
    return leave, stay


def write_blocks(entries: Entries, ahead: int) -> Tensor:
    """The values; their offsets; how many entries each block has, in 1 byte, or in 2 if a block has all 256.

    -> uint8

    Args:
        ahead: bytes of room in front of them, which may hold anything.
    """
    assert entries.starts is not None
    assert entries.offsets is not None
    first, last = entries.ends
    counts = entries.starts.diff()
    width = torch.int16 if counts.numel() and int(counts.max()) > 255 else torch.uint8
    room = torch.empty(ahead, dtype=torch.uint8, device=counts.device)
    parts = (room, entries.values[first:last], entries.offsets[first:last], counts.to(width))
    return torch.cat([part.view(torch.uint8) for part in parts])


def read_blocks(body: Tensor, count: int, numel: int) -> Entries:
    """What `write_blocks` wrote of `count` finite entries of a vector of `numel` elements.

    Raises:
        MalformedError: these are not bytes that it writes; they may be any.
    """
    counts = block_counts(body, count, numel)
    offsets, values = body[4 * count : 5 * count], body[: 4 * count].view(torch.float32)
    return Entries(_checked_starts(counts.long(), offsets, values, numel), offsets, values)


def block_counts(body: Tensor, count: int, numel: int) -> Tensor:
    """How many entries each block is said to have. -> [blocks] uint8 or int16

    Raises:
        MalformedError: `body` has not the size of so many entries, or has counts of 2 bytes where 1 will do.
    """
    blocks = -(-numel // BLOCK)
    counts = body[5 * count :]
    if count > numel or body.numel() not in (5 * count + blocks, 5 * count + 2 * blocks):
        raise MalformedError(f"{body.numel()} bytes can't hold {count} of {numel} entries")
    if counts.numel() == blocks:
        return counts
    counts = counts.clone().view(torch.int16)  # bytes start anywhere in a message; a copy aligns them
    if not bool((counts > 255).any()):
        raise MalformedError("block counts are written wider than needed")
    return counts


def _checked_starts(counts: Tensor, offsets: Tensor, values: Tensor, numel: int) -> Tensor:
    """Where each block's entries start, given how many each block has. -> [blocks + 1] int64"""
    blocks, count = counts.numel(), values.numel()
    if blocks and not 0 <= int(counts.min()) <= int(counts.max()) <= BLOCK:
        raise MalformedError(f"a block of {BLOCK} elements with more entries than that")
    starts = torch.zeros(blocks + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=starts[1:])
    if int(starts[-1]) != count:
        raise MalformedError(f"{int(starts[-1])} positions where the header says {count}")

    # Offsets increase inside a block; only the first of a block may be less than or equal to the one before.
    falls = offsets[1:] <= offsets[:-1]
    first_of_block = starts[1:-1]
    inside = (first_of_block > 0) & (first_of_block < count)
    falls[first_of_block[inside] - 1] = False
    if bool(falls.any()):
        raise MalformedError("the positions of a block are not in order")
    if count and numel % BLOCK and int(starts[-2]) < count and int(offsets[-1]) >= numel % BLOCK:
        raise MalformedError(f"a position lies outside a vector of {numel} elements")
    if not all_finite(values):
        raise MalformedError("a value is infinite or NaN")
    return starts
