"""What a round does to several sites, and what all of them agree on."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import bits, parameters
from sites import run_ranks
from states import Snapshot, assert_same, small_model, snapshot, train
from torch import nn

import loco


def gate_open_and_dense(rank: int) -> list[tuple[Snapshot, Snapshot]]:
    pairs = []
    for options in ({}, {"nesterov": False}, {"outer_momentum": 0.0, "outer_lr": 1.0}):
        runs = []
        for build in (
            lambda inner, o: loco.PulseLoCo(inner, gate="open", **o),
            lambda i, o: loco.DiLoCo(i, **o),
        ):
            net = small_model()
            optimizer = build(torch.optim.AdamW(net.parameters(), lr=1e-3), options | {"sync_every": 2})
            train(net, optimizer, rank, range(8))
            runs.append(snapshot(optimizer))
        pairs.append((runs[0], runs[1]))
    return pairs


def test_gate_off_equals_diloco_bit_for_bit() -> None:
    for pairs in run_ranks(3, gate_open_and_dense):
        for open_gate, dense in pairs:
            assert_same(open_gate, dense)


def averaging(rank: int) -> tuple[list[float], list[float]]:
    """Weights on a coarse grid, on which every sum and quotient of four is exact."""
    start = torch.arange(8.0) / 4
    param = nn.Parameter(start.clone())
    optimizer = loco.DiLoCo(torch.optim.SGD([param], lr=1.0), sync_every=1, outer_lr=1.0, outer_momentum=0.0)
    param.grad = (torch.arange(8.0) - 3) * (rank + 1) / 16
    mine = start - param.grad
    optimizer.step()
    return param.tolist(), mine.tolist()


def test_diloco_with_h_1_alpha_1_mu_0_equals_averaging() -> None:
    results = run_ranks(4, averaging)
    mean = np.mean([mine for _, mine in results], axis=0, dtype=np.float64)
    for averaged, _ in results:
        assert averaged == mean.tolist()


def one_sender(rank: int) -> tuple[list[float], int]:
    param = nn.Parameter(torch.ones(4))
    optimizer = loco.PulseLoCo(
        torch.optim.SGD([param], lr=1.0), sync_every=1, outer_lr=1.0, outer_momentum=0.0
    )
    param.grad = torch.tensor([0.5, 0.0, 0.0, 0.0]) if rank == 1 else torch.zeros(4)
    optimizer.step()
    assert optimizer.last_report is not None
    return param.tolist(), optimizer.last_report.entries


def test_the_divisor_is_the_number_of_sites_not_of_senders() -> None:
    for rank, (weights, entries) in enumerate(run_ranks(4, one_sender)):
        assert weights == [1.0 - 0.5 / 4, 1.0, 1.0, 1.0]
        assert entries == (1 if rank == 1 else 0)


def real_training(rank: int) -> dict[str, Any]:
    result = {}
    plain: dict[str, Any] = {"wire": "fast", "exchange": "gather"}  # whose bytes can be told in advance
    for kind, options in ((loco.PulseLoCo, plain), (loco.DiLoCo, {})):
        net = small_model(seed=rank)  # sites start apart; site 0's weights count
        inner = torch.optim.AdamW(net.parameters(), lr=1e-5)
        optimizer = kind(inner, sync_every=3, **options)
        train(net, optimizer, rank, range(12))
        assert optimizer.last_report is not None
        result[kind.__name__] = snapshot(optimizer), optimizer.last_report
        result["moment"] = bits(inner.state[net.get_parameter("0.weight")]["exp_avg"])
    return result


def test_all_sites_hold_the_same_bits_and_only_those_they_should() -> None:
    results = run_ranks(4, real_training)
    for kind in ("PulseLoCo", "DiLoCo"):
        shared = ["anchor", "momentum", "weights"]
        for result in results[1:]:
            for name in shared:
                np.testing.assert_array_equal(result[kind][0][name], results[0][kind][0][name])
    residuals = {result["PulseLoCo"][0]["residual"].tobytes() for result in results}
    moments = {result["moment"].tobytes() for result in results}
    assert len(residuals) == len(moments) == 4  # a site's own


def test_the_report_counts_what_the_exchange_must_send() -> None:
    results = run_ranks(4, real_training)
    for result in results:
        residual = result["PulseLoCo"][0]["residual"].view(np.float32).astype(np.float64)
        assert result["PulseLoCo"][1].residual_norm == pytest.approx(np.sqrt((residual**2).sum()), rel=1e-12)
        assert result["PulseLoCo"][1].residual_norm > 0
        assert result["DiLoCo"][1].residual_norm == 0
    reports = [result["PulseLoCo"][1] for result in results]
    numel = 20 * 30 + 30 + 30 * 5 + 5
    payloads = sum(report.payload_bytes for report in reports)
    around = 3 * 2 * 64  # an announcement and a vote, to or from each of three peers
    for report in reports:
        assert report.round == 4
        assert report.numel == numel
        assert 0 < report.entries < numel
        assert report.density == report.entries / numel
        # A header, 5 bytes an entry and one for each of four blocks.
        assert report.payload_bytes == 64 + 5 * report.entries + 4
        assert report.sent_bytes == 3 * report.payload_bytes + around
        assert report.received_bytes == payloads - report.payload_bytes + around
        assert report.dense_bytes == 2 * 3 * numel  # 2 · 3/4 · 4
        assert report.site_bytes == 0
        assert set(report.seconds) == {"encode", "exchange", "apply"}


def dense_bytes(rank: int) -> loco.SyncReport:
    optimizer = loco.DiLoCo(torch.optim.SGD(parameters(0, 5003), lr=0.1))
    return optimizer.sync()


def test_dense_sends_a_rings_bytes() -> None:
    headers = 3 * 4 * 64  # an announcement, a vote and two frames to each peer
    owned = (1280, 1280, 1280, 1163)  # slices are whole blocks of 256
    for own, report in zip(owned, run_ranks(4, dense_bytes), strict=True):
        assert report.density == 1.0
        # What a site adds up itself it does not code.
        assert report.payload_bytes == 4 * (5003 - own) + 3 * 64
        assert report.sent_bytes == headers + 4 * (5003 - own) + 3 * 4 * own
        assert abs(report.sent_bytes - headers - report.dense_bytes) <= 8 * abs(own - 5003 / 4)
