"""A tiny Llama of torchtitan's, its data, and what torchtitan lacks on a machine without a GPU."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils
from tiny import LENGTH, WORDS, site_tokens
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# What torchtitan takes for a device module: without a GPU it would take torch.cuda.
if not torch.cuda.is_available():
    cpu: Any = SimpleNamespace(**vars(torch.cpu))
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device: "CPU"
    cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device: {}
    torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", cpu

import torchtitan.distributed.utils
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, model_registry
from torchtitan.trainer import Trainer

# torchtitan 0.3 calls torch.distributed.set_timeout after its first step, which torch 2.13 does not have.
if not hasattr(torch.distributed, "set_timeout"):
    torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None

BATCH, STEPS = 4, 10


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


class Batches(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = False  # which a validator says

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.done = 0
        self.size, self.rank = dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        batches = site_tokens(BATCH * STEPS * self.size).split(BATCH)[self.rank :: self.size]
        while self.done < len(batches):
            rows = batches[self.done]
            self.done += 1
            positions = torch.arange(LENGTH - 1).expand(BATCH, -1).contiguous()
            yield {"input": rows[:, :-1].contiguous(), "positions": positions}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


def config(folder: str, steps: int = STEPS) -> Trainer.Config:
    llama3_configs["tiny"] = tiny
    spec = model_registry("tiny")
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, str(name), ScaledDotProductAttention.Config())  # the others don't train on a CPU
    optimizer = default_adamw(lr=1e-3)
    optimizer.implementation = "for-loop"
    return Trainer.Config(
        model_spec=spec,
        tokenizer=Words.Config(),
        dataloader=Batches.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH, seq_len=LENGTH - 1, steps=steps, disable_cuda_graphs=True
        ),
        # The default wants every parameter on a mesh before FSDP2 sees it, and here none is.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=True, freq=3, steps=1, dataloader=Batches.Config()),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=6, last_save_model_only=False, keep_latest_k=0
        ),
        dump_folder=f"{folder}/{os.environ['LOCO_SITE']}",
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    )


def let_gloo_reduce(trainer: Trainer) -> None:
    """torchtitan has FSDP2 divide gradients within the reduction, which gloo can't."""
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def tiny(attn_backend: str, tp_gemm_backend: Any = "default") -> Any:
    """Its smallest, and smaller."""
    made = llama3_configs["debugmodel"](attn_backend=attn_backend, tp_gemm_backend=tp_gemm_backend)
    made.layers = made.layers[:2]
    made.vocab_size = made.tok_embeddings.num_embeddings = made.lm_head.out_features = WORDS
    return made
