"""Two sites train one model, each with a Trainer of its own. In two shells:

    LOCO_SITES=2 LOCO_AT=127.0.0.1:29510 LOCO_SITE=berlin python examples/integrations/with_trainer.py
    LOCO_SITES=2 LOCO_AT=127.0.0.1:29510 LOCO_SITE=paris python examples/integrations/with_trainer.py

A site of several ranks is started by torchrun instead.
"""

import os

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from loco.integrations.transformers import LocoCallback

TINY = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2)


def main() -> None:
    torch.manual_seed(sum(os.environ["LOCO_SITE"].encode()))  # different data at each site
    rows = torch.randint(64, (256, 16)).tolist()
    model = LlamaForCausalLM(TINY)
    callback = LocoCallback(sync_every=8)
    arguments = TrainingArguments(
        output_dir=f"runs/trainer-{os.environ['LOCO_SITE']}",  # each site has its own
        max_steps=32,
        learning_rate=1e-3,
        report_to="none",
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    print(callback.handle and callback.handle.last_report)


if __name__ == "__main__":
    main()
