"""Two sites improve one policy, each with a GRPOTrainer of its own: start it as with_trainer.py."""

import os
import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from loco.integrations.transformers import LocoCallback

TINY = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2)
WORDS = ["<pad>", "</s>", *(f"w{k}" for k in range(62))]


def reward(completions: list[str], **_: object) -> list[float | None]:
    return [completion.count("1") / 10 for completion in completions]


def main() -> None:
    random.seed(os.environ["LOCO_SITE"])  # different prompts at each site
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = GRPOTrainer(
        LlamaForCausalLM(TINY),
        reward,
        args=GRPOConfig(f"runs/grpo-{os.environ['LOCO_SITE']}", max_steps=16, bf16=False, report_to="none"),
        train_dataset=Dataset.from_dict(
            {"prompt": [" ".join(random.choices(WORDS, k=4)) for _ in range(64)]}
        ),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>"),
        callbacks=[callback := LocoCallback(sync_every=8)],
    )
    trainer.train()
    print(callback.handle and callback.handle.last_report)


main()
