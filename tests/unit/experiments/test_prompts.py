"""Prompts from a user's file, judged by a user's function: what is read, asked and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from languages import Scripted, save_tokenizer
from selection import LANGUAGES

from experiments.errors import ExperimentError
from experiments.settings.config import TrainConfig
from experiments.settings.merging import load
from experiments.settings.tasks import AnswerConfig, PromptsConfig
from experiments.tasks import verified
from experiments.tasks.prompts import prompts_of
from experiments.tasks.rollout import Decoding, sample
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified

CPU = torch.device("cpu")
REWARDS = """
def length(prompt, completion, row):
    return len(completion) / row["wanted"]

def nothing(prompt, completion, row):
    return float("nan")

def endless(prompt, completion, row):
    return 1e39

def failing(prompt, completion, row):
    raise KeyError("no such column")

number = 3
"""


class Words:
    """A chat is its messages between brackets."""

    def chat(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"[{one['role']}: {one['content']}]" for one in messages)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(rows: list[Any], name: str = "prompts.jsonl") -> str:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


def config(file: str, **more: Any) -> PromptsConfig:
    return PromptsConfig(**{"file": file, "reward": "rewards.py:length", "held_out": 2} | more)


ROWS = [{"prompt": f"question {k}", "wanted": k + 1} for k in range(10)]


@pytest.mark.parametrize("reward", ["rewards.py:length", "rewards:length"])
def test_rows_are_split_and_judged_with_all_their_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    problems = prompts_of(config(written(ROWS), reward=reward), Words())
    assert len(problems.held_out) == 2
    assert sorted(one.row["wanted"] for one in problems.train + problems.held_out) == list(range(1, 11))
    again = prompts_of(config("prompts.jsonl", reward=reward), Words())
    assert (again.train, again.held_out) == (problems.train, problems.held_out)
    for problem in problems.train:
        assert problem.prompt == f"question {problem.row['wanted'] - 1}"
        assert problems.reward(problem, "four") == 4 / problem.row["wanted"]


def test_another_file_may_be_held_out(folder: Path) -> None:
    other = written([{"prompt": "x", "wanted": 1}], "held.jsonl")
    problems = prompts_of(config(written(ROWS), held_out_file=other), Words())
    assert [one.prompt for one in problems.held_out] == ["x"]
    assert [one.prompt for one in problems.train] == [row["prompt"] for row in ROWS]


def test_messages_go_through_the_chat_template(folder: Path) -> None:
    rows = [
        {"chat": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"why {k}?"}]}
        for k in range(3)
    ]
    problems = prompts_of(config(written(rows), column="chat"), Words())
    found = [problem.prompt for problem in problems.train + problems.held_out]
    assert sorted(found) == [f"[system: be brief][user: why {k}?]" for k in range(3)]


def test_parquet_is_read_like_jsonl(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row | {"chat": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "prompts.parquet")
    for column in ("prompt", "chat"):
        found = prompts_of(config("prompts.parquet", column=column), Words())
        wanted = prompts_of(config(written(rows), column=column), Words())
        assert [(one.prompt, one.row) for one in found.train] == [
            (one.prompt, one.row) for one in wanted.train
        ]
    Path("prompts.parquet").write_bytes(b"nothing")
    with pytest.raises(ExperimentError, match=r"prompts.parquet is not Parquet: "):
        prompts_of(config("prompts.parquet"), Words())


MISTAKES: list[tuple[Callable[[], PromptsConfig], str]] = [
    (lambda: config("none.jsonl"), "there is no file none.jsonl"),
    (lambda: config(written([])), "prompts.jsonl has no rows"),
    (
        lambda: config(written(ROWS, "a.jsonl"), held_out=10),
        "10 rows of 10 prompts, and 10 are to be held out",
    ),
    (lambda: config(written([{"question": "x"}])), "line 1 has no column 'prompt'"),
    (lambda: config(written([*ROWS, {"prompt": 3}])), "line 11: prompt must be a text or a list of messages"),
    (lambda: config(written([{"prompt": []}])), "line 1: prompt must be a text or a list of messages"),
    (lambda: config(written([3])), "line 1 is not an object with columns"),
    (lambda: config(written(ROWS), reward="gone.py:length"), "prompts.reward: there is no file gone.py"),
    (
        lambda: config(written(ROWS), reward="rewards.py:lenght"),
        "no function 'lenght'; did you mean 'length'",
    ),
    (lambda: config(written(ROWS), reward="rewards.py:number"), "rewards.py has no function 'number'"),
    (lambda: config(written(ROWS), reward="no_such:f"), "no_such can't be imported: ModuleNotFoundError"),
]


@pytest.mark.parametrize(("wrong", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_is_one_sentence(folder: Path, wrong: Callable[[], PromptsConfig], sentence: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        prompts_of(wrong(), Words())
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rows_with_one_prompt_are_all_held_out_or_none(folder: Path) -> None:
    rows = [{"prompt": f"question {k % 5}", "wanted": k} for k in range(20)]
    problems = prompts_of(config(written(rows)), Words())
    assert len(problems.held_out) == 4
    assert not {one.prompt for one in problems.held_out} & {one.prompt for one in problems.train}
    other = written(rows[:1], "held.jsonl")
    with pytest.raises(ExperimentError, match=r"4 rows of prompts.jsonl have prompts of held.jsonl, too"):
        prompts_of(config("prompts.jsonl", held_out_file=other), Words())


def test_a_file_may_begin_with_a_mark_and_must_be_utf_8(folder: Path) -> None:
    row = json.dumps({"prompt": "grün"}, ensure_ascii=False)
    Path("a.jsonl").write_text(f"{row}\n" + json.dumps({"prompt": "x"}), encoding="utf-8-sig")
    found = prompts_of(config("a.jsonl", held_out=1), Words())
    assert {one.prompt for one in found.train + found.held_out} == {"grün", "x"}
    Path("b.jsonl").write_bytes(row.encode("latin-1"))
    with pytest.raises(ExperimentError, match=r"b.jsonl, line 1 is not JSON: 'utf-8' codec"):
        prompts_of(config("b.jsonl"), Words())


def test_a_rewards_file_may_have_dataclasses(folder: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
    text += "@dataclass\nclass A:\n    x: int = 3\n\ndef three(prompt, completion, row):\n    return A().x\n"
    Path("dataclassed.py").write_text(text)
    problems = prompts_of(config(written(ROWS), reward="dataclassed.py:three"), Words())
    assert problems.reward(problems.train[0], "x") == 3


def test_a_line_that_is_not_json_is_named(folder: Path) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": \n')
    with pytest.raises(ExperimentError, match=r"prompts.jsonl, line 3 is not JSON"):
        prompts_of(config("prompts.jsonl", held_out=1), Words())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "ValueError: the reward is nan"),
        ("endless", r"ValueError: the reward is 1e\+39"),
        ("failing", "KeyError: 'no such column'"),
    ],
)
def test_a_function_that_fails_ends_a_comparison_with_a_sentence(
    folder: Path, name: str, sentence: str
) -> None:
    problems = prompts_of(config(written(ROWS), reward=f"rewards.py:{name}"), Words())
    with pytest.raises(ExperimentError, match=f"rewards.py:{name} failed: {sentence}"):
        problems.reward(problems.train[0], "x")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["task=prompts"], "prompts need a model that has been trained"),
        (["task=prompts", "model=hf", "path=m"], "belong together"),
        (["prompts.file=a.jsonl"], "belong together"),
        (["prompts.file=a.csv"], r"prompts.file must end in .jsonl or .parquet, got a.csv"),
        (["prompts.reward=length"], "prompts.reward is written module:function"),
        (["answer.temperature=0"], "answer.temperature must be > 0"),
        (["answer.max_tokens=0"], "answer.max_tokens must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError, match=sentence):
        load(TrainConfig, arguments)


def test_tickets_pass_through_all_problems_before_any_comes_again() -> None:
    task = Verified(load(TrainConfig, ["arithmetic.largest=6", "arithmetic.held_out=20"]), Seat(0, 1, CPU))
    count = len(task._problems.train)
    epochs = [[task.of_ticket(e * count + k).prompt for k in range(count)] for e in (0, 1, 0)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(one.prompt for one in task._problems.train)
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


# ---- how answers are sampled ----


def test_a_temperature_sharpens_what_is_sampled_and_what_its_probability_is() -> None:
    """Sampled and learned from are the same distribution."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    model: Any = Scripted(lambda text: logits)
    uniforms = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0))
    decoding = Decoding(longest=1, stops=(9,), temperature=0.5)
    rollout = sample(model, [[0]], group=4000, decoding=decoding, uniforms=uniforms, device=CPU)
    wanted = (logits / 0.5).log_softmax(dim=0)
    tokens = torch.cat(rollout.tokens).view(-1, 2)[:, 1]
    assert torch.equal(torch.cat(rollout.logp), wanted[tokens])
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert (shares - wanted.exp()).abs().max() < 0.03  # four standard deviations
    rows = [torch.tensor([0, 2])]
    logp = verified.answer_log_probabilities(model, rows, [1], CPU, temperature=0.5)[0]
    torch.testing.assert_close(logp[0, 0], wanted[2])


