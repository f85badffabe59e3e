"""The bytes a report counts are those that the site's network interface counted.

An interface counts whole packets: 14 bytes of Ethernet, 20 of IPv4, and 32 of TCP with its timestamps around
each piece of what was sent, and as much for each bare acknowledgement. That is known from the packets it
counted, and taken off. So is what TCP sent twice: on a busy machine it takes late answers for lost ones. What
is left may exceed the report by 2%: lengths of messages, gloo's barriers, neighbour discovery.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from selection import MESSAGES

import loco
from experiments.processes.namespaces import Counters, Network, counters, why_not
from experiments.processes.sites import Sites
from experiments.training.ledger import TcpBytes, tcp_bytes
from loco import SyncReport

SITES, NUMEL, ROUNDS = 3, 3_000_000, 3
HEADERS = 14 + 20 + 32

pytestmark = [pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


class Site:
    def __init__(self, site: int) -> None:
        start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02
        self.parameter = torch.nn.Parameter(start)
        self.generator = torch.Generator().manual_seed(1 + site)

    def rounds(self, kind: str, options: dict[str, Any]) -> tuple[list[SyncReport], Counters, TcpBytes]:
        optimizer = getattr(loco, kind)(torch.optim.SGD([self.parameter], lr=2e-5), **options)
        reports = []
        dist.barrier()
        before, tcp_before = counters(), _tcp()
        for _ in range(ROUNDS):
            self.parameter.grad = torch.randn(NUMEL, generator=self.generator)
            optimizer.inner.step()
            reports.append(optimizer.sync())
        dist.barrier()  # all have what was sent to them
        return reports, counters() - before, _tcp() - tcp_before


def _tcp() -> TcpBytes:
    counted = tcp_bytes()
    assert counted is not None  # a kernel with such namespaces and iproute2 is new enough to count
    return counted


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    with Sites(SITES, Site, network=Network()) as started:
        yield started


@pytest.mark.check(MESSAGES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PulseLoCo", {"exchange": "gather", "wire": "tight"}),
        ("PulseLoCo", {"exchange": "owner", "wire": "tight"}),
        ("PulseLoCo", {"exchange": "gather", "wire": "fast"}),
        ("PulseLoCo", {"exchange": "owner", "wire": "fast"}),
        ("DiLoCo", {"wire": "float32"}),
        ("DiLoCo", {"wire": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_reported_bytes_are_what_the_interface_counted(
    sites: Sites, kind: str, options: dict[str, Any]
) -> None:
    found = sites.call("rounds", kind, options)
    repeated_by_all = sum(tcp.repeated for *_, tcp in found)
    for reports, interface, tcp in found:
        for report in reports:
            assert report.wire == options["wire"]
            assert report.sent_bytes > 1_000_000  # or 2% would mean little
        sent = sum(r.sent_bytes for r in reports)
        carried = interface.sent_bytes - HEADERS * interface.sent_packets - tcp.repeated
        assert -0.001 * sent <= carried - sent <= 0.02 * sent
        # Who of the others repeated something to this site is not known, only how much they did together.
        received = sum(r.received_bytes for r in reports)
        carried = interface.received_bytes - HEADERS * interface.received_packets
        assert -0.001 * received <= carried - received <= 0.02 * received + repeated_by_all


@pytest.mark.check(MESSAGES)
def test_all_that_was_sent_was_received(sites: Sites) -> None:
    found = sites.call("rounds", "PulseLoCo", {"exchange": "owner", "wire": "tight"})
    reports = [report for of_site, *_ in found for report in of_site]
    assert sum(r.sent_bytes for r in reports) == sum(r.received_bytes for r in reports)
