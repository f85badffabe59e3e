"""A training loop in which four sites train one network with loco.

    torchrun --nproc-per-node 4 examples/train.py

Every rank is a site. The lines marked "loco" are what it adds to a loop for one process.
"""

import torch
from torch import nn

import loco  # loco

STEPS = 160


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def main() -> None:
    model, teacher = network(seed=0), network(seed=1).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    optimizer = loco.PulseLoCo(optimizer, sync_every=8)  # loco
    rank = torch.distributed.get_rank()  # loco
    torch.manual_seed(rank)  # loco: different data on each site

    for step in range(STEPS):
        x = torch.randn(64, 16)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # every 8th call also exchanges with the other sites
        if rank == 0 and (step + 1) % 40 == 0:  # loco: one rank prints
            print(f"step {step + 1}: loss {loss:.4f}; {optimizer.last_report}")  # loco: what the round sent

    torch.distributed.destroy_process_group()  # loco


if __name__ == "__main__":
    main()
