"""Sites that shard their model: the gradients of a step are those of one process that has all answers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from languages import save_tokenizer
from pipeline_parts import config_of
from sites import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from experiments.models.model import ByteTransformer
from experiments.pipeline.learning.losses import learn
from experiments.pipeline.learning.sharding import shard
from experiments.pipeline.samples import Group
from experiments.settings.config import TransformerConfig

ANSWERS = (5, 2)  # that have an advantage, by rank: with micro_batch=2 three passes, and one


def group_of(rank: int, count: int) -> Group:
    """Answers of random tokens, of different lengths."""
    chance = np.random.default_rng(rank)
    lengths = chance.integers(2, 6, size=count)
    total = int(lengths.sum())
    return Group(
        head=np.array([1, 2, 3]),
        lengths=lengths,
        answers=chance.integers(10, 60, size=total),
        logp=-3 - chance.random(total, dtype=np.float32),
        versions=np.ones(total, dtype=np.int64),
        advantage=chance.choice([-1.0, 0.5], size=count).astype(np.float32),
    )


def model_of(folder: str) -> nn.Module:
    if not folder:
        return ByteTransformer(TransformerConfig(dim=16, layers=3, heads=2, context=16))
    from experiments.models.huggingface import HuggingFaceModel

    return HuggingFaceModel(Path(folder))


def sharded_gradients(
    rank: int, folder: str, recomputes: bool, *settings: str
) -> tuple[dict[str, Tensor], int]:
    """And how often something within the first layer has computed."""
    model, reference = model_of(folder), model_of(folder).requires_grad_(False)
    for one in (model, reference):
        shard(one, 2, checkpoint_activations=recomputes)
    passes: list[object] = []
    inside = next(one for name, one in model.named_modules() if name.endswith((".mlp_in", ".gate_proj")))
    inside.register_forward_pre_hook(lambda *_: passes.append(1))
    config = config_of("shard=true", "elastic=false", "ranks_per_site=2", *settings)
    learn(model, [group_of(rank, ANSWERS[rank])], config, reference if config.kl else None)
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor()
    return found, len(passes)


def whole_gradients(folder: str, *settings: str) -> dict[str, Tensor]:
    """The mean of what the two ranks' answers give."""
    model, reference = model_of(folder), model_of(folder).requires_grad_(False)
    for rank, count in enumerate(ANSWERS):
        config = config_of(*settings)
        learn(model, [group_of(rank, count)], config, reference if config.kl else None)
    return {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("settings", [(), ("micro_batch=2",), ("micro_batch=2", "kl=0.5")])
def test_a_sharded_step_is_that_of_one_process(settings: tuple[str, ...], recomputes: bool) -> None:
    expected = whole_gradients("", *settings)
    for found, passes in run_ranks(2, sharded_gradients, "", recomputes, *settings):
        assert passes == (3 if "micro_batch=2" in settings else 1) * (2 if recomputes else 1)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            # Sums in another order: FP32's rounding.
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_sharded_model_of_hugging_faces_computes_in_bf16(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the optional package transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, **ends, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    expected = whole_gradients(str(tmp_path))
    plain, _ = run_ranks(2, sharded_gradients, str(tmp_path), False)[0]
    recomputed, passes = run_ranks(2, sharded_gradients, str(tmp_path), True)[0]
    assert passes == 2
    assert plain.keys() == expected.keys()
    for name, gradient in plain.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, recomputed[name])
        # Activations have 8 bits. A cosine does not care for their common scale.
        cosine = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.98, name
