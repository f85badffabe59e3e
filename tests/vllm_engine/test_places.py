"""In vLLM's own models changed elements are written where the loader would have put them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import KINDS, change, changed, save, save_changed, trainer
from plain_engine import build, generate, keep_weights_plain, same_bits, weights
from safetensors.torch import save_file
from torch import Tensor

from loco.integrations.engines.engine_weights import first_difference, joined, learn, require_whole
from loco.integrations.engines.vllm_weights import second_copy, weights_of


def views_of(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    places = learn(model, tensors)
    require_whole(places, tensors)
    assert first_difference(places, tensors) is None
    found = {name: view for name, view in joined(places, tensors).items() if isinstance(view, Tensor)}
    assert {name: view.shape for name, view in found.items()} == {n: t.shape for n, t in tensors.items()}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_writing_changes_in_place_equals_a_fresh_engine_on_the_changed_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    tensors = save(kind, tmp_path / "old")
    changes = change(tensors)
    save_changed(tmp_path / "old", tmp_path / "new", changed(tensors, changes))
    engine = build(tmp_path / "old")
    before, old_tokens = weights(engine), generate(engine)

    assert engine.apply_model(second_copy) == [None]
    (views,) = engine.apply_model(lambda model: views_of(model, tensors))
    assert same_bits(weights(engine), before)
    for name, (positions, values) in changes.items():
        views[name][torch.unravel_index(positions, views[name].shape)] = values
    engine.reset_prefix_cache()
    new_weights, new_tokens = weights(engine), generate(engine)
    fresh = build(tmp_path / "new")
    assert same_bits(new_weights, weights(fresh))
    assert new_tokens == generate(fresh)
    assert new_tokens != old_tokens


def test_experts_that_a_trainer_holds_in_one_tensor_are_one_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of vLLM's loader, which takes them apart; their names are those of transformers in memory."""
    keep_weights_plain(monkeypatch)
    save("qwen3_moe", tmp_path / "0")
    tensors = {name: parameter.detach() for name, parameter in trainer("qwen3_moe").named_parameters()}
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].ndim == 3
    engine = build(tmp_path / "0")
    (views,) = engine.apply_model(lambda model: views_of(model, tensors))
    assert same_bits(views, tensors)


def test_a_checkpoint_may_have_several_files_and_more_than_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_weights_plain(monkeypatch)
    folder = tmp_path / "0"
    tensors = save("qwen3", folder)
    (folder / "model.safetensors").unlink()
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    files = {"model-1.safetensors": dict(list(tensors.items())[:7])}
    files["model-2.safetensors"] = dict(list(tensors.items())[7:]) | more
    for file, part in files.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    engine = build(folder)
    (found,) = engine.apply_model(lambda model: weights_of(model, engine.llm_engine.vllm_config))
    views = {name: view for name, view in found.items() if isinstance(view, Tensor)}
    assert same_bits(views, tensors)
    assert "2 tensors of the checkpoint are not loaded" in caplog.text
    assert all(name in caplog.text for name in more)