def test_temperature_zero_takes_the_likeliest_token() -> None:
    model: Any = Scripted(lambda text: torch.eye(5)[len(text) % 5])
    none = torch.empty(1, 0)
    greedy = Decoding(longest=4, stops=(9,), temperature=0.0)
    rollout = sample(model, [[0]], group=1, decoding=greedy, uniforms=none, device=CPU)
    assert rollout.tokens[0].tolist() == [0, 1, 2, 3, 4]


def test_stops_end_an_answer_and_are_no_part_of_its_text() -> None:
    model: Any = Scripted(lambda text: torch.nn.functional.one_hot(torch.tensor(60 + len(text)), 128).float())
    decoding = Decoding.of(model, AnswerConfig(stop=("@",)), 100)  # "@" is byte 64
    assert decoding.stops == (10, 64)
    greedy = Decoding(longest=100, stops=decoding.stops, temperature=0.0)
    rollout = sample(model, [[1]], group=1, decoding=greedy, uniforms=torch.empty(1, 0), device=CPU)
    assert rollout.tokens[0].tolist() == [1, 61, 62, 63, 64]
    assert rollout.texts == ["=>?"]
    with pytest.raises(ExperimentError, match=r"answer.stop: '</a>' is 4 tokens of this model"):
        Decoding.of(model, AnswerConfig(stop=("</a>",)), 100)


