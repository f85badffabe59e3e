"""docs/sync.md: its programs run, and a model takes new weights while it generates."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import code, page
from published import cast
from selection import LANGUAGES
from torch import Tensor, nn

from loco.sync import Publisher, Subscriber

PROMPT = torch.tensor([[5, 6, 7, 8]])


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # here, as collecting tests need not wait for it

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def as_engine(trained: nn.Module, seed: int) -> Any:
    """A fresh engine on the trained weights."""
    engine = llama(seed).bfloat16()
    engine.load_state_dict({name: cast(tensor) for name, tensor in trained.state_dict().items()})
    return engine


def tokens(engine: Any, **options: object) -> list[int]:
    torch.manual_seed(0)
    found = engine.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)  # pyright: ignore
    assert isinstance(found, Tensor)
    return found[0, PROMPT.shape[1] :].tolist()


def perturb(trained: nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def test_its_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {
        "torch": torch,
        "model": llama(0),
        "engine": llama(1).bfloat16(),
        "rank": 0,
        "world": 1,
        "step": 7,
        # The README has it with a real one, which tests/sites/test_snippets.py runs.
        "optimizer": SimpleNamespace(
            topology=SimpleNamespace(site=1, num_sites=2, rank_in_site=3, ranks_per_site=4),
            round=0,
            register_report_hook=[].append,
        ),
    }
    for said, source in code(page("docs/sync.md"), "python"):
        assert not said
        exec(source, known)
    assert len(list((tmp_path / "shared/weights/versions").iterdir())) == 1
    assert len(list((tmp_path / "shared/shards/versions").iterdir())) == 1


@pytest.mark.check(LANGUAGES)
def test_a_model_takes_new_weights_between_two_calls_of_generate(tmp_path: Path) -> None:
    trained, engine = llama(0), llama(1).bfloat16()
    publisher, subscriber = Publisher(trained, tmp_path), Subscriber(engine, tmp_path)
    answers = []
    for _ in range(4):
        publisher.publish()
        subscriber.update()
        subscriber.verify()
        answers.append(tokens(engine))
        assert answers[-1] == tokens(as_engine(trained, 2))
        perturb(trained, 0.3)
    assert len({tuple(answer) for answer in answers}) > 1


@pytest.mark.check(LANGUAGES)
def test_a_model_takes_new_weights_between_two_tokens(tmp_path: Path) -> None:
    """What comes after the sixth token is as if another model went on with the first one's cache."""
    trained, engine = llama(0), llama(1).bfloat16()
    publisher, subscriber = Publisher(trained, tmp_path), Subscriber(engine, tmp_path)
    publisher.publish()
    subscriber.update()
    old = as_engine(trained, 2)
    perturb(trained, 0.3)
    new = as_engine(trained, 3)

    from transformers import StoppingCriteria, StoppingCriteriaList

    class NewestWeights(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # pyright: ignore
            if input_ids.shape[1] == PROMPT.shape[1] + 6:
                publisher.publish()
                assert subscriber.update().version == 2
            return torch.zeros(len(input_ids), dtype=torch.bool)

    expected, cache, ids = [], None, PROMPT
    with torch.no_grad():
        for k in range(12):
            out = (old if k < 6 else new)(ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            expected.append(int(ids))
    assert tokens(engine, stopping_criteria=StoppingCriteriaList([NewestWeights()])) == expected
    assert expected != tokens(old)
