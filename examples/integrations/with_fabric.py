"""Two sites train one model in a loop of Fabric's: start it as with_trainer.py."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn

from loco.integrations.lightning import SiteState, attach


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(sum(os.environ["LOCO_SITE"].encode()))  # different data at each site
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    rounds = attach(fabric, optimizer, sync_every=8)
    state = {"model": model, "optimizer": optimizer, "rounds": SiteState(rounds)}

    for _ in range(32):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()  # every 8th also runs a round
    fabric.save(f"runs/fabric-{os.environ['LOCO_SITE']}.ckpt", state)  # each site has its own
    print(rounds.last_report)


if __name__ == "__main__":
    main()