# ---- with a model in Hugging Face's format ----


@pytest.fixture
def model_folder(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="needs the optional package transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.LlamaConfig(vocab_size=264, max_position_embeddings=40, eos_token_id=256, **sizes)
    transformers.LlamaForCausalLM(made).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    return folder / "model"


def task(file: str, *more: str) -> Verified:
    arguments = ["task=prompts", "model=hf", "path=model", f"prompts.file={file}"]
    arguments += ["prompts.reward=rewards.py:length", "prompts.held_out=3", "answer.max_tokens=8", *more]
    return Verified(load(TrainConfig, arguments), Seat(0, 1, CPU))


@pytest.mark.check(LANGUAGES)
def test_the_score_is_the_mean_reward_of_greedy_answers(model_folder: Path) -> None:
    it = task(written(ROWS))
    model: Any = it.model()
    assert it.metric == "reward"
    total, count = it.scores(model)["reward"].tolist()
    assert count == 3
    wanted = 0.0
    for problem in it._problems.held_out:
        text = list(problem.prompt.encode())
        tokens = model.encode(problem.prompt)
        assert len(tokens) == len(text)
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] == model.end:
                break
        answer = tokens[len(text) :]
        wanted += (
            len(model.decode(answer[:-1] if answer[-1] == model.end else answer)) / problem.row["wanted"]
        )
    assert total == pytest.approx(wanted)


@pytest.mark.check(LANGUAGES)
def test_prompts_that_the_model_can_not_read_are_refused_before_the_run(model_folder: Path) -> None:
    it = task(written([*ROWS, {"prompt": "x" * 33, "wanted": 1}]))
    with pytest.raises(
        ExperimentError, match="1 of 11 prompts are too long: the longest has 33 tokens, an answer may"
    ):
        it.check(it.model())
    it = task(written([*ROWS, {"prompt": "x" * 32, "wanted": 1}]))
    it.check(it.model())


@pytest.mark.check(LANGUAGES)
def test_messages_need_a_tokenizer_with_a_chat_template(model_folder: Path) -> None:
    messages = [{"prompt": [{"role": "user", "content": f"why {k}?"}], "wanted": 1} for k in range(5)]
    with pytest.raises(ExperimentError, match="the tokenizer in model has no chat template"):
        task(written(messages))
    template = "{% for one in messages %}{{ one['content'] }}|{% endfor %}"
    template += "{% if add_generation_prompt %}A:{% endif %}"
    (model_folder / "chat_template.jinja").write_text(template)
    assert {one.prompt for one in task(written(messages))._problems.train} <= {
        f"why {k}?|A:" for k in range(5)
    }
    (model_folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(ExperimentError, match="line 1: the chat template refuses it: no such role"):
        task(written(messages))
