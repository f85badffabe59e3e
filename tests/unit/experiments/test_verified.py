"""Tasks with a verifier: what is asked, what is learned from the answers, and how weights are scored."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from languages import END, pupil
from selection import BASELINES, LANGUAGES
from sites import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments.models import warm_start
from experiments.settings.config import TrainConfig, TransformerConfig, WarmStartConfig
from experiments.settings.tasks import ArithmeticConfig
from experiments.tasks import verified
from experiments.tasks.problems import Problem, arithmetic, is_right
from experiments.tasks.rollout import Decoding, Rollout, sample
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified

CPU = torch.device("cpu")
CONFIG = TrainConfig(
    sync_every=3,
    transformer=TransformerConfig(dim=32, layers=1, heads=2, context=16),
    arithmetic=ArithmeticConfig(largest=6, held_out=20, prompts=4, group=4, slips=0.0),
    warm_start=WarmStartConfig(steps=150, batch=32, lr=2e-3, decay=False),
)


def task(*, rank: int = 0, ranks: int = 1, **changes: Any) -> Verified:
    return Verified(replace(CONFIG, **changes), Seat(rank, ranks, CPU))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Of a model that answers about half of what it is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "_cores", lambda: 1)  # threads cost a model this small more than they save
        return warm_start.train(CONFIG, task(), CPU)


@pytest.fixture
def model(weights: dict[str, torch.Tensor]) -> nn.Module:
    model = task().model()
    model.load_state_dict(weights)
    return model


# ---- problems ----


def test_every_problem_is_either_held_out_or_trained_on() -> None:
    problems = arithmetic(largest=20, held_out=300)
    assert len(problems.held_out) == 300
    prompts = [p.prompt.strip() for p in problems.train + problems.held_out]
    everything = {f"{a}{sign}{b}=" for a in range(20) for b in range(20) for sign in "+-"}
    everything |= {f"{a}*{b}=" for a in range(20) for b in range(10)}
    assert set(prompts) == everything
    assert len(prompts) == len(everything)  # each once: none is in both
    kinds = [p.prompt.strip(" 0123456789=") for p in problems.held_out]
    assert {kind: round(kinds.count(kind) / 300, 1) for kind in "+-*"} == {"+": 0.4, "-": 0.4, "*": 0.2}


def test_answers_are_right_and_prompts_equally_wide() -> None:
    problems = arithmetic(largest=100, held_out=50)
    for problem in problems.train + problems.held_out:
        assert int(problem.answer) == eval(problem.prompt.strip("= "))
        assert len(problem.prompt) == len("99+99=")
        assert is_right(problem, problem.answer)


def test_a_slip_is_a_forgotten_carry() -> None:
    problems = arithmetic(largest=100, held_out=50).train
    for problem in problems:
        forgotten = int(problem.answer) - int(problem.slip)
        assert forgotten == (10 if int(problem.answer) >= 10 else 0)
    assert sum(is_right(p, p.slip) for p in problems) < 0.6 * len(problems)


def test_the_split_has_nothing_to_do_with_anyones_seed() -> None:
    first = task(seed=0)._problems
    torch.manual_seed(9)
    assert task(seed=5, rank=3, ranks=4)._problems == first


# ---- the warm start ----


def test_the_warm_start_makes_its_share_of_slips() -> None:
    shares = []
    for slips in (0.0, 0.4, 1.0):
        it = task(arithmetic=replace(CONFIG.arithmetic, largest=20, slips=slips))
        seen: list[tuple[Problem, str]] = []
        inner = it._of_answers

        def watched(
            model: nn.Module,
            problems: list[Problem],
            answers: list[str],
            seen: Any = seen,
            inner: Any = inner,
        ) -> Any:
            seen += zip(problems, answers, strict=True)
            return inner(model, problems, answers)

        it._of_answers = watched  # pyright: ignore[reportAttributeAccessIssue]
        it.warm_start_loss(it.model(), 3, size=1000)
        held_out = set(it._problems.held_out)
        assert not any(problem in held_out for problem, _ in seen)
        carrying = [(p, answer) for p, answer in seen if p.slip != p.answer]
        shares.append(sum(answer == p.slip for p, answer in carrying) / len(carrying))
    assert shares[0] == 0
    assert shares[1] == pytest.approx(0.4, abs=0.06)
    assert shares[2] == 1


@pytest.mark.check(LANGUAGES)
def test_the_warm_starts_loss_is_the_mean_over_answer_tokens(model: nn.Module) -> None:
    it = task()
    chosen = it._problems.train[:7]
    model.requires_grad_(False)
    logp, counts, _ = it._of_answers(model, chosen, [p.answer for p in chosen])
    expected = []
    for problem in chosen:
        text = [*problem.prompt.encode(), *problem.answer.encode(), END]
        logits = model(torch.tensor([text]))[0].double()
        for place in range(len(problem.prompt), len(text)):
            expected.append(float(logits[place - 1].log_softmax(0)[text[place]]))
    # FP32 products of several rows are summed in another order than those of one.
    assert logp[counts].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


# ---- scores ----


def test_pass_at_1_is_what_greedy_decoding_gets() -> None:
    lm, it = pupil(knows=4.0), task(arithmetic=replace(CONFIG.arithmetic, held_out=80))
    right = 0
    for problem in it._problems.held_out:
        text = [*problem.prompt.encode()]
        while len(text) < 16 and text[-1] != END:
            text.append(int(lm.extend(torch.tensor([text]), None)[0].argmax()))
        right += bytes(text).decode() == f"{problem.prompt}{problem.answer}\n"
    score = it.scores(cast(nn.Module, lm))["pass@1"]
    assert 10 < right < 70  # neither is a matter of course
    assert score.tolist() == [right, 80]


@pytest.mark.check(BASELINES)
def test_sampled_is_the_probability_of_the_right_answer_and_how_often_a_sample_is_right() -> None:
    lm, it = pupil(knows=6.0), task()
    exact, often, tries = 0.0, 0, 400
    for problem in it._problems.held_out:
        probability, text = 1.0, [*problem.prompt.encode()]
        for token in [*problem.answer.encode(), END]:
            logits = lm.extend(torch.tensor([text]), None)[0][0].tolist()
            probability *= math.exp(logits[token]) / sum(math.exp(x) for x in logits)
            text.append(token)
        exact += probability
        uniforms = torch.from_numpy(np.random.default_rng(len(problem.prompt) + often).random((tries, 4)))
        rollout = sample(
            lm,
            [[*problem.prompt.encode()]],
            group=tries,
            decoding=Decoding(longest=4, stops=(END,)),
            uniforms=uniforms,
            device=CPU,
        )
        often += sum(is_right(problem, answer) for answer in rollout.texts)
    total, size = it.scores(cast(nn.Module, lm))["sampled"].tolist()
    assert size == 20
    assert total == pytest.approx(exact, rel=1e-5)  # FP32 against FP64
    assert 2 < exact < 18
    assert often / tries == pytest.approx(exact, abs=4 * math.sqrt(20 * 0.25 / tries))  # four deviations


@pytest.mark.check(BASELINES)
def test_the_ranks_shares_of_the_held_out_problems_add_up(model: nn.Module) -> None:
    whole = task().scores(model)
    parts = [task(rank=rank, ranks=3).scores(model) for rank in range(3)]
    for name, total in whole.items():
        # Problems of other answers beside them: FP32 products in other shapes.
        torch.testing.assert_close(sum(part[name] for part in parts), total, rtol=1e-5, atol=1e-8)


def test_a_rank_without_held_out_problems_adds_nothing(model: nn.Module) -> None:
    it = task(rank=2, ranks=3, arithmetic=replace(CONFIG.arithmetic, held_out=2))
    assert {name: part.tolist() for name, part in it.scores(model).items()} == {
        "pass@1": [0, 0],
        "sampled": [0, 0],
    }


# ---- learning from rollouts ----


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """What the task will sample."""
    rollouts: list[Rollout] = []

    def sampled(*args: Any, **options: Any) -> Rollout:
        rollouts.append(sample(*args, **options))
        return rollouts[-1]

    monkeypatch.setattr(verified, "sample", sampled)
    return rollouts


def rewards_of(rollout: Rollout) -> list[float]:
    """By Python's own arithmetic."""
    rewards = []
    for text, tokens, logp in zip(rollout.texts, rollout.tokens, rollout.logp, strict=True):
        prompt = bytes(tokens[: len(tokens) - len(logp)].tolist()).decode()
        rewards.append(float(text == str(eval(prompt.strip(" =")))))
    return rewards


