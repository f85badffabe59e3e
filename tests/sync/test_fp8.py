"""FP8 in checkpoint layout: what arrives is what quantising the new weights gives, scales included."""

from pathlib import Path

import pytest
import torch
from published import same_bits
from torch import Tensor

from loco.kernels import reference
from loco.sync import Publisher, Subscriber, fp8_checkpoint
from loco.sync.weights.fp8 import quantise_blocks


def by_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same, block by block."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[at].abs().float().max().clamp(1e-4) / 448
            values[at] = (weight[at].float() * (1.0 / scales[i, j])).to(torch.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (300, 129), (1, 1), (5, 260)])
def test_blocks_are_quantised_as_receivers_do(shape: tuple[int, int]) -> None:
    weight = (torch.randn(shape) * 0.02).bfloat16()
    weight[0, 0] = 0
    values, scales = quantise_blocks(weight)
    same_bits({"v": values, "s": scales}, dict(zip("vs", by_blocks(weight), strict=True)))
    assert not torch.isnan(quantise_blocks(torch.zeros(shape))[0].float()).any()


def test_a_receiver_of_fp8_holds_the_quantised_new_weights(tmp_path: Path) -> None:
    trained = {"q_proj.weight": torch.randn(200, 300) * 0.02, "norm.weight": torch.ones(300)}
    engine = {
        "q_proj.weight": torch.zeros(200, 300, dtype=torch.float8_e4m3fn),
        "q_proj.weight_scale_inv": torch.zeros(2, 3),
        "norm.weight": torch.zeros(300, dtype=torch.bfloat16),
    }
    publisher = Publisher(fp8_checkpoint(trained), tmp_path)
    subscriber = Subscriber(engine, tmp_path)
    for step in range(4):
        published = publisher.publish()
        subscriber.update()
        subscriber.verify()
        rounded = reference.cast(trained["q_proj.weight"], torch.bfloat16)
        values, inverse = by_blocks(rounded)
        same_bits(engine, {
            "q_proj.weight": values,
            "q_proj.weight_scale_inv": inverse,
            "norm.weight": reference.cast(trained["norm.weight"], torch.bfloat16),
        })  # fmt: skip
        if step:
            assert published.patch_bytes < 0.2 * published.dense_bytes
        for tensor in trained.values():
            tensor.mul_(1 + 1e-3 * torch.randn(tensor.shape))
