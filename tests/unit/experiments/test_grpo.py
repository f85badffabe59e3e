"""GRPO's advantages and loss, against the equations written out number by number."""

import math
import statistics

import pytest
import torch

from experiments.tasks.grpo import advantages, token_losses

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_an_advantage_is_the_distance_from_the_groups_mean_in_its_standard_deviations() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.5, 2.0, -1.0, 0.0]]
    found = advantages(torch.tensor(rewards, dtype=torch.float64))
    for group, row in zip(rewards, found.tolist(), strict=True):
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        assert row == pytest.approx([(r - mean) / (deviation + 1e-6) for r in group], rel=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("answers", [1, 3, 7, 8, 49])
def test_a_group_of_one_mind_has_advantages_of_exactly_zero(reward: float, answers: int) -> None:
    assert not advantages(torch.full((2, answers), reward)).any()


def test_groups_are_compared_within_themselves() -> None:
    alone = advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    beside = advantages(torch.tensor([[1.0, 0.0, 0.0], [5.0, 9.0, 1.0]]))
    assert torch.equal(beside[:1], alone)


def test_every_tokens_loss_is_the_papers() -> None:
    generator = torch.Generator().manual_seed(3)
    logp, old = (-3 * torch.rand(40, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    advantage = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    found = token_losses(logp, old, advantage, **CLIP)
    assert found.shape == (40, 6)
    cases = set()
    for i in range(40):
        for t in range(6):
            a, ratio = float(advantage[i]), math.exp(float(logp[i, t]) - float(old[i, t]))
            clipped = max(0.8, min(1.28, ratio))
            assert float(found[i, t]) == pytest.approx(-min(ratio * a, clipped * a), rel=1e-12)
            cases.add((a > 0, (ratio > 0.8) + (ratio > 1.28)))
    assert len(cases) == 6  # both signs below, inside and above the clip


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (1.4, 1.0, -1.28, False),  # likelier already than the clip lets it become
        (1.27, 1.0, -1.27, True),  # up to 0.28 and not only 0.2
        (0.5, 1.0, -0.5, True),  # has become unlikelier, wrongly: nothing holds it
        (0.7, -1.0, 0.8, False),
        (0.81, -1.0, 0.81, True),
        (1.5, -1.0, 1.5, True),
        (0.79, -1.0, 0.8, False),  # down to 0.2 and not 0.28
    ],
)
def test_the_clip_stops_what_goes_on_in_the_right_direction_only(
    ratio: float, advantage: float, expected: float, moves: bool
) -> None:
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = token_losses(logp, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    assert loss.item() == pytest.approx(expected)
    loss.sum().backward()
    assert logp.grad is not None
    # d(−ρ·A)/d log π = −ρ·A
    assert logp.grad.item() == pytest.approx(-ratio * advantage if moves else 0.0, abs=1e-12)
    if not moves:
        assert logp.grad.item() == 0


def test_on_the_policy_the_gradient_is_that_of_advantage_weighted_log_probabilities() -> None:
    logp = torch.tensor([-0.5, -1.5], requires_grad=True)
    advantage = torch.tensor([0.7, -1.3])
    token_losses(logp, logp.detach().clone(), advantage, **CLIP).sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad, -advantage)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1.1, 1000.3, -12345.678])
@pytest.mark.parametrize("size", [1, 3, 8, 12])
def test_a_group_of_one_mind_has_no_advantage_whatever_its_mean_is_rounded_to(
    size: int, reward: float
) -> None:
    assert not advantages(torch.full((2, size), reward)).any()
