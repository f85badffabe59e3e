"""A transformers model is published, and followed, by the names and in the shapes of its checkpoint."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from published import same_bits
from safetensors.torch import load_file

import loco
from loco.sync import LayoutError, Publisher, Subscriber
from loco.sync.weights.checkpoint import _tell
from loco.sync.weights.tensors import tensors_of, without_aliases

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 5, "tie_word_embeddings": True, **EXPERTS},
    "DeepseekV3": {"n_routed_experts": 4, **EXPERTS, **MLA, **GROUPS},
}
IN_MEMORY = "model.layers.0.mlp.experts.gate_up_proj"
IN_CHECKPOINT = "model.layers.0.mlp.experts.2.up_proj.weight"


def family(kind: str, seed: int = 0) -> Any:
    import transformers  # here, as collecting tests need not wait for it

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES | FAMILIES[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16()


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_published_is_what_the_model_saves_and_views_of_its_memory(tmp_path: Path, kind: str) -> None:
    trained, other = family(kind), family(kind, seed=1)
    publisher, subscriber = Publisher(trained, tmp_path / "url"), Subscriber(other, tmp_path / "url")
    engine = {name: torch.zeros_like(one) for name, one in saved(trained, tmp_path / "1").items()}
    follower = Subscriber(engine, tmp_path / "url")
    for version in ("1", "2"):
        publisher.publish()
        assert (follower.check(), subscriber.check()) == (int(version), int(version))
        follower.update()
        same_bits(engine, saved(trained, tmp_path / version))
        subscriber.update()
        same_bits(dict(other.named_parameters()), dict(trained.named_parameters()))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(-1)[:: 7 + parameter.numel() % 5] *= 1.25
    views = without_aliases(tensors_of(trained))
    for tensor in views.values():
        tensor.fill_(3.0)
    assert all((parameter == 3.0).all() for parameter in trained.parameters())
    assert (IN_CHECKPOINT in views) == (kind == "Qwen3Moe")
    assert IN_MEMORY not in views


def test_what_can_be_no_view_keeps_its_names_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = family("Qwen3Moe")
    _tell.cache_clear()

    def computed(model: Any, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"joined": torch.cat([tensor.flatten() for tensor in held.values()])}

    def refused(model: Any, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise RuntimeError("view size is not compatible")

    for revert in (computed, refused, computed):
        with mock.patch("transformers.core_model_loading.revert_weight_conversion", revert):
            assert IN_MEMORY in tensors_of(model)
    told = [text for text in caplog.messages if "go by the names that they have in memory" in text]
    assert [text.partition("no view of them ")[2] for text in told] == [
        "(joined is computed)",
        "(view size is not compatible)",
    ]


def test_an_engine_of_other_names_is_told_before_the_first_update(tmp_path: Path) -> None:
    model = family("Qwen3Moe")
    subscriber = Subscriber(model, tmp_path)
    assert subscriber.check() is None  # nothing is published yet
    Publisher(dict(model.named_parameters()), tmp_path).publish()
    with pytest.raises(LayoutError, match=r"experts\.\w+ is published, and there is no such tensor here"):
        subscriber.check()


def test_what_else_is_wrong_the_update_tells(tmp_path: Path) -> None:
    model = family("Llama")
    Publisher(model, tmp_path).publish()
    subscriber = Subscriber(model, tmp_path, key=b"a key of some length")
    assert subscriber.check() is None
    with pytest.raises(loco.AuthenticationError):
        subscriber.update()
