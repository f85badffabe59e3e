"""The model: a forward pass that sees the BF16 cast of its weights and nothing else."""

from typing import Any

import pytest
import torch

from experiments.models.model import ByteTransformer
from experiments.settings.config import TransformerConfig

TINY = TransformerConfig(dim=16, layers=2, heads=2, context=8)
TOKENS = torch.arange(3 * 8).reshape(3, 8)
WEIGHING = torch.randn(3, 8, 256, generator=torch.Generator().manual_seed(7))  # makes a loss of logits


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
    (model(TOKENS) * WEIGHING).mean().backward()
    (rounded(TOKENS) * WEIGHING).mean().backward()
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
    model = on_the_grid()
    with torch.no_grad():
        seen = model(TOKENS)
        for place in range(TOKENS.shape[1]):
            changed = TOKENS.clone()
            changed[:, place] += 100
            now = model(changed)
            assert torch.equal(now[:, :place], seen[:, :place])
            assert (now[:, place:] != seen[:, place:]).any(dim=-1).all()  # and all later ones look back


# Products of one row and of several are summed in different orders: FP32's rounding, on logits of about 1.
ROUNDING: Any = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_tokens_one_at_a_time_get_the_logits_of_a_whole_forward_pass(at_once: int) -> None:
    model = on_the_grid()
    with torch.no_grad():
        whole = model(TOKENS)
        logits, past = model.extend(TOKENS[:, :at_once], None)
        torch.testing.assert_close(logits, whole[:, at_once - 1], **ROUNDING)
        for place in range(at_once, TOKENS.shape[1]):
            logits, past = model.extend(TOKENS[:, place : place + 1], past)
            torch.testing.assert_close(logits, whole[:, place], **ROUNDING)
        assert (whole[:, 1:] - whole[:, :-1]).abs().max() > 0.1  # another place's would not do


def test_sequences_of_a_past_are_selected_and_each_copy_goes_its_own_way() -> None:
    model = on_the_grid()
    rows = torch.tensor([0, 0, 2, 2, 2])
    following = torch.arange(5)[:, None] + 40  # another one behind each copy
    with torch.no_grad():
        _, past = model.extend(TOKENS[:, :4], None)
        logits, _ = model.extend(following, model.select(past, rows))
        whole = torch.cat([TOKENS[rows, :4], following], dim=1)
        torch.testing.assert_close(logits, model(whole)[:, -1], **ROUNDING)


def test_several_tokens_behind_a_past_are_refused() -> None:
    model = on_the_grid()
    _, past = model.extend(TOKENS[:, :4], None)
    with pytest.raises(ValueError, match="one token at a time behind a past, got 2"):
        model.extend(TOKENS[:, 4:6], past)


def test_text_comes_back_from_its_tokens() -> None:
    model = on_the_grid()
    assert model.decode(model.encode("9-31=-22 é")) == "9-31=-22 é"
    assert model.encode("\n") == [model.end]
