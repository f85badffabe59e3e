"""vLLM on a CPU with its weights as a GPU keeps them: as they were loaded.

On a CPU vLLM packs the weights of linear layers and of experts for the CPU's instructions, where no
change can be written. In vLLM's own processes this is a plugin, see `plugins`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization import fp8
from vllm.platforms import current_platform

from loco.sync import Prepared, Subscriber, Updated

BUILT: list[LLM] = []  # in this test: the end of one takes the process groups of all with it
PROMPTS = ([5, 6, 7], [200, 3, 9, 27, 81, 243], [11])
GREEDY = SamplingParams(temperature=0, max_tokens=12, detokenize=False, logprobs=0, ignore_eos=True)


def keep_weights_plain(patch: pytest.MonkeyPatch | None = None, *, experts: bool = True) -> None:
    put = patch.setattr if patch else setattr
    put(utils, "dispatch_cpu_unquantized_gemm", _plain_linear)
    put(kernels, "_POSSIBLE_FP8_BLOCK_KERNELS", {current_platform._enum: [PlainBlocks]})
    if not experts:
        return
    put(CPUUnquantizedExperts, "process_weights_after_loading", lambda experts, layer: None)
    put(CPUUnquantizedExperts, "apply", _plain_experts)
    # Of vLLM's backends for FP8 experts this one, too, keeps them as they were loaded.
    put(fp8, "select_fp8_moe_backend", lambda **_: (Fp8MoeBackend.TRITON, PlainFp8Experts))


def fail_when_told() -> None:
    """LOCO_TEST_FAILS="3 1, …": version 3 can't be written on rank 1."""
    told = os.environ.get("LOCO_TEST_FAILS")
    apply = Subscriber.apply
    if not told or apply.__name__ != "apply":
        return

    def failing(subscriber: Subscriber, prepared: Prepared) -> Updated:
        if f"{prepared.version} {dist.get_rank()}" in told.split(", "):
            raise OSError(f"version {prepared.version} fails here")
        return apply(subscriber, prepared)

    Subscriber.apply = failing  # pyright: ignore[reportAttributeAccessIssue]


class PlainBlocks(Fp8BlockScaledMMLinearKernel):
    """Of vLLM's kernels for FP8 in blocks those for CPUs need AMX. What is done after loading is the base
    class's, as for Cutlass and Triton."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, **given: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return linear(given["A"], _times(given["B"], given["Bs"]).to(given["A"].dtype))


class PlainFp8Experts(CPUUnquantizedExperts):
    """Of FP8 in blocks."""

    def apply(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **more: Any
    ) -> None:
        assert self.w1_scale is not None
        assert self.w2_scale is not None
        one, two = _times(w1, self.w1_scale), _times(w2, self.w2_scale)
        dtype = hidden_states.dtype
        _plain_experts(self, output, hidden_states, one.to(dtype), two.to(dtype), **more)


def _times(weight: Tensor, scales: Tensor) -> Tensor:
    """By its blocks' scales."""
    rows, columns = weight.shape[-2:]
    return (
        weight.float()
        * scales.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    )


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = lambda x, weight, bias: linear(x, weight, bias)


def _plain_experts(
    _: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **more: Any
) -> None:
    of_rank = more.get("expert_map")  # of all experts the number here, or -1
    experts = more["topk_ids"] if of_rank is None else of_rank[more["topk_ids"]]
    chosen = zip(hidden_states, more["topk_weights"], experts, strict=True)
    for row, (token, scales, experts) in enumerate(chosen):
        total = torch.zeros_like(token)
        for scale, expert in zip(scales[experts >= 0], experts[experts >= 0], strict=True):
            gate, up = linear(token, w1[expert]).chunk(2)
            total += scale.to(token.dtype) * linear(silu(gate) * up, w2[expert])
        output[row] = total


def build(folder: Path, **options: Any) -> LLM:
    """An engine, in this process if there is one rank."""
    fixed = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    BUILT.append(LLM(str(folder), **fixed, kv_cache_memory_bytes=16 << 20, **options))
    return BUILT[-1]


def follow(folder: Path, options: Mapping[str, Any] = MappingProxyType({}), **init_info: Any) -> LLM:
    """An engine on the checkpoint in folder `1`, that follows what is published under `url`."""
    engine = build(folder / "1", weight_transfer_config=WeightTransferConfig(backend="loco"), **options)
    engine.init_weight_transfer_engine({"init_info": {"url": str(folder / "url"), **init_info}})
    return engine


def update(engine: LLM, version: int | None = None, **adapters: int) -> None:
    """`adapters`: versions of them, by their numbers."""
    engine.start_weight_update()
    engine.update_weights({"update_info": {"version": version, "adapters": adapters}})
    engine.finish_weight_update(f"version {version}")
    engine.reset_prefix_cache()


def weights(engine: LLM) -> dict[str, Tensor]:
    """Copies of all parameters of the one rank."""
    return engine.apply_model(lambda model: {name: p.clone() for name, p in model.named_parameters()})[0]


def generate(
    engine: LLM, prompts: Sequence[list[int]] = PROMPTS, adapter: LoRARequest | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and their log-probabilities."""
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    generated = engine.generate(inputs, GREEDY, use_tqdm=False, lora_request=adapter)
    outputs = [one.outputs[0] for one in generated]
    chosen = [
        [(found or {})[token].logprob for token, found in zip(one.token_ids, one.logprobs or (), strict=True)]
        for one in outputs
    ]
    return [list(one.token_ids) for one in outputs], chosen


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(*(bits[name].contiguous().view(torch.uint8) for bits in (one, other))) for name in one
    )


def plugins(folder: Path) -> str:
    """A PYTHONPATH with which every process of vLLM keeps weights plain, and fails when it is told."""
    package = folder / "plain_engine-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plain_engine\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n"
        "plain_engine = plain_engine:keep_weights_plain\n"
        "failing_rank = plain_engine:fail_when_told\n"
    )
    here = Path(__file__).parent
    return f"{folder}:{here}:{here.parents[1]}"
