"""The model: a forward pass that sees the BF16 cast of its weights and nothing else."""

import pytest
import torch

from experiments.config import ModelConfig
from experiments.model import ByteTransformer

TINY = ModelConfig(dim=16, layers=2, heads=2, context=8)
TOKENS = torch.arange(3 * 9, dtype=torch.uint8).reshape(3, 9)


def on_the_grid() -> ByteTransformer:
    model = ByteTransformer(TINY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    return model


@pytest.mark.parametrize("name", [name for name, _ in ByteTransformer(TINY).named_parameters()])
def test_the_forward_pass_sees_only_the_bf16_cast_of_every_weight(name: str) -> None:
    model = on_the_grid()
    weight = dict(model.named_parameters())[name]
    with torch.no_grad():
        seen = model(TOKENS)
        original = weight.clone()
        weight.mul_(1 + 2**-10)  # below half a BF16 ulp: the cast is the same
        assert not torch.equal(weight, original)
        assert torch.equal(model(TOKENS), seen)
        weight.copy_(original).mul_(1 + 2**-6)  # more than an ulp
        weight.view(-1)[::2] *= 1 + 2**-5  # a norm would undo a common factor
        assert not torch.equal(model(TOKENS), seen)


def test_gradients_pass_the_rounding_unchanged_and_in_fp32() -> None:
    """Straight through: the gradient at w is the gradient at bf16(w), not itself rounded to BF16."""
    torch.manual_seed(1)
    model, rounded = ByteTransformer(TINY), on_the_grid()
    model(TOKENS).backward()
    rounded(TOKENS).backward()
    finer = 0
    for mine, theirs in zip(model.parameters(), rounded.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
        finer += int((mine.grad != mine.grad.to(torch.bfloat16)).sum())
    assert finer > 0


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    first = ByteTransformer(TINY, seed=3).state_dict()
    torch.manual_seed(6)
    again, other = ByteTransformer(TINY, seed=3).state_dict(), ByteTransformer(TINY, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding"], other["embedding"])


def test_no_byte_is_predicted_from_itself_or_from_later_ones() -> None:
    """What one more byte adds to the loss is −log of a probability: over all bytes they sum to one.

    They would not if an earlier prediction changed when the model sees one byte more.
    """
    model = on_the_grid()
    sequence = TOKENS[:1].clone()  # [1, 9]: 8 predictions
    with torch.no_grad():
        model.embedding.mul_(32)  # an untrained model has next to no opinion
        before = 7 * model(sequence[:, :-1]).double()
        probabilities = []
        for byte in range(256):
            sequence[:, -1] = byte
            probabilities.append((before - 8 * model(sequence).double()).exp())
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-4)  # FP32 losses
    assert max(probabilities) > 3 / 256
