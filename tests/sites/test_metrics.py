"""What a run tells its user after each round: totals of the site, in reports, metrics and the log."""

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted import Scripted, parameters
from sites import run_ranks

import loco


@dataclass
class Told:
    """By one rank. `metrics`: as the report hook found them."""

    reports: list[loco.SyncReport] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    total_of_resumed: float = 0.0


class Keeps(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def built(rank: int, ranks_per_site: int) -> loco.PulseLoCo:
    topology = loco.Topology(ranks_per_site=ranks_per_site)
    inner = Scripted(parameters(3, 1003), 3, rank // ranks_per_site)
    return loco.PulseLoCo(inner, sync_every=2, topology=topology)


def training(rank: int, ranks_per_site: int) -> Told:
    told = Told()
    logger = logging.getLogger("loco.round")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keeps(told.lines))
    optimizer = built(rank, ranks_per_site)
    assert optimizer.metrics() == {}

    def note(report: loco.SyncReport) -> None:
        told.reports.append(report)
        told.metrics.append(optimizer.metrics())
        assert optimizer.local_step == 0

    hook = optimizer.register_report_hook(note)
    for _ in range(6):
        optimizer.step()
    hook.remove()
    saved = optimizer.state_dict()
    optimizer.sync()  # whose report nobody is told of any more
    resumed = built(rank, ranks_per_site)
    resumed.load_state_dict(saved)
    resumed.sync()
    told.total_of_resumed = resumed.metrics()["loco/sent_bytes_total"] - resumed.metrics()["loco/sent_bytes"]
    return told


@pytest.mark.parametrize("ranks_per_site", [1, 2])
def test_reports_and_metrics_are_of_the_whole_site_and_totals_go_on(ranks_per_site: int) -> None:
    told: list[Told] = run_ranks(2 * ranks_per_site, training, ranks_per_site)
    for first in range(0, len(told), ranks_per_site):
        ranks = told[first : first + ranks_per_site]
        sent = 0
        for k in range(3):
            reports = [one.reports[k] for one in ranks]
            site = reports[0].site
            assert all(report.site == site for report in reports)
            assert site.numel == sum(report.numel for report in reports) == 1003
            assert site.entries == sum(report.entries for report in reports) > 0
            assert site.sent_bytes == sum(report.sent_bytes for report in reports)
            sent += site.sent_bytes
            for one, report in zip(ranks, reports, strict=True):
                expected: dict[str, Any] = {
                    "loco/round": k + 1,
                    "loco/sent_bytes": site.sent_bytes,
                    "loco/sent_bytes_total": sent,
                    "loco/below_dense": 4 * 1003 / site.sent_bytes,
                    "loco/density": site.entries / 1003,
                    "loco/round_seconds": sum(report.seconds.values()),
                    "loco/waited": report.waited,
                }
                assert one.metrics[k] == expected
                assert 0 < report.waited <= report.seconds["exchange"]
        assert all(one.total_of_resumed == sent for one in ranks)


def test_the_first_rank_of_each_site_logs_a_line_a_round() -> None:
    told: list[Told] = run_ranks(4, training, 2)
    for rank, one in enumerate(told):
        lines = [line for line in one.lines if ": sent " in line]
        assert len(lines) == (0 if rank % 2 else 5)
        if not rank % 2:
            site = one.reports[0].site
            sent = f"sent {site.density:.2%} of 1,003 entries in {site.sent_bytes:,} bytes"
            assert lines[0].startswith(f"site {rank // 2}: round 1: {sent}")
            assert lines[0].endswith("s for all sites to come")
