"""torchao's 8-bit Adam as inner optimizer, whole and over FSDP2's shards; and its FP8 all-gather, refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from claims import ended_alike, learned_separately, resumed, same_bits
from sites import error_of, launch_worlds
from tiny import Told, finish, watch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

import loco

STEPS, STOP, H = 10, 6, 4


def network(topology: loco.Sites) -> nn.Module:
    """torchao keeps states of fewer than 4,096 elements as they are: the biases', and here no others'."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    if topology.ranks_per_site > 1:
        fully_shard(made, mesh=init_device_mesh("cpu", (topology.ranks_per_site,)))
    return made


def eight_bit_site(folder: str, resume: bool = False) -> Told:
    topology = loco.Sites()
    net = network(topology)
    inner = AdamW8bit(net.parameters(), lr=1e-3)
    optimizer = loco.PulseLoCo(inner, sync_every=H, topology=topology)
    checkpoints = loco.Checkpoints(f"{folder}/{os.environ['LOCO_SITE']}")
    begin = 0
    if resume:
        found = checkpoints.load(optimizer)
        assert found is not None
        begin = found.extra
    told = watch(optimizer)
    for step in range(begin, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + 10 * topology.site + topology.rank_in_site)
        x = torch.randn(8, 128, generator=generator)
        (net(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == STOP and not resume:
            checkpoints.save(optimizer, STOP, blocking=True)
    optimizer.sync()
    checkpoints.close()
    told.more["moments"] = [bits for p in net.parameters() for bits in moments(inner.state[p])]
    return finish(told, optimizer)


def moments(state: dict[str, Any]) -> list[Tensor]:
    found = []
    for name in ("exp_avg", "exp_avg_sq"):
        value = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
        assert isinstance(value, OptimState8bit) == (value.numel() >= 4096)
        found += [value.codes, value.scale] if isinstance(value, OptimState8bit) else [value]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_eight_bit_states_are_saved_and_resumed_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    whole = launch_worlds(eight_bit_site, str(tmp_path), ranks=ranks)
    for berlin, paris in zip(*whole, strict=True):
        learned_separately(berlin, paris)
        ended_alike(berlin, paris)
    for site, before in zip(
        launch_worlds(eight_bit_site, str(tmp_path), True, ranks=ranks), whole, strict=True
    ):
        for found, expected in zip(site, before, strict=True):
            resumed(found, expected, after=STOP)
            assert any(bits.dtype == torch.uint8 for bits in found.more["moments"])
            assert same_bits(found.more["moments"], expected.more["moments"])


def gathers_fp8() -> tuple[str, str]:
    topology = loco.Sites()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    net = convert_to_float8_training(nn.Sequential(nn.Linear(128, 128, bias=False)), config=config)
    fully_shard(net, mesh=init_device_mesh("cpu", (topology.ranks_per_site,)))
    return error_of(lambda: loco.PulseLoCo(torch.optim.AdamW(net.parameters()), topology=topology))


def test_an_fp8_all_gather_is_refused() -> None:
    for kind, said in launch_worlds(gathers_fp8, names=["berlin"], ranks=2)[0]:
        assert kind == "ValueError"
        assert "turn off the quantised all-gather (enable_fsdp_float8_all_gather=False" in said
