"""What SparseLoCo sends: the largest elements of every chunk, in 2 bits each, packed to the bit.

A payload's size is known before it travels, so no headers go with it:

    levels    4 FP32 for each tensor that has elements
    indices   12 bits each, two in 3 bytes: positions in their chunks
    codes     2 bits each, four in a byte: which level
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

SIDE = 64
CHUNK = SIDE * SIDE  # elements
LEVELS = 4
INDEX_BITS, CODE_BITS = 12, 2
RANGE_IN_SIGMAS = 6  # the authors' setting for any number of levels


@dataclass(frozen=True)
class Chunks:
    """All chunks of one size, m of n elements, of each of which k are sent."""

    positions: Tensor  # [m, n] int64, in the flat vector
    tensors: Tensor  # [m] int64, the number of the tensor each is of
    k: int


@dataclass(frozen=True)
class Plan:
    """Which elements form a chunk, and so how many are sent: the same on all sites and in all rounds."""

    groups: list[Chunks]  # by size, in the order in which the sizes first appear
    tensor_of: Tensor  # [entries] int64
    num_tensors: int  # that have elements

    @property
    def entries(self) -> int:
        return self.tensor_of.numel()

    @property
    def parts(self) -> tuple[int, int, int]:
        """Bytes of the levels, the indices and the codes."""
        indices, codes = (-(-bits * self.entries // 8) for bits in (INDEX_BITS, CODE_BITS))
        return 4 * LEVELS * self.num_tensors, indices, codes

    def to_flat(self, indices: Tensor) -> Tensor:
        """Positions in the flat vector of indices in the chunks."""
        parts = indices.split([group.positions.shape[0] * group.k for group in self.groups])
        pairs = zip(self.groups, parts, strict=True)
        return torch.cat([g.positions.gather(1, part.view(-1, g.k)).view(-1) for g, part in pairs])


def plan_chunks(shapes: list[tuple[int, ...]], k: int, device: torch.device) -> Plan:
    """Cut tensors that lie one behind the other in a flat vector.

    A matrix is cut into blocks of 64×64, smaller at its last rows and columns; another tensor into runs of
    4096 in flat order, the last one shorter. A chunk of n elements sends n/4096 of k, rounded, at least one.
    """
    by_size: dict[int, list[tuple[Tensor, int]]] = {}
    start = number = 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        if not numel:
            continue
        flat = torch.arange(start, start + numel)
        cut = list(flat.split(CHUNK))
        if len(shape) == 2:
            rows, columns = (range(0, side, SIDE) for side in shape)
            matrix = flat.view(shape)
            cut = [matrix[r : r + SIDE, c : c + SIDE].reshape(-1) for r, c in product(rows, columns)]
        for positions in cut:
            by_size.setdefault(positions.numel(), []).append((positions, number))
        start, number = start + numel, number + 1
    if not number:
        raise ValueError("the parameters have no elements, so there is nothing to synchronise")
    groups = []
    for n, chunks in by_size.items():
        positions = torch.stack([positions for positions, _ in chunks]).to(device)
        tensors = torch.tensor([tensor for _, tensor in chunks], device=device)
        groups.append(Chunks(positions, tensors, max(1, (n * k + CHUNK // 2) // CHUNK)))
    tensor_of = torch.cat([group.tensors.repeat_interleave(group.k) for group in groups])
    return Plan(groups, tensor_of, number)


def top_k(flat: Tensor, plan: Plan) -> Tensor:
    """The largest elements of each chunk by magnitude -> [entries] int64, their indices in the chunks."""
    largest = [flat[g.positions].abs_().topk(g.k, dim=1, sorted=False).indices for g in plan.groups]
    return torch.cat([indices.view(-1) for indices in largest])


def uniform_codes(values: Tensor, tensor_of: Tensor, num_tensors: int) -> Tensor:
    """Steps of equal width around the mean of what a tensor sends, as in the authors' code:

    code = round((v − mean) / (6σ / 4)) + 2, between 0 and 3
    """
    count = _sums(torch.ones_like(values), tensor_of, num_tensors)
    centred = values - (_sums(values, tensor_of, num_tensors) / count)[tensor_of]
    sigma = (_sums(centred.square(), tensor_of, num_tensors) / (count - 1).clamp(min=1)).sqrt()
    step = RANGE_IN_SIGMAS * sigma / LEVELS
    step = torch.where(step == 0, 1.0, step)
    codes = (centred / step[tensor_of]).round_().add_(LEVELS // 2).clamp_(0, LEVELS - 1)
    return codes.nan_to_num_().long()


def signed_codes(values: Tensor, tensor_of: Tensor, num_tensors: int) -> Tensor:
    """A bit for the sign and one for magnitudes above the tensor's mean magnitude.

    The largest of a chunk leave a gap around zero, where one of the four uniform steps lies, and another
    one is beyond nearly all of them. This uses all four, and errs by a third or more less in as many bytes.
    """
    magnitudes = values.abs()
    count = _sums(torch.ones_like(values), tensor_of, num_tensors)
    mean = _sums(magnitudes, tensor_of, num_tensors) / count
    return (values > 0).long() * 2 + (magnitudes > mean[tensor_of])


QUANTISERS = {"uniform": uniform_codes, "signed": signed_codes}


def quantise(values: Tensor, tensor_of: Tensor, num_tensors: int, quantiser: str) -> tuple[Tensor, Tensor]:
    """2 bits for a value. The level of a code is the mean of those values of the tensor that have it.

    -> codes [entries] int64, levels [num_tensors, 4] FP32, 0 where no value has the code.
    """
    exact = values.double()  # in FP32, sums over millions of values would lose what tells levels apart
    codes = QUANTISERS[quantiser](exact, tensor_of, num_tensors)
    cell, cells = tensor_of * LEVELS + codes, num_tensors * LEVELS
    count = _sums(torch.ones_like(exact), cell, cells)
    return codes, (_sums(exact, cell, cells) / count.clamp(min=1)).float().view(-1, LEVELS)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits -> uint8, one behind the other, low bits first."""
    apart = numbers.cpu()[:, None] >> torch.arange(bits) & 1
    return torch.from_numpy(np.packbits(apart.to(torch.uint8).numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    apart = np.unpackbits(packed.cpu().numpy(), count=count * bits, bitorder="little")
    return torch.from_numpy(apart).view(count, bits).long() @ (1 << torch.arange(bits))


def pack(indices: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    """-> uint8, the payload as the module's docstring lays it out."""
    packed = pack_bits(indices, INDEX_BITS), pack_bits(codes, CODE_BITS)
    return torch.cat([levels.cpu().reshape(-1).view(torch.uint8), *packed])


def unpack(payload: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """-> indices, codes, levels, as `pack` was given them."""
    levels, indices, codes = payload.split(plan.parts)
    device = plan.tensor_of.device
    return (
        unpack_bits(indices, INDEX_BITS, plan.entries).to(device),
        unpack_bits(codes, CODE_BITS, plan.entries).to(device),
        levels.clone().view(torch.float32).view(-1, LEVELS).to(device),
    )


def _sums(values: Tensor, of: Tensor, count: int) -> Tensor:
    """The sum of the values that are of each number below `count`."""
    return values.new_zeros(count).index_add_(0, of, values)
