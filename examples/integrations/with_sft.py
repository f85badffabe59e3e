"""Two sites fine-tune one adapter, each with an SFTTrainer of its own: start it as with_trainer.py."""

import os
import random

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from loco.integrations.transformers import LocoCallback

TINY = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2)
WORDS = ["<pad>", "</s>", *(f"w{k}" for k in range(62))]


def main() -> None:
    random.seed(os.environ["LOCO_SITE"])  # different data at each site
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    callback = LocoCallback(sync_every=8)
    trainer = SFTTrainer(
        LlamaForCausalLM(TINY),
        SFTConfig(f"runs/sft-{os.environ['LOCO_SITE']}", max_steps=32, bf16=False, report_to="none"),
        train_dataset=Dataset.from_dict(
            {"text": [" ".join(random.choices(WORDS[2:], k=8)) for _ in range(256)]}
        ),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>"),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[callback],
    )
    trainer.train()
    print(callback.handle and callback.handle.last_report)


main()
