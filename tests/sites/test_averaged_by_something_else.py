"""What averages gradients over the sites at every step leaves rounds nothing to do: it is told, once."""

import logging

import pytest
import torch
from selection import SHARDINGS
from sites import run_ranks
from states import small_model, train
from torch.nn.parallel import DistributedDataParallel

import loco


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(rank: int, over: str) -> tuple[list[str], int]:
    heard = Heard()
    logging.getLogger("loco").addHandler(heard)
    topology = loco.Topology(ranks_per_site=2 if over == "site" else 1)
    net = small_model()
    model = net
    if over != "nothing":
        group = topology.site_group if over == "site" else None
        model = DistributedDataParallel(net, process_group=group)
    optimizer = loco.PulseLoCo(torch.optim.AdamW(net.parameters(), lr=1e-6), sync_every=2, topology=topology)
    train(model, optimizer, rank, range(8))
    return heard.texts, optimizer.round


@pytest.mark.parametrize(("world", "first_round"), [(2, 2), (3, 1)])
def test_ddp_over_all_sites_is_told_once(world: int, first_round: int) -> None:
    for texts, rounds in run_ranks(world, trained, "all"):
        assert rounds == 4
        (text,) = texts
        assert text.startswith(
            f"round {first_round}: the updates of all {world} sites have the same norm to the last bit"
        )
        assert "process_group=topology.site_group" in text


@pytest.mark.check(SHARDINGS)
@pytest.mark.parametrize(("world", "over"), [(2, "nothing"), (4, "site")])
def test_sites_that_train_on_their_own_are_not_warned(world: int, over: str) -> None:
    for texts, rounds in run_ranks(world, trained, over):
        assert texts == []
        assert rounds == 4
