"""Answers are sampled with the model's probabilities, and said to be sampled with those."""

from itertools import product

import numpy as np
import pytest
import torch
from languages import END, Scripted, chance, parrot
from selection import LANGUAGES

from experiments.models.model import ByteTransformer
from experiments.settings.config import TrainConfig, TransformerConfig
from experiments.tasks.problems import Problem
from experiments.tasks.rollout import Decoding, Rollout, pad, sample
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified

CPU = torch.device("cpu")


def draw(
    model: Scripted | ByteTransformer, prompts: list[list[int]], uniforms: torch.Tensor, *, group: int = 1
) -> Rollout:
    return sample(model, prompts, group=group, decoding=decoding(uniforms), uniforms=uniforms, device=CPU)


def decoding(uniforms: torch.Tensor) -> Decoding:
    return Decoding(longest=uniforms.shape[1], stops=(END,))


def answers(rollout: Rollout) -> list[list[int]]:
    return [
        tokens[len(tokens) - len(logp) :].tolist()
        for tokens, logp in zip(rollout.tokens, rollout.logp, strict=True)
    ]


def some_uniforms(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape))


def transformer() -> ByteTransformer:
    model = ByteTransformer(TransformerConfig(dim=16, layers=2, heads=2, context=16))
    with torch.no_grad():
        model.embedding.mul_(3)  # an untrained model has next to no opinion
    return model


def test_every_token_is_the_one_in_whose_share_of_the_unit_interval_its_uniform_lies() -> None:
    model, prompts, uniforms = chance(5), [[1], [2], [3]], some_uniforms(12, 4)
    found = answers(draw(model, prompts, uniforms, group=4))
    for row in range(12):
        text = prompts[row // 4]
        for place in range(4):
            shares = np.exp(model.extend(torch.tensor([text]), None)[0][0].double().numpy())
            borders = np.cumsum(shares / shares.sum())
            token = int(np.searchsorted(borders, uniforms[row, place].item(), side="right"))
            assert found[row][place] == token
            text = [*text, token]


@pytest.mark.check(LANGUAGES)
def test_over_an_even_grid_of_uniforms_every_answer_comes_as_often_as_it_is_likely() -> None:
    """Of all answers of two tokens: 150² points of the unit square."""
    model, side = chance(3), 150
    grid = (np.arange(side) + 0.5) / side
    uniforms = torch.from_numpy(np.array(list(product(grid, grid))))
    found = answers(draw(model, [[1]], uniforms, group=len(uniforms)))
    first = model.extend(torch.tensor([[1]]), None)[0][0].softmax(0)
    for a, b in product(range(3), range(3)):
        second = model.extend(torch.tensor([[1, a]]), None)[0][0].softmax(0)
        share = found.count([a, b]) / side**2
        assert share == pytest.approx(float(first[a] * second[b]), abs=2 / side)  # two borders, a point each


def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_token() -> None:
    model = chance(5)
    uniforms = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    assert answers(draw(model, [[1]], uniforms, group=2)) == [[0], [4]]


def test_the_log_probabilities_are_those_of_a_fresh_forward_pass() -> None:
    model = transformer()
    rollout = draw(model, [[5, 6, 7], [9, 8, 7]], some_uniforms(6, 5), group=3)
    for tokens, logp in zip(rollout.tokens, rollout.logp, strict=True):
        with torch.no_grad():
            everything = model(tokens[None, :-1])[0].log_softmax(dim=-1)
        fresh = everything[torch.arange(2, len(tokens) - 1), tokens[3:]]
        # Token by token sums in another order than all at once: FP32's rounding of logits of about 10.
        torch.testing.assert_close(logp, fresh, rtol=1e-5, atol=2e-5)
    assert len({round(float(logp[0]), 3) for logp in rollout.logp}) > 2  # they are not all alike


@pytest.mark.parametrize("model", [chance(5), transformer()], ids=["scripted", "transformer"])
def test_prompts_of_different_lengths_are_answered_as_each_would_be_alone(
    model: Scripted | ByteTransformer,
) -> None:
    prompts, group = [[1, 2, 3], [4], [2, 2, 2], [3, 1]], 2
    uniforms = some_uniforms(8, 4)
    together = draw(model, prompts, uniforms, group=group)
    for k, prompt in enumerate(prompts):
        rows = slice(k * group, (k + 1) * group)  # a prompt's answers lie side by side, in the prompts' order
        alone = draw(model, [prompt], uniforms[rows], group=group)
        assert together.texts[rows] == alone.texts
        assert [t.tolist() for t in together.tokens[rows]] == [t.tolist() for t in alone.tokens]
        assert all(t.tolist()[: len(prompt)] == prompt for t in together.tokens[rows])
        for mine, its in zip(together.logp[rows], alone.logp, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=2e-5)  # as above


def test_equal_uniforms_give_equal_answers_and_others_others() -> None:
    model, prompts = transformer(), [[1, 2], [3, 4]]
    first = draw(model, prompts, some_uniforms(8, 4), group=4)
    torch.rand(5)  # no other chance has a part in it
    again = draw(model, prompts, some_uniforms(8, 4), group=4)
    other = draw(model, prompts, some_uniforms(8, 4, seed=1), group=4)
    assert answers(first) == answers(again)
    assert all(torch.equal(a, b) for a, b in zip(first.logp, again.logp, strict=True))
    assert answers(first) != answers(other)


def test_an_answer_ends_with_its_first_end() -> None:
    """What is sampled behind it, while others go on, is no part of it."""
    rollout = draw(parrot("13\n"), [[*b" 9+4="]], some_uniforms(1, 7))
    assert rollout.texts == ["13"]
    assert answers(rollout) == [[*b"13\n"]]


@pytest.mark.parametrize(
    ("says", "longest", "right"),
    [
        ("13\n", 3, True),
        ("13\n", 7, True),
        ("13\n", 2, False),  # right so far, but it has not ended
        ("13", 2, False),
        ("13", 7, False),
        ("\n", 7, False),
        ("13 \n", 7, False),
        ("013\n", 7, False),
    ],
)
def test_only_the_answer_and_then_the_end_is_right(says: str, longest: int, right: bool) -> None:
    problem = Problem(" 9+4=", "13", "3")
    uniforms = some_uniforms(1, longest)
    rollout = draw(parrot(says), [[*problem.prompt.encode()]], uniforms)
    task = Verified(TrainConfig(), Seat(0, 1, CPU))
    assert task.rewards(task.answers([problem], rollout, decoding(uniforms))) == [float(right)]


def test_padding_puts_zeros_behind_the_shorter_rows() -> None:
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert pad(rows).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert pad(rows, 4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
