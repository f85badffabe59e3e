"""A model of one's own, from a folder: its forward pass, its sampling, and what a bad folder is told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from languages import save_tokenizer
from selection import COMMANDS, LANGUAGES
from torch.nn.parallel import DistributedDataParallel

from experiments.errors import ExperimentError
from experiments.models.huggingface import HuggingFaceModel
from experiments.reporting.results import read

END = 256  # the tiny tokenizer: a token per byte, then the one that ends an answer
TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % END


@pytest.fixture
def hub() -> Any:
    return pytest.importorskip("transformers", reason="needs the optional package transformers")


def llama(*, tied: bool = True, vocabulary: int = 264) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=48,
            tie_word_embeddings=tied,
            initializer_range=0.3,  # far from uniform: logits that tell errors apart
        )
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Its default dropout, 0.1, would show.
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=264,
            n_positions=48,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.3,
            bos_token_id=END,
            eos_token_id=END,
        )
    )


def untied() -> Any:
    return llama(tied=False)


def sliding() -> Any:
    """Attention that sees four tokens back: its cache forgets."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=48,
            sliding_window=4,
            initializer_range=0.3,
        )
    )


pytestmark = pytest.mark.check(LANGUAGES)  # to import transformers takes longer than most tests do


@pytest.fixture(params=[llama, untied, gpt2, sliding])
def source(request: pytest.FixtureRequest, hub: Any, tmp_path: Path) -> Any:
    """transformers' own model, saved in `tmp_path` with a tokenizer."""
    model = request.param().eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return model


@pytest.fixture
def model(source: Any, tmp_path: Path) -> HuggingFaceModel:
    return HuggingFaceModel(tmp_path)


def on_the_grid(source: Any) -> Any:
    with torch.no_grad():
        for weight in source.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    return source


def test_the_forward_pass_is_the_librarys_with_rounded_weights(source: Any, model: HuggingFaceModel) -> None:
    model.train()  # which turns no dropout on
    logits = model(TOKENS)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 12, model.vocabulary)
    assert not torch.equal(logits, source(TOKENS).logits)
    assert torch.equal(logits, on_the_grid(source)(TOKENS).logits)


def test_the_forward_pass_sees_only_the_bf16_cast_of_every_weight(model: HuggingFaceModel) -> None:
    on_the_grid(model)
    with torch.no_grad():
        seen = model(TOKENS)
        for name, weight in model.named_parameters():
            original = weight.clone()
            # A bias starts at zero, where there is no ulp to be below.
            weight.copy_(torch.where(original == 0, 2.0**-4, original))
            moved = model(TOKENS)
            weight.mul_(1 + 2**-10)  # below half a BF16 ulp: the cast is the same
            assert torch.equal(model(TOKENS), moved), name
            weight.view(-1)[::2] *= 1 + 2**-5  # more than an ulp; a norm would undo a common factor
            assert not torch.equal(model(TOKENS), moved), name
            weight.copy_(original)
        assert torch.equal(model(TOKENS), seen)


def test_gradients_pass_the_rounding_unchanged_and_tied_weights_get_one(
    source: Any, model: HuggingFaceModel
) -> None:
    """Straight through: the gradient at w is the library's at bf16(w), not itself rounded to BF16."""
    model(TOKENS).logsumexp(-1).sum().backward()
    on_the_grid(source)(TOKENS).logits.logsumexp(-1).sum().backward()
    mine = dict(model.model.named_parameters())
    theirs = dict(source.named_parameters())
    assert mine.keys() == theirs.keys()
    assert ("lm_head.weight" in mine) != source.config.tie_word_embeddings
    finer = 0
    for name, weight in mine.items():
        assert weight.dtype == torch.float32
        assert weight.grad is not None, name
        assert torch.equal(weight.grad, theirs[name].grad), name
        finer += int((weight.grad != weight.grad.to(torch.bfloat16)).sum())
    assert finer > 0


