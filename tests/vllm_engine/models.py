"""Tiny checkpoints of several architectures, and the same with some elements changed."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# Of vLLM's CPU kernels: heads of at least 32, experts of multiples of 32. 250 words are padded to 256.
SIZES = {"vocab_size": 250, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

# Of vLLM's CPU kernels: 512 and 64. A dense layer, and one of experts that are chosen by a bias.
MLA = {"q_lora_rank": 96, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 4}
MLA |= {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
MLA |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MORE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # as DeepSeek's own config.json has them

KINDS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),  # biases
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"tie_word_embeddings": True, "head_dim": 32},
    ),  # norms of q and k
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),  # the checkpoint is fused, too
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 32}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 32}),  # norms of q and k
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, MLA | MORE),
}

Changes = dict[str, tuple[Tensor, Tensor]]  # by name: positions in the flat tensor, and the values there


def trainer(kind: str) -> PreTrainedModel:
    config, model, more = KINDS[kind]
    sizes: dict[str, Any] = SIZES | more
    torch.manual_seed(0)
    made = model(config(**sizes))
    torch.nn.Module.to(made, torch.bfloat16)
    for module in made.modules():
        if isinstance(bias := getattr(module, "e_score_correction_bias", None), Tensor):
            module.e_score_correction_bias = bias.float()  # as in published checkpoints
    return made


def save(kind: str, folder: Path) -> dict[str, Tensor]:
    """Write a random checkpoint; what it holds, by name."""
    trainer(kind).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def change(tensors: dict[str, Tensor], seed: int = 0, share: float = 0.2) -> Changes:
    """New values for a share of the elements of each tensor, and for its first and last one."""
    random = torch.Generator().manual_seed(seed)
    changes = {}
    for name, tensor in tensors.items():
        some = torch.randperm(tensor.numel(), generator=random)[: int(share * tensor.numel())]
        positions = torch.cat([some, torch.tensor([0, tensor.numel() - 1])]).unique()
        values = tensor.flatten()[positions].float() * 3 + 0.1 * torch.randn(len(positions), generator=random)
        changes[name] = (positions, values.to(tensor.dtype))
    return changes


def changed(tensors: dict[str, Tensor], changes: Changes) -> dict[str, Tensor]:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, (positions, values) in changes.items():
        copies[name].view(-1)[positions] = values
    return copies


def save_changed(old: Path, new: Path, tensors: dict[str, Tensor]) -> None:
    shutil.copytree(old, new)
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
