"""Models, words and data that a test makes, since nothing can be downloaded; and what a site tells."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import loco
from loco.inner.init_step import only_initialises

WORDS, LENGTH = 64, 12


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    made = LlamaForCausalLM(config)
    nn.Module.to(made, dtype)
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{k}": k for k in range(4, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def tokens(seed: int, rows: int, length: int = LENGTH) -> Tensor:
    """Ascending by a step that the row's first word tells: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(WORDS - 4, (rows, 1), generator=generator)
    return 4 + (first + torch.arange(length) * (1 + first % 3)) % (WORDS - 4)


def site_seed() -> int:
    """Each site learns from data of its own."""
    return sum(os.environ["LOCO_SITE"].encode())


def site_tokens(rows: int) -> Tensor:
    return tokens(site_seed(), rows)


def dataset(rows: Tensor) -> Dataset:
    return Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})


def texts(rows: Tensor) -> list[str]:
    return [" ".join(f"w{k}" for k in row) for row in rows.tolist()]


@dataclass
class Told:
    """What a site tells of its training."""

    steps: list[list[int]] = field(default_factory=list)  # the weights after each, as hashes
    reports: list[loco.SyncReport] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # at the end
    outer: dict[str, Tensor] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    # In each evaluation, whether the weights were θ; and whether they were the site's own, within a round.
    shown: list[tuple[bool, bool]] = field(default_factory=list)


def watch(rounds: Any) -> Told:
    """Follow the rounds of a handle, or of a wrapper."""
    told = Told()

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if only_initialises(optimizer):
            return
        told.steps.append(hashes(rounds))
        note(told, rounds)

    # On a wrapper this comes after the round; on an attached optimizer after the hook that runs it.
    (rounds.inner if isinstance(rounds, loco.Attached) else rounds).register_step_post_hook(after_step)
    return told


def note(told: Told, rounds: Any) -> None:
    report = rounds.last_report
    if report is not None and (not told.reports or told.reports[-1] is not report):
        told.reports.append(report)


def look(told: Told, rounds: Any) -> None:
    """Note, in an evaluation, which weights it sees."""
    state = rounds.outer_state
    seen = torch.cat([p.detach().reshape(-1) for p in _params(rounds)])[state.start : state.stop]
    is_own = rounds.local_step > 0 and hashes(rounds) == told.steps[-1]
    told.shown.append((torch.equal(seen, state.anchor.to(seen.dtype)), is_own))


def finish(told: Told, rounds: Any) -> Told:
    """Add what is there at the end."""
    note(told, rounds)
    told.weights = [p.detach().clone() for p in _params(rounds)]
    state = rounds.outer_state
    told.outer = {"anchor": state.anchor, "momentum": state.momentum, "residual": state.residual}
    return told


def hashes(rounds: Any) -> list[int]:
    return [int(torch.hash_tensor(p.detach()).view(torch.int64)) for p in _params(rounds)]


def as_one_rank(model: nn.Module, *, shards: bool = False) -> tuple[Any, int, int]:
    """A model as a loop of torch's trains it in this world, by DDP or FSDP2; this rank, and how many."""
    if not dist.is_initialized():
        return model, 0, 1
    rank, size = dist.get_rank(), dist.get_world_size()
    if not shards:
        return DistributedDataParallel(model), rank, size
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), rank, size


def reduce_gradients(net: Any, now: bool) -> None:
    """Whether the next backward pass does, or leaves it to a later piece of the batch."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(now)
    else:
        net.require_backward_grad_sync = now  # DDP's


def _params(rounds: Any) -> list[Tensor]:
    params = [p for group in rounds.inner.param_groups for p in group["params"]]
    return [p.to_local() if isinstance(p, DTensor) else p for p in params]