def test_gradients_are_the_same_behind_data_parallelism(
    single_site: None, model: HuggingFaceModel, tmp_path: Path
) -> None:
    parallel = DistributedDataParallel(HuggingFaceModel(tmp_path))
    for each in (model, parallel):
        for _ in range(2):  # the second backward pass fails where a parameter went unused in the first
            each(TOKENS).logsumexp(-1).sum().backward()
    for mine, theirs in zip(model.parameters(), parallel.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """One token's products are summed in another order than those of a whole sequence: FP32's last bits."""
    return torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_extending_token_by_token_equals_the_forward_pass(model: HuggingFaceModel) -> None:
    with torch.no_grad():
        whole = model(TOKENS)
    logits, past = model.extend(TOKENS[:, :5], None)
    assert logits.shape == (2, model.vocabulary)
    assert logits.dtype == torch.float32
    assert close(logits, whole[:, 4])
    logits, past = model.extend(TOKENS[:, 5:8], past)
    assert close(logits, whole[:, 7])
    for time in range(8, 12):
        logits, past = model.extend(TOKENS[:, time : time + 1], past)
        assert close(logits, whole[:, time]), time
        assert not close(logits, whole[:, time - 1])


def test_what_stands_on_the_right_changes_nothing_before_it(model: HuggingFaceModel) -> None:
    padded = TOKENS.clone()
    padded[:, 8:] = model.end
    with torch.no_grad():
        assert torch.equal(model(padded)[:, :8], model(TOKENS)[:, :8])


def test_a_past_of_selected_sequences_equals_their_batch(model: HuggingFaceModel) -> None:
    _, past = model.extend(TOKENS[:, :6], None)
    past = model.select(past, torch.arange(2).repeat_interleave(3))
    batch = TOKENS.repeat_interleave(3, 0)  # [6, 12]
    batch[:, 6:] = torch.randint(END, (6, 6))  # the six go different ways
    with torch.no_grad():
        whole = model(batch)
    for time in range(6, 12):
        logits, past = model.extend(batch[:, time : time + 1], past)
        assert close(logits, whole[:, time]), time
    past = model.select(past, torch.arange(6).repeat_interleave(2))  # and again, mid-answer
    zero = torch.zeros(12, 1, dtype=torch.long)
    logits, past = model.extend(zero, past)
    assert torch.equal(logits[::2], logits[1::2])
    past = model.select(past, torch.tensor([1, 6, 11]))  # the others have ended
    with torch.no_grad():
        fewer = model(torch.cat([batch[[0, 3, 5]], zero[:3], zero[:3]], dim=1))
    assert close(model.extend(zero[:3], past)[0], fewer[:, -1])


def test_sequences_of_a_linear_attention_past_can_be_selected(hub: Any, tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    hybrid = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=0,
            max_position_embeddings=48,
        )
    )
    hybrid.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    test_a_past_of_selected_sequences_equals_their_batch(HuggingFaceModel(tmp_path))


def test_an_answer_keeps_the_weights_it_began_with(model: HuggingFaceModel) -> None:
    with torch.no_grad():
        before = model(TOKENS)[:, -1]
        _, past = model.extend(TOKENS[:, :-1], None)
        for weight in model.parameters():
            weight.mul_(-1.5)
        after = model(TOKENS)[:, -1]
    assert close(model.extend(TOKENS[:, -1:], past)[0], before)
    assert close(model.extend(TOKENS, None)[0], after)
    assert not close(after, before)


def test_a_past_that_is_renewed_goes_on_with_the_weights_of_today(model: HuggingFaceModel) -> None:
    with torch.no_grad():
        _, past = model.extend(TOKENS[:, :-1], None)
        _, same = model.extend(TOKENS[:, :-1], None)
        for weight in model.parameters():
            weight.mul_(-1.5)
        before = model.extend(TOKENS[:, -1:], same)[0]
    renewed = model.renewed(past)
    with pytest.raises(ValueError, match="used up"):
        model.select(past, torch.tensor([0, 0]))
    assert not close(model.extend(TOKENS[:, -1:], renewed)[0], before)
    _, past = model.extend(TOKENS[:, :-1], None)
    assert torch.equal(
        model.extend(TOKENS[:, -1:], model.renewed(past))[0],
        model.extend(TOKENS[:, -1:], model.extend(TOKENS[:, :-1], None)[1])[0],
    )


