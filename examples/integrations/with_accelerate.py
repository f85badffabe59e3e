"""Two sites train one model in a loop of Accelerate's: start it as with_trainer.py."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loco.integrations.accelerate import attach


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(sum(os.environ["LOCO_SITE"].encode()))  # different data at each site
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rounds = attach(accelerator, optimizer, sync_every=8)

    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # every 8th also runs a round
    if rounds.local_step:
        rounds.sync()  # all sites end with the same model
    print(rounds.last_report)


if __name__ == "__main__":
    main()
