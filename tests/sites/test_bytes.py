"""The bytes a report counts are the bytes the kernel's TCP counters saw."""

import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, parameters
from sites import run_ranks

import loco
from experiments.training.ledger import TcpBytes, tcp_bytes

NUMEL, ROUNDS = 200_003, 3


def counted(rank: int, kind: str) -> tuple[int, int, TcpBytes]:
    optimizer = getattr(loco, kind)(Scripted(parameters(0, NUMEL), 0, rank), sync_every=1)
    optimizer.sync()
    dist.barrier()
    before = tcp_bytes()
    sent = received = 0
    for _ in range(ROUNDS):
        optimizer.step()
        report = optimizer.last_report
        sent, received = sent + report.sent_bytes, received + report.received_bytes
    # What this rank was sent has arrived: its rounds are done. What it sent may lie in its queue, which the
    # ledger includes.
    after = tcp_bytes()
    assert before is not None
    assert after is not None
    dist.barrier()
    return sent, received, after - before


@pytest.mark.skipif(tcp_bytes() is None, reason="this system does not count bytes per socket (TCP_INFO)")
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_reported_bytes_are_what_the_kernel_counted(kind: str) -> None:
    for sent, received, kernel in run_ranks(3, counted, kind):
        assert sent > 100_000
        # Each message follows its length, 8 bytes; a round has up to 7 to each of two peers. A message of
        # gloo's barrier, of a peer that is already done, may be among those received.
        slack = ROUNDS * 2 * 7 * 8 + 300
        assert 0 <= kernel.sent - sent <= slack
        assert 0 <= kernel.received - received <= slack


@pytest.mark.skipif(tcp_bytes() is None, reason="this system does not count bytes per socket (TCP_INFO)")
def test_a_ledger_counts_a_known_message() -> None:
    for kernel in run_ranks(2, one_message):
        assert 1_000_000 <= kernel.sent + kernel.received <= 1_000_500


def one_message(rank: int) -> TcpBytes:
    data = torch.zeros(1_000_000, dtype=torch.uint8)
    dist.barrier()
    before = tcp_bytes()
    if rank == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
    after = tcp_bytes()
    assert before is not None
    assert after is not None
    dist.barrier()
    return after - before