def test_weights_that_are_rounded_already_are_not_copied(model: HuggingFaceModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
        logits, past = model.extend(TOKENS, None)
        model.is_rounded = True
        again, same = model.extend(TOKENS, None)
    assert not same.weights
    assert close(again, logits)  # a copy lies elsewhere, and products are summed by how memory is aligned
    own = {weight.data_ptr() for weight in model.parameters()}
    assert not own & {weight.data_ptr() for weight in past.weights.values()}


@pytest.mark.parametrize("source", [llama], indirect=True)
def test_a_past_serves_once(model: HuggingFaceModel) -> None:
    """Its keys and values change in place: going on from it twice would read the first answer's tokens."""
    for use in (
        lambda past: model.extend(TOKENS[:, :1], past),
        lambda past: model.select(past, torch.tensor([0, 0])),
    ):
        _, past = model.extend(TOKENS, None)
        use(past)
        with pytest.raises(ValueError, match="this past is used up"):
            use(past)


@pytest.mark.parametrize("source", [llama], indirect=True)
def test_text_comes_back_from_its_tokens(model: HuggingFaceModel) -> None:
    for text in ("", "7 * 8 = 56\n", " a , b 's  c", "grün 木"):
        tokens = model.encode(text)
        assert len(tokens) == len(text.encode())  # a token per byte and no special ones
        assert model.decode(tokens) == text
    assert model.decode([*model.encode("56"), model.end]) == "56<end>"
    assert (model.end, model.context, model.vocabulary) == (END, 48, 264)


@pytest.mark.parametrize("source", [llama], indirect=True)
def test_loading_opens_no_connection_and_prints_nothing(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **options: tried.append(asked))
    capfd.readouterr()  # what saving it printed
    HuggingFaceModel(tmp_path)
    assert not tried
    assert capfd.readouterr() == ("", "")


def refusal(folder: Path) -> str:
    """What a person is told: one line, and no traceback of the library's behind it."""
    with pytest.raises(ExperimentError) as refused:
        HuggingFaceModel(folder)
    shown = "".join(traceback.format_exception(refused.value))
    assert shown.count("Traceback") == 1
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


def test_without_the_package_a_person_is_told_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what makes an import fail
    assert "needs transformers: pip install transformers" in refusal(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'model'}; name one" in refusal(tmp_path / "model")


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_folder_without_a_tokenizer_is_refused(hub: Any, tmp_path: Path, make: Callable[[], Any]) -> None:
    """For Llama transformers says so; for GPT-2 it makes a tokenizer without words."""
    make().save_pretrained(tmp_path)
    assert "holds no tokenizer" in refusal(tmp_path)


def no_model(folder: Path) -> None:
    pass


def no_weights(folder: Path) -> None:
    llama().config.save_pretrained(folder)


def broken_weights(folder: Path) -> None:
    llama().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"{")


def picture_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


def own_code(folder: Path) -> None:
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (folder / "code.py").write_text("raise SystemExit('this ran')")


@pytest.mark.parametrize("make", [no_model, no_weights, broken_weights, picture_model, own_code])
def test_a_folder_without_a_causal_model_is_refused(
    hub: Any, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    save_tokenizer(tmp_path)
    assert "holds no causal language model" in refusal(tmp_path)


def test_a_body_without_its_head_is_refused(hub: Any, tmp_path: Path) -> None:
    llama(tied=False).model.save_pretrained(tmp_path)  # transformers would make up a random head
    save_tokenizer(tmp_path)
    assert "lacks 1 of the weights of a LlamaForCausalLM, lm_head.weight for one" in refusal(tmp_path)


def test_an_encoder_is_refused(hub: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    hub.BertForMaskedLM(hub.BertConfig(**sizes, intermediate_size=64)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "BertLMHeadModel that does not predict each token from the ones before it" in refusal(tmp_path)


def test_a_tokenizer_has_to_end_answers_with_a_token_of_the_models(hub: Any, tmp_path: Path) -> None:
    llama(vocabulary=END).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "ends an answer with token 256, but the model's last token is 255" in refusal(tmp_path)
    save_tokenizer(tmp_path, end=None)
    assert "has no token that ends an answer; save it with an eos_token" in refusal(tmp_path)


@pytest.mark.check(COMMANDS)
def test_a_model_of_ones_own_trains_by_command(hub: Any, tmp_path: Path) -> None:
    """Whole: prompts in its tokens, answers sampled and rewarded, two sites, one θ."""
    folder, repository = tmp_path / "mine", Path(__file__).parents[3]
    llama().save_pretrained(folder)
    save_tokenizer(folder)
    (tmp_path / "configs").symlink_to(repository / "configs")
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "preset=smoke", "nproc=2", "model=hf", f"path={folder}"],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "runs" / "pulseloco" / "runs").glob("*.json")
    result = read(kept)
    assert (result.parameters, result.sites) == (llama().num_parameters(), 2)
    assert len(result.rewards) == 2  # 16 steps, H = 8
    assert result.rounds[-1].round == 2
    assert 0 < result.evaluations[-1].scores["sampled"] < 1  # chance never earns a reward to learn from
