"""Sites of two ranks with FSDP2 inside each: a torchrun for each site. In two shells:

export LOCO_SITES=2 LOCO_AT=127.0.0.1:29510
LOCO_SITE=berlin torchrun --standalone --nproc-per-node 2 examples/with_fsdp2.py
LOCO_SITE=paris torchrun --standalone --nproc-per-node 2 examples/with_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import loco


def main() -> None:
    topology = loco.Sites()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (topology.ranks_per_site,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = loco.PulseLoCo(
        torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=8, topology=topology
    )

    torch.manual_seed(1 + 2 * topology.site + dist.get_rank())  # data of its own on every rank
    for _ in range(32):
        x = torch.randn(8, 16, device=device)
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()  # every 8th also runs a round
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: {optimizer.last_report}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
