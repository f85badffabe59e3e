"""Answers of several turns: what the model is given next, and what is learned from the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_parts import config_of
from torch import Tensor

from experiments.errors import ExperimentError
from experiments.models.model import ByteTransformer
from experiments.pipeline.learning.losses import learn
from experiments.pipeline.samples import Group, groups_of
from experiments.pipeline.sampling.conversations import Conversations, Place
from experiments.settings.config import TransformerConfig
from experiments.settings.tasks import PromptsConfig
from experiments.tasks.problems import Problem
from experiments.tasks.prompts import Environment, Reply, between_turns
from experiments.tasks.rollout import Decoding, Question, Rollout

END = ord("\n")
DECODING = Decoding(longest=6, stops=(END,))


class Words:
    end = END

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def chat(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{one['role']}>{one['content']}\n" for one in messages) + "<assistant>"


def uniforms(place: Place, turn: int) -> Tensor:
    return torch.full((1, 6), place.which + turn / 10)


def turn(question: Question, text: str, version: int) -> Rollout:
    """What the model says next."""
    tokens = list(text.encode())
    return Rollout(
        texts=[text.removesuffix("\n")],
        tokens=[torch.tensor([*question.prompt, *tokens])],
        logp=[torch.full((len(tokens),), -0.5)],
        versions=[torch.full((len(tokens),), version)],
    )


def conversations(*, room: int = 1000, turns: int = 3) -> Conversations:
    settings = {"file": "a.jsonl", "environment": "a.py:A", "turns": turns}
    return Conversations(PromptsConfig(**settings), Words(), room, uniforms)


def begun(talks: Conversations, prompt: Any = "ask ") -> list[Question]:
    question = Question(key="q", prompt=list(b"ask "), group=2, decoding=DECODING, uniforms=torch.empty(2, 0))
    return talks.begin(question, Problem("ask ", row={"prompt": prompt}))


def test_a_conversation_is_one_sequence_of_which_replies_were_given() -> None:
    talks = conversations()
    one, other = begun(talks)
    assert one.key == Place("q", 0)
    assert float(other.uniforms[0, 0]) == 1.0
    assert talks.hear(Place("q", 0), turn(one, "ab\n", 1))[1] == ["ab"]
    then = talks.reply(Place("q", 0), Reply(0.25, "no."))
    assert isinstance(then, Question)
    assert bytes(then.prompt) == b"ask ab\nno."
    assert float(then.uniforms[0, 0]) == pytest.approx(0.1)
    assert talks.hear(Place("q", 0), turn(then, "c", 2))[1] == ["ab", "c"]
    assert len(talks) == 2
    assert talks.reply(Place("q", 0), Reply(1.0)) is None  # the other answer goes on
    assert len(talks) == 1
    talks.hear(Place("q", 1), turn(other, "xyz\n", 3))
    ended = talks.reply(Place("q", 1), Reply(0.5))
    assert isinstance(ended, tuple)
    rollout, rewards = ended
    assert rewards == [1.25, 0.5]
    assert [bytes(row.tolist()) for row in rollout.tokens] == [b"ask ab\nno.c", b"ask xyz\n"]
    assert rollout.versions[0].tolist() == [1, 1, 1, -1, -1, -1, 2]
    assert len(talks) == 0
    (group,) = groups_of(rollout, torch.tensor(rewards), 2)
    back = Group.unpacked(group.packed())
    assert back.tokens == 8
    assert back.sampled_versions.tolist() == [1, 1, 1, 2, 3, 3, 3, 3]


def test_a_conversation_ends_after_so_many_turns_or_where_the_model_has_no_room() -> None:
    for limits in ({"turns": 2}, {"room": 4 + 3 + 3 + 6}):
        talks = conversations(**limits)
        one, other = begun(talks)
        talks.hear(Place("q", 1), turn(other, "x\n", 1))
        assert talks.reply(Place("q", 1), Reply()) is None
        talks.hear(Place("q", 0), turn(one, "ab\n", 1))
        then = talks.reply(Place("q", 0), Reply(0.5, "no."))
        assert isinstance(then, Question)
        talks.hear(Place("q", 0), turn(then, "c\n", 1))
        ended = talks.reply(Place("q", 0), Reply(0.5, "no."))
        assert isinstance(ended, tuple)
        assert ended[1] == [1.0, 0.0]


def test_between_two_turns_of_messages_is_what_the_chat_template_writes_there() -> None:
    prompt = [{"role": "user", "content": "ask"}]
    talks = conversations()
    one, other = begun(talks, prompt)
    talks.hear(Place("q", 0), turn(one, "ab\n", 1))  # with the end that the template writes, too
    then = talks.reply(Place("q", 0), Reply(0.0, "no"))
    assert isinstance(then, Question)
    assert bytes(then.prompt) == b"ask ab\n<user>no\n<assistant>"
    talks.hear(Place("q", 1), turn(other, "abcdef", 1))  # cut off
    then = talks.reply(Place("q", 1), Reply(0.0, [{"role": "tool", "content": "7"}]))
    assert isinstance(then, Question)
    assert bytes(then.prompt) == b"ask abcdef\n<tool>7\n<assistant>"
    said = "tell me what was said"
    assert between_turns(prompt, said, Words()) == f"\n<user>{said}\n<assistant>"
    with pytest.raises(ExperimentError, match="prompts are texts, so its observations must be, too"):
        between_turns("a text", [{"role": "tool", "content": "7"}], Words())


def test_nothing_is_learned_from_what_was_given() -> None:
    """Two answers that differ in the environment's reply alone, whose own tokens see nothing of it."""
    found = []
    for given in (b"1234", b"5678"):
        model = ByteTransformer(TransformerConfig(dim=16, layers=2, heads=2, context=32), seed=1)
        tokens = torch.tensor([*b"ask ", *b"ab\n", *given])
        logp, versions = torch.full((7,), -1.0), torch.tensor([1, 1, 1, -1, -1, -1, -1])
        rollout = Rollout(texts=["", ""], tokens=[tokens] * 2, logp=[logp] * 2, versions=[versions] * 2)
        learn(model, groups_of(rollout, torch.tensor([0.0, 1.0]), 2), config_of("kl=0"))
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert any(gradient.any() for gradient in found[-1])
    # The columns of the position and of the embedding that the replies alone read have no gradient either.
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


ENVIRONMENT = """
class Counts:
    def reset(self, row):
        self.row, self.sum = row, 0

    def step(self, completion):
        self.sum += int(completion)
        return (None if self.sum >= self.row["least"] else f"{self.sum} so far"), self.sum

class Wrong(Counts):
    def step(self, completion):
        return 3, 1.0
"""


def test_an_environment_is_told_all_turns_anew(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(ENVIRONMENT)
    environment = Environment(f"{tmp_path}/counts.py:Counts")
    row = {"least": 5}
    assert environment(row, ["2"]) == Reply(2.0, "2 so far")
    assert environment(row, ["2", "1"]) == Reply(3.0, "3 so far")
    assert environment(row, ["2", "1", "4"]) == Reply(7.0, None)
    assert environment(row, ["2"]) == Reply(2.0, "2 so far")
    with pytest.raises(TypeError, match="an observation is a text, messages or None, got int"):
        Environment(f"{tmp_path}/counts.py:Wrong")(row, ["2"])
    with pytest.raises(ExperimentError, match=r"prompts.environment: .* has no class 'Count'"):
        Environment(f"{tmp_path}/counts.py:Count")
