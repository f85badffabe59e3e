"""Two sites train one model, each with a Trainer of Lightning's: start it as with_trainer.py."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loco.integrations.lightning import LocoCallback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(sum(os.environ["LOCO_SITE"].encode()))  # different data at each site
    loader = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=8)
    callback = LocoCallback(sync_every=8)
    trainer = Trainer(max_steps=32, logger=False, callbacks=[callback], gradient_clip_val=1.0)
    trainer.fit(Module(), loader)
    print(callback.handle and callback.handle.last_report)


if __name__ == "__main__":
    main()
