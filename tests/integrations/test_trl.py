"""TRL's SFTTrainer and GRPOTrainer, with and without LoRA: the callback of transformers' Trainer."""

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from claims import (
    ended_alike,
    evaluated_theta,
    learned_separately,
    resumed,
    same_training,
    sent_its_rounds_only,
)
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from sites import launch_worlds
from test_trainer import BATCH, RATE, STEPS, H, Watch, plain_loop
from tiny import Told, llama, site_tokens, texts, tokenizer, tokens
from torch import Tensor, nn
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from loco.integrations.transformers import LocoCallback

EVALUATING = {"eval_strategy": "steps", "eval_steps": 3}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}


def model_of(kind: str) -> Any:
    model = llama()
    if kind == "lora":
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    return model


def usual(folder: str) -> dict[str, Any]:
    return {
        "output_dir": f"{folder}/{os.environ['LOCO_SITE']}",
        "max_steps": STEPS,
        "learning_rate": RATE,
        "save_strategy": "steps",
        "save_steps": 6,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }


def sft_site(folder: str, kind: str, resume: bool = False, evaluates: bool = False) -> Told:
    callback = LocoCallback(sync_every=H)
    watching = Watch(callback)
    sequential = {
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": BATCH,
        "weight_decay": 0.1,
    }
    trainer = SFTTrainer(
        model_of(kind),
        SFTConfig(**usual(folder) | sequential | (EVALUATING if evaluates else {})),
        train_dataset=Dataset.from_dict({"input_ids": site_tokens(BATCH * STEPS * 2).tolist()}),
        eval_dataset=Dataset.from_dict({"input_ids": tokens(7, 8).tolist()}),
        processing_class=tokenizer(),
        compute_loss_func=token_loss,  # TRL's own sums in another order than a plain loop does
        callbacks=[callback, watching],
    )
    trainer.train(resume_from_checkpoint=f"{usual(folder)['output_dir']}/checkpoint-6" if resume else None)
    watching.told.more["is peft"] = isinstance(trainer.model, PeftModel)
    return watching.told


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None) -> Tensor:
    count = labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch  # in an evaluation
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count


def plain_site(kind: str) -> Told:
    return plain_loop(model_of(kind), {}, token_loss)


def grpo_site(folder: str, kind: str, resume: bool = False, evaluates: bool = False) -> Told:
    callback = LocoCallback(sync_every=H)
    watching = Watch(callback)
    asked: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        asked.append(prompts)
        return [sum(len(word) for word in completion.split()) / 10 for completion in completions]

    groups = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    prompts = texts(site_tokens(64)[:, :4])
    trainer = GRPOTrainer(
        model_of(kind),
        reward,
        args=GRPOConfig(**usual(folder) | groups | (EVALUATING if evaluates else {})),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:2]}),
        processing_class=tokenizer(),
        callbacks=[callback, watching],
    )
    trainer.train(resume_from_checkpoint=f"{usual(folder)['output_dir']}/checkpoint-6" if resume else None)
    watching.told.more |= {"asked": asked, "own": set(prompts)}
    return watching.told


def check_sft(kind: str, folder: str) -> tuple[Told, Told]:
    (berlin,), (paris,) = launch_worlds(sft_site, folder, kind)
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    for found, expected in zip((berlin, paris), launch_worlds(plain_site, kind), strict=True):
        same_training(found, expected[0])
    for again, whole in zip(launch_worlds(sft_site, folder, kind, True), (berlin, paris), strict=True):
        resumed(again[0], whole, after=6)
    return berlin, paris


def test_sft_does_what_a_plain_loop_does_and_resumes(tmp_path: Path) -> None:
    check_sft("full", str(tmp_path))


def test_sft_with_lora_exchanges_the_adapter_only(tmp_path: Path) -> None:
    berlin, _ = check_sft("lora", str(tmp_path))
    assert berlin.more["is peft"]
    assert berlin.outer["anchor"].numel() == 2 * (4 * 32 + 32 * 4) + 2 * (4 * 32 + 16 * 4)


def kept_groups(*ranks: Told) -> None:
    for told in ranks:
        for prompts in told.more["asked"]:
            groups = [prompts[k : k + 4] for k in range(0, len(prompts), 4)]
            assert all(len(group) == 4 and len(set(group)) == 1 for group in groups)
            assert set(prompts) <= told.more["own"]


def check_grpo(kind: str, folder: str) -> None:
    (berlin,), (paris,) = launch_worlds(grpo_site, folder, kind)
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    kept_groups(berlin, paris)
    for again, whole in zip(launch_worlds(grpo_site, folder, kind, True), (berlin, paris), strict=True):
        resumed(again[0], whole, after=6)


def test_grpo_keeps_every_group_at_its_site_and_resumes(tmp_path: Path) -> None:
    check_grpo("full", str(tmp_path))


def test_grpo_with_lora_resumes(tmp_path: Path) -> None:
    check_grpo("lora", str(tmp_path))


@pytest.mark.parametrize(
    ("site", "kind", "ranks"),
    [
        *((sft_site, "full", ranks) for ranks in (1, 2)),
        (sft_site, "lora", 1),
        *((grpo_site, "full", ranks) for ranks in (1, 2)),
    ],
)
def test_an_evaluation_sees_theta(site: Callable[..., Told], kind: str, ranks: int, tmp_path: Path) -> None:
    for told in chain(*launch_worlds(site, str(tmp_path), kind, False, True, ranks=ranks)):
        evaluated_theta(told)
