"""Tasks of reasoning_gym: what is asked of a small model, and that their own verifier judges it."""

from importlib.util import find_spec
from typing import Any

import pytest

from experiments.errors import ExperimentError
from experiments.settings.tasks import GymConfig
from experiments.tasks.gym import gym_problems

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning_gym")

SMALL: dict[str, Any] = {"size": 60, "held_out": 20}


def test_words_are_spelled_backward_and_held_out_ones_never_trained_on() -> None:
    problems = gym_problems(GymConfig(name="spell_backward", **SMALL), longest=64)
    assert (len(problems.train), len(problems.held_out)) == (60, 20)
    everything = problems.train + problems.held_out
    assert len({p.prompt for p in everything}) == 80
    for problem in everything:
        assert problem.prompt.strip(" :")[::-1] == problem.answer  # the instruction, which all share, is gone
        assert len(problem.prompt) == 11
        assert sorted(problem.slip) == sorted(problem.answer)
        assert problem.slip[:-2] == problem.answer[:-2]
        assert (problem.slip == problem.answer) == (problem.answer[-2] == problem.answer[-1])


def test_the_verifier_is_theirs_and_may_give_a_part() -> None:
    problems = gym_problems(GymConfig(name="spell_backward", **SMALL), longest=64)
    problem = max((p for p in problems.train if p.slip != p.answer), key=lambda p: len(p.answer))
    assert problems.reward(problem, problem.answer) == 1
    assert problems.reward(problem, problem.answer.upper()) == 1  # it does not mind
    assert 0 < problems.reward(problem, problem.slip) < 1
    assert problems.reward(problem, "") < 0.1


def test_options_are_the_tasks_own_and_a_model_with_words_reads_the_whole_question() -> None:
    config = GymConfig(name="chain_sum", options={"min_terms": 3, "max_terms": 3, "max_digits": 2}, **SMALL)
    bare = gym_problems(config, longest=64).held_out[0]
    whole = gym_problems(config, longest=None).held_out[0]
    assert bare.prompt.count("+") + bare.prompt.count("-") == 2
    assert eval(bare.prompt.strip(" :=")) == int(bare.answer)
    assert whole.prompt.startswith("State the final answer to the following arithmetic problem: ")
    assert bare.prompt.strip(" :=") in whole.prompt
    assert whole.answer == bare.answer


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "spell_backwards"}, "reasoning_gym has no task 'spell_backwards'; did you mean"),
        ({"options": {"word_len": 3}}, "gym.options do not fit spell_backward: .*word_len"),
        ({"options": {"min_word_len": 0}}, "gym.options do not fit spell_backward: min_word_len must be"),
        ({"name": "count_bits", "options": {"max_n": 40}}, "count_bits has only .* problems among 160"),
        ({"name": "simple_geometry"}, "simple_geometry's longest problem .* use transformer.context="),
    ],
)
def test_a_mistake_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ExperimentError, match=sentence):
        gym_problems(GymConfig(**SMALL | changes), longest=64)
