"""An engine that serves FP8 in blocks follows what a trainer publishes in FP8: in place, as a fresh load."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from models import KINDS, SIZES
from plain_engine import (
    PlainBlocks,
    build,
    follow,
    generate,
    keep_weights_plain,
    same_bits,
    update,
    weights,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from loco.sync import Publisher, fp8_checkpoint

# By kind of model.
VERSIONS = {"llama": 50, "qwen3_moe": 10, "deepseek_v3": 10}
# Of blocks: what vLLM fuses must be whole ones.
WHOLE_BLOCKS = {"num_key_value_heads": 4, "torch_dtype": "bfloat16", "moe_intermediate_size": 128}
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
QUANTISED |= {"activation_scheme": "dynamic"}


def loaded_as(name: str, tensor: Tensor) -> torch.dtype:
    return torch.float32 if name.endswith("correction_bias") else torch.bfloat16


class Trainer:
    """FP32 weights under Adam, whose gradients are noise. Each step changes some of the FP8 ones."""

    def __init__(self, kind: str, folder: Path) -> None:
        config, model, more = KINDS[kind]
        sizes: dict[str, Any] = SIZES | more | WHOLE_BLOCKS
        torch.manual_seed(0)
        self.folder = folder
        self.model: PreTrainedModel = model(config(**sizes))
        self.source = fp8_checkpoint(self.model)
        self._adam = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.save("1")
        self.publisher = Publisher(self.source, folder / "url", dtype=loaded_as)
        self.publisher.publish()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        self._adam.step()
        self.publisher.publish()

    def save(self, name: str) -> None:
        (self.folder / name).mkdir()
        found = self.source().items()
        rest = {k: t.to(loaded_as(k, t)) for k, t in found if t.dtype == torch.float32 and "scale" not in k}
        save_file(dict(found) | rest, self.folder / name / "model.safetensors", metadata={"format": "pt"})
        config = self.model.config.to_dict() | {"quantization_config": QUANTISED}
        config |= {"architectures": [type(self.model).__name__]}
        routers = [f"model.layers.{k}.mlp.gate" for k in range(self.model.config.num_hidden_layers)]
        config["quantization_config"] |= {"modules_to_not_convert": ["lm_head", *routers]}
        (self.folder / name / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))


@pytest.mark.parametrize("kind", VERSIONS)
def test_after_50_versions_an_fp8_engine_is_a_fresh_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    trainer, random, version, last = Trainer(kind, tmp_path), Random(0), 1, VERSIONS[kind]
    engine = follow(tmp_path)
    first = weights(engine), generate(engine)
    assert first[0]["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    while version < last:
        for _ in range(apart := min(random.randint(1, 8), last - version)):
            trainer.step()
        update(engine)
        version += apart
    before = weights(engine)
    trainer.save("last")
    fresh = build(tmp_path / "last")
    assert same_bits(weights(engine), weights(fresh))
    assert generate(engine) == generate(fresh) != first[1]
    trainer.step()
    update(engine)
    assert not same_bits(weights(engine), before)
    update(engine, last)
    assert same_bits(weights(engine), before)
    update(engine)
    (transfer,) = engine.collective_rpc(lambda worker: worker.weight_transfer_engine)
    assert transfer.subscriber.rollback() == last
    transfer._compute_again()
    assert same_bits(weights(engine), before)


def test_a_version_that_fails_at_the_end_leaves_what_is_computed_from_weights_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLA's projections, which vLLM computes from a weight in FP8."""
    keep_weights_plain(monkeypatch)
    trainer = Trainer("deepseek_v3", tmp_path)
    engine = follow(tmp_path)
    before = weights(engine), generate(engine)
    trainer.step()
    compute, calls = MLAAttention.process_weights_after_loading, []

    def failing(layer: MLAAttention, dtype: torch.dtype) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise MemoryError("in the second layer")
        compute(layer, dtype)

    monkeypatch.setattr(MLAAttention, "process_weights_after_loading", failing)
    engine.start_weight_update()
    with pytest.raises(MemoryError, match="in the second layer"):
        engine.update_weights({"update_info": {}})
    engine.reset_prefix_cache()
    assert same_bits(weights(engine), before[0])
    assert generate(engine) == before[1]
    update(engine)
    assert not same_bits(weights(engine), before[0])


def test_weights_that_are_kept_as_transposed_views_are_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM keeps them for kernels that take columns."""
    keep_weights_plain(monkeypatch)
    params = PlainBlocks._get_layer_params

    def transpose(_: object, layer: Any) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)

    def transposed_back(kernel: PlainBlocks, layer: Any) -> Any:
        found = params(kernel, layer)
        found.weight = found.weight.t()
        return found

    monkeypatch.setattr(PlainBlocks, "process_weights_after_loading", transpose)
    monkeypatch.setattr(PlainBlocks, "_get_layer_params", transposed_back)
    trainer = Trainer("llama", tmp_path)
    engine = follow(tmp_path)
    assert not weights(engine)["model.layers.0.mlp.down_proj.weight"].is_contiguous()
    before = generate(engine)
    for _ in range(10):
        trainer.step()
    update(engine)
    trainer.save("last")
    fresh = build(tmp_path / "last")
    assert same_bits(weights(engine), weights(fresh))
    assert generate(engine) == generate(fresh) != before


@pytest.mark.parametrize(
    ("transposed", "said"),
    [
        ((384, 128), r"qkv_proj.weight was loaded as \[384, 128\] .*, and is kept in another form"),
        ((128, 128), r"o_proj.weight was rearranged or changed after the engine had loaded it"),
    ],
)
def test_a_layout_in_which_nothing_can_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transposed: tuple[int, int], said: str
) -> None:
    keep_weights_plain(monkeypatch)

    def rearranged(_: object, layer: Any) -> None:
        if layer.weight.shape == transposed:
            layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)

    monkeypatch.setattr(PlainBlocks, "process_weights_after_loading", rearranged)
    Trainer("llama", tmp_path)
    with pytest.raises(ValueError, match=said):
        follow(tmp_path)


def test_quantized_weights_that_were_not_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)
    Trainer("llama", tmp_path)
    with pytest.raises(ValueError, match=r"quantized \(fp8\) the checkpoint must be loaded, to compare"):
        follow(tmp_path, {"load_format": "dummy"})
