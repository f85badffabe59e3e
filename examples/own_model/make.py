"""A tiny model that knows nothing, and prompts for it, to try docs/own_model.md with:

    python examples/own_model/make.py own
    python -m experiments.pipeline task=prompts model=hf path=own/model prompts.file=own/prompts.jsonl \\
        prompts.reward=examples/own_model/rewards.py:wanted prompts.held_out=32 answer.max_tokens=16 \\
        lr=2e-3 steps=80
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

folder = Path(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)
words.save_pretrained(folder / "model")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1152,
        bos_token_id=len(letters),
        eos_token_id=len(letters),  # END
    )
)
model.save_pretrained(folder / "model")
rows = [
    {"prompt": [{"role": "user", "content": f"say {letter}, {k // 26}"}], "letter": letter}
    for k in range(520)
    for letter in [chr(ord("a") + k % 26)]
]
(folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
