"""Trainers of TRL's on CPUs, with a tiny model; a rank of one: `trl_trainers.py SERVER MODEL FOLDER URL`."""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from loco.integrations.trl import WeightTransfer, send_patches

PROMPTS = [f"w{k} w{k + 1} w{2 * k}" for k in range(5, 37)]
STEPS = 3
RATE = 1e-5  # of Adam: moves some weights in ten to the next BF16 value


def usual(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "learning_rate": RATE,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }


def trainer(
    server: str,
    model: Path,
    folder: Path,
    *callbacks: TrainerCallback,
    use_vllm: bool = True,
    rloo: bool = False,
) -> Any:
    address: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": server}
    kind: Any = RLOOTrainer if rloo else GRPOTrainer
    config: Any = RLOOConfig if rloo else GRPOConfig
    return kind(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward,
        args=config(**usual(folder), **address, use_vllm=use_vllm, beta=0.0),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        callbacks=list(callbacks),
    )


def async_trainer(
    transfer: WeightTransfer,
    model: Path,
    folder: Path,
    callback: TrainerCallback,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGRPOTrainer:
    """On a CPU, where TRL has neither its attention nor a name for the device."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "CPU")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template  # of which TRL knows how to read answers
    made = AsyncGRPOTrainer(
        str(model),
        reward,
        args=AsyncGRPOConfig(**usual(folder), vllm_server_base_url=transfer.server),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": one}] for one in PROMPTS]}),
        processing_class=tokenizer,
        callbacks=[callback],
        weight_transfer=transfer,
    )
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    return made


def tree_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, size], of segments end to end
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree_kv_index: Tensor,  # the tokens of each segment's path from its root, end to end
    tree_cu_seqlens_q: Tensor,  # where segments begin and end
    tree_cu_seqlens_k: Tensor,  # where paths do
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a kernel does on GPUs: each segment attends to its path, which ends with it, causally."""
    segments, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    found = []
    for segment, ends in zip(pairwise(segments), pairwise(paths), strict=True):
        (start, stop), path = segment, tree_kv_index[slice(*ends)]
        mask = torch.ones(stop - start, len(path), dtype=torch.bool).tril(len(path) - (stop - start))
        keys, values = key.index_select(2, path), value.index_select(2, path)
        asked = query[:, :, start:stop]
        found.append(scaled_dot_product_attention(asked, keys, values, mask, scale=scaling, enable_gqa=True))
    return torch.cat(found, 2).transpose(1, 2), None


def reward(completion_ids: list[list[int]], **_: Any) -> Any:
    return [sum(token % 7 for token in tokens) / 7 for tokens in completion_ids]


def main(server: str, model: str, folder: str, url: str) -> Any:
    """-> the trainer, for as long as it should live"""
    with send_patches(url) as transfer:
        grpo = trainer(server, Path(model), Path(folder))
    grpo.train()
    grpo.vllm_generation.sync_weights()
    if grpo.accelerator.is_main_process:
        print(transfer.published, flush=True)
    grpo.accelerator.wait_for_everyone()
    grpo.accelerator.end_training()
    return grpo


if __name__ == "__main__":
    kept = main(*sys.argv[1:])
    sys.stdout.flush()
    # The destructor of DDP's process group waits for gloo's thread, which may wait for the GIL meanwhile.
    os._exit(0)
