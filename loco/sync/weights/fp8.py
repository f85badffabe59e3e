"""Weights as FP8 checkpoints have them: e4m3, with one FP32 scale for each block of 128 × 128."""

from collections.abc import Callable

import torch
from torch import Tensor

from .tensors import SCALE, Named, tensors_of

BLOCK = 128
LARGEST = 448.0  # of e4m3
LEAST = 1e-4  # a block of zeros has a scale, too
NOT_QUANTISED = ("embed", "lm_head", "norm", "gate.weight")  # the last are routers to experts
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepGEMM's `per_block_cast_to_fp8`: scale = amax / 448, values = w · (1 / scale).

    -> e4m3 of the weight's shape, and the scales, [⌈rows / 128⌉, ⌈columns / 128⌉] float32
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32, device=weight.device)
    for k in range(scales.shape[0]):  # a row of blocks at a time, so that the temporaries stay small
        strip = weight[k * BLOCK : (k + 1) * BLOCK].detach()
        padded = torch.nn.functional.pad(strip, (0, -columns % BLOCK)).view(strip.shape[0], -1, BLOCK)
        scale = padded.abs().float().amax((0, 2)).clamp(LEAST) / LARGEST
        scaled = padded * (1.0 / scale)[:, None]
        values[k * BLOCK : (k + 1) * BLOCK] = scaled.view(strip.shape[0], -1)[:, :columns].to(values.dtype)
        scales[k] = scale
    return values, scales


def fp8_checkpoint(
    source: Named,
    *,
    dtype: torch.dtype = torch.bfloat16,
    skip: Callable[[str], bool] = lambda name: any(part in name for part in NOT_QUANTISED),
    quantise: Quantise = quantise_blocks,
) -> Callable[[], dict[str, Tensor]]:
    """A source for `Publisher` whose receivers hold FP8: every matrix is quantised at each version, as they
    would, and published as `name` and `name_scale_inv`. So what they hold is what quantising the new weights
    gives, bit for bit.

    Args:
        source: as of `Publisher`.
        dtype: that FP32 weights are rounded to before they are quantised, as in a checkpoint that a receiver
            loads.
        skip: of a name, whether that tensor stays as it is.
        quantise: of a matrix, its values and scales.
    """

    def read() -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors_of(source).items():
            if tensor.dim() != 2 or not tensor.is_floating_point() or skip(name):
                found[name] = tensor
                continue
            rounded = tensor if tensor.dtype != torch.float32 else tensor.to(dtype)
            found[name], found[name + SCALE] = quantise(rounded)
        return found

    return read