def test_the_reward_of_a_round_is_the_share_of_right_answers(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = watched(monkeypatch)
    reward = task().begin_round(model, 0)
    assert len(rollouts[0].texts) == 3 * 4 * 4
    assert reward == pytest.approx(float(np.mean(rewards_of(rollouts[0]))))
    assert 0.1 < reward < 0.9


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.check(LANGUAGES)
def test_answers_without_an_advantage_are_left_out_and_no_gradient_is_changed(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equations over all answers, one token after the other, also those of groups of one mind."""
    rollouts, it = watched(monkeypatch), task()
    it.begin_round(model, 4)
    with torch.no_grad():  # the policy moves on before it learns: the ratios are not 1
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    (rollout,) = rollouts
    rewards = rewards_of(rollout)
    left_out = clipped = 0
    for step in range(3):
        losses, tokens = [], 0
        for k in range(16 * step, 16 * (step + 1)):
            group = rewards[k - k % 4 : k - k % 4 + 4]
            a = (rewards[k] - np.mean(group)) / (np.std(group) + 1e-6)
            left_out += not a
            row, old = rollout.tokens[k], rollout.logp[k]
            head = len(row) - len(old)
            logits = model(row[None, :-1])[0]
            for t in range(len(old)):
                ratio = (logits[head + t - 1].log_softmax(0)[row[head + t]] - old[t]).exp()
                clip = ratio.clamp(0.8, 1.28)
                clipped += bool(clip != ratio)
                losses.append(-torch.minimum(ratio * a, clip * a))
                tokens += 1
        expected = torch.stack(losses).sum() / tokens
        model.zero_grad()
        expected.backward()
        wanted = gradient(model)

        model.zero_grad()
        loss = it.loss(model, 4 * 3 + 1 + step)
        loss.backward()
        # Groups of one mind add nothing but zeros; the rest is summed in another order, in FP32.
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        torch.testing.assert_close(gradient(model), wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))
    assert 0 < left_out < 48
    assert clipped > 5


def test_what_a_rank_learns_from_is_a_pure_function_of_seed_rank_and_round(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = watched(monkeypatch)

    def drawn(round: int, **where: Any) -> list[list[int]]:
        it = task(**where)
        if where.get("rank") == 1:
            it.begin_round(model, 7)  # an earlier round leaves nothing behind
        it.begin_round(model, round)
        return [tokens.tolist() for tokens in rollouts[-1].tokens]

    first = drawn(2, seed=1, rank=1, ranks=2)
    torch.rand(5)
    assert drawn(2, seed=1, rank=1, ranks=2) == first
    # Neither the method nor the number of trainers has a part in it.
    assert drawn(2, seed=1, rank=1, ranks=4, method="ddp", lr=1.0) == first
    others = [
        drawn(2, seed=1, rank=0, ranks=2),
        drawn(2, seed=2, rank=1, ranks=2),
        drawn(3, seed=1, rank=1, ranks=2),
    ]
    assert all(other != first for other in others)
    assert all(a != b for a, b in pairwise(others))


@pytest.mark.check(BASELINES)
def test_no_held_out_problem_is_ever_asked(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, it = watched(monkeypatch), task()
    held_out = {problem.prompt for problem in it._problems.held_out}
    asked = set()
    for round in range(20):
        it.begin_round(model, round)
        asked |= {bytes(tokens[:4].tolist()).decode() for tokens in rollouts[-1].tokens}
    assert len(asked) > 50
    assert not asked & held_out


def never_satisfied(it: Verified) -> Verified:
    it._problems = replace(it._problems, reward=lambda *_: 0.0)
    return it


class Counting(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.model(tokens)


def test_a_step_whose_groups_are_all_of_one_mind_passes_through_the_model_once(
    model: nn.Module,
) -> None:
    it, module = never_satisfied(task()), Counting(model)
    assert it.begin_round(model, 0) == 0
    loss = it.loss(module, 1)
    loss.backward()
    assert module.calls == 1
    assert loss.item() == 0
    assert not gradient(model).any()


def one_rank_learns_nothing(rank: int, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    it = task(rank=rank, ranks=2)
    model = it.model()
    model.load_state_dict(weights)
    if rank == 1:
        never_satisfied(it)
    module = DistributedDataParallel(model)
    it.begin_round(model, 0)
    it.loss(module, 1).backward()
    return gradient(model)


@pytest.mark.check(BASELINES)
def test_ddp_goes_on_when_all_groups_of_one_rank_are_of_one_mind(
    weights: dict[str, torch.Tensor], model: nn.Module
) -> None:
    ours, theirs = run_ranks(2, one_rank_learns_nothing, weights)
    assert torch.equal(ours, theirs)
    it = task(rank=0, ranks=2)
    it.begin_round(model, 0)
    it.loss(model, 1).backward()
    # Half of what the other rank learned.
    torch.testing.assert_close(2 * ours, gradient(model), rtol=1e-6, atol=1e-9)
