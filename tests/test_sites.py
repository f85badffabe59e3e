"""Claims about several sites: what they agree on, what a round does to them, what happens when it fails."""

import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, bits, flat, parameters
from sites import error_of, run_ranks
from torch import nn
from torch._C._distributed_c10d import HashStore

import loco
from loco.errors import TransportError
from loco.exchange import GatherExchange
from loco.meeting import meet
from loco.transport import Transport
from loco.wire import Header

Snapshot = dict[str, np.ndarray]


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Each site on data of its own."""
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
        net(x).square().mean().backward()
        optimizer.step()


def snapshot(optimizer: loco.PulseLoCo | loco.DiLoCo) -> Snapshot:
    """θ, m, e and w, bit for bit."""
    outer = optimizer._outer
    tensors = {"anchor": outer.anchor, "momentum": outer.momentum, "residual": outer.residual}
    weights = torch.cat([p.detach().float().reshape(-1) for p in outer.layout.params])
    return {name: bits(t) for name, t in (tensors | {"weights": weights}).items() if t is not None}


def assert_same(a: Snapshot, b: Snapshot) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


# --- what a round does


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
    for kind in (loco.PulseLoCo, loco.DiLoCo):
        net = small_model(seed=rank)  # sites start apart; site 0's weights count
        inner = torch.optim.AdamW(net.parameters(), lr=1e-5)
        optimizer = kind(inner, sync_every=3)
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
    for report in reports:
        assert report.round == 4
        assert report.numel == numel
        assert 0 < report.entries < numel
        assert report.density == report.entries / numel
        # A header, 4 bytes a value and, at this density, a byte or two a gap.
        assert 64 + 5 * report.entries <= report.payload_bytes <= 64 + 6 * report.entries
        # To each of three peers: the payload, header included, and two votes.
        assert report.sent_bytes == 3 * (report.payload_bytes + 2 * 64)
        assert report.received_bytes == payloads - report.payload_bytes + 3 * 2 * 64
        assert report.dense_bytes == 2 * 3 * numel  # 2 · 3/4 · 4
        assert report.site_bytes == 0
        assert set(report.seconds) == {"encode", "exchange", "apply"}


def dense_bytes(rank: int) -> loco.SyncReport:
    optimizer = loco.DiLoCo(torch.optim.SGD(parameters(0, 1003), lr=0.1))
    return optimizer.sync()


def test_dense_sends_a_rings_bytes() -> None:
    for report in run_ranks(4, dense_bytes):
        headers = 3 * (3 * 64 + 2 * 8)  # a header, two votes and two digests to each peer
        # 1003 does not divide by 4: the last owner's slice is one element shorter.
        assert abs(report.sent_bytes - headers - report.dense_bytes) <= 2 * 4 * 3
        assert report.payload_bytes == 64 + 4 * 1003
        assert report.density == 1.0


# --- when a round fails


def build_scripted(rank: int) -> loco.PulseLoCo:
    return loco.PulseLoCo(Scripted(parameters(3, 1003), 3, rank), sync_every=2)


def damaged_payload(rank: int) -> dict[str, Any]:
    """Site 1 receives a damaged payload of site 0 in round 2; the round is then repeated."""
    clean, hurt = build_scripted(rank), build_scripted(rank)
    for _ in range(6):
        clean.step()
    for _ in range(3):
        hurt.step()
    hurt.inner.step()  # the sixth-to-last inner step, without the round, to look at the state before it
    before = snapshot(hurt)
    swap = Transport.swap

    def damage(self: Transport, outgoing: Any, incoming: Any, *, phase: str) -> None:
        swap(self, outgoing, incoming, phase=phase)
        if rank == 1 and "payloads" in phase:
            incoming[0][-1] ^= 0x40

    Transport.swap = damage
    error = error_of(hurt.sync)
    Transport.swap = swap
    after = snapshot(hurt)
    assert hurt.round == 1
    hurt.sync()
    for _ in range(2):
        hurt.step()
    return {
        "error": error,
        "before": before,
        "after": after,
        "hurt": snapshot(hurt),
        "clean": snapshot(clean),
    }


def test_a_failed_round_changes_nothing_and_can_be_repeated() -> None:
    results = run_ranks(3, damaged_payload)
    for rank, result in enumerate(results):
        kind, text = result["error"]
        assert kind == "WireError"
        if rank == 1:
            assert "the message of site 0 can't be read: a body whose checksum does not match" in text
        else:
            assert "round 2, site 1 could not read the message of site 0" in text
        assert_same(result["before"], result["after"])
        assert_same(result["hurt"], result["clean"])


def lost_link(rank: int) -> dict[str, Any]:
    """The exchange fails on all sites, once bodies have arrived, as a broken link would have it."""
    optimizer = build_scripted(rank)
    optimizer.step()
    optimizer.inner.step()
    before = snapshot(optimizer)
    transfer = GatherExchange._transfer

    def fail(self: GatherExchange, headers: Any, own: Any, body: Any, room: Any) -> Any:
        transfer(self, headers, own, body, room)
        raise TransportError("round 1, payloads: lost site 0 (injected)")

    GatherExchange._transfer = fail
    error = error_of(optimizer.sync)
    GatherExchange._transfer = transfer
    assert optimizer.last_report is None
    after = snapshot(optimizer)
    report = optimizer.sync()
    return {"error": error, "before": before, "after": after, "round": report.round}


def test_no_residual_is_spent_on_a_broken_link() -> None:
    for result in run_ranks(2, lost_link):
        assert result["error"] == ("TransportError", "round 1, payloads: lost site 0 (injected)")
        assert_same(result["before"], result["after"])
        assert result["round"] == 1


def one_rank_out_of_memory(rank: int, kind: str, where: str) -> dict[str, Any]:
    """Site 1 fails once, at one place, in round 2; all repeat the round."""
    clean, hurt = (getattr(loco, kind)(Scripted(parameters(3, 1003), 3, rank), sync_every=2) for _ in "ab")
    for _ in range(6):
        clean.step()
    for _ in range(3):
        hurt.step()
    hurt.inner.step()
    before = snapshot(hurt)

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left (injected)")

    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, fail)
            error = error_of(hurt.sync)
    else:
        error = error_of(hurt.sync)
    after = snapshot(hurt)
    hurt.sync()
    for _ in range(2):
        hurt.step()
    return {
        "error": error,
        "before": before,
        "after": after,
        "hurt": snapshot(hurt),
        "clean": snapshot(clean),
    }


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("PulseLoCo", "loco.kernels.encode"),
        ("PulseLoCo", "loco.exchange.encode_payload"),
        ("PulseLoCo", "loco.exchange.GatherExchange._room"),
        ("PulseLoCo", "loco.exchange.decode_payload"),
        ("DiLoCo", "loco.kernels.encode"),
        ("DiLoCo", "loco.exchange.DenseExchange._room"),
    ],
)
def test_a_failure_on_one_rank_is_everyones_in_the_same_round(kind: str, where: str) -> None:
    for rank, result in enumerate(run_ranks(3, one_rank_out_of_memory, kind, where)):
        if rank == 1:
            assert result["error"] == ("OutOfMemoryError", "no memory left (injected)")
        else:
            assert result["error"][0] == "PeerError"
            assert result["error"][1].startswith("round 2, site 1 failed, and its own error says why")
        assert_same(result["before"], result["after"])
        assert_same(result["hurt"], result["clean"])


def damaged_slice(rank: int, phase_of_damage: str) -> tuple[tuple[str, str], Snapshot, Snapshot, int]:
    optimizer = loco.DiLoCo(Scripted(parameters(3, 1003), 3, rank), sync_every=2)
    optimizer.inner.step()
    before = snapshot(optimizer)
    swap = Transport.swap

    def damage(self: Transport, outgoing: Any, incoming: Any, *, phase: str) -> None:
        swap(self, outgoing, incoming, phase=phase)
        if rank == 1 and phase.endswith(phase_of_damage):
            incoming[2][7] ^= 0x10

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "swap", damage)
        error = error_of(optimizer.sync)
    return error, before, snapshot(optimizer), optimizer.sync().round


@pytest.mark.parametrize("phase", ["slices to their owners", "sums to all"])
def test_a_damaged_dense_slice_is_noticed_before_anything_is_applied(phase: str) -> None:
    for rank, ((kind, text), before, after, repeated) in enumerate(run_ranks(3, damaged_slice, phase)):
        assert kind == "WireError"
        said = "the message of site 2 can't be read: a body whose" if rank == 1 else "site 1 could not read"
        assert said in text
        assert_same(before, after)
        assert repeated == 1


def foreign_header(rank: int, field: str, value: int) -> tuple[tuple[str, str], int]:
    """Site 1 announces what is not of this run, in a header that is whole."""
    optimizer = build_scripted(rank)
    payload = GatherExchange._payload

    def forge(self: GatherExchange, encoded: Any, round: int, numel: int) -> Any:
        header, body = payload(self, encoded, round, numel)
        return replace(header, **{field: value}), body

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(GatherExchange, "_payload", forge)
        error = error_of(optimizer.sync)
    return error, optimizer.sync().round


@pytest.mark.parametrize(("field", "value"), [("numel", 1004), ("codec", 0), ("body_bytes", 1 << 40)])
def test_a_foreign_header_is_refused_before_memory_is_taken_for_it(field: str, value: int) -> None:
    for (kind, text), repeated in run_ranks(2, foreign_header, field, value):
        assert kind == "WireError"
        assert "site 1" in text or "site 0" in text
        assert repeated == 1


def stray_vote(rank: int) -> tuple[tuple[str, str], int]:
    """Site 1 is at another message than site 0 thinks: a header that is no vote arrives in its place."""
    optimizer = build_scripted(rank)
    records = Transport.swap_records

    def stray(self: Transport, record: bytes, *, phase: str) -> list[bytes]:
        if rank == 1 and self.size > 1 and "vote 2" in phase:
            record = replace(Header.unpack(record), entries=1).pack()
        return records(self, record, phase=phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "swap_records", stray)
        return error_of(optimizer.sync), optimizer.round


def test_another_message_is_not_taken_for_a_vote() -> None:
    for (kind, text), rounds in run_ranks(2, stray_vote):
        assert kind == "WireError"
        assert text.startswith("round 1, vote 2: site 1 sent another message than its vote")
        assert rounds == 0


def non_finite(rank: int, kind: str) -> dict[str, Any]:
    net = small_model()
    weight = net.get_parameter("2.weight")
    optimizer = getattr(loco, kind)(torch.optim.SGD(net.named_parameters(), lr=1e-3), sync_every=2)
    train(net, optimizer, rank, range(3))
    kept = weight.data.clone()
    if rank == 2:
        weight.data[1, 1] = float("inf")
    before = snapshot(optimizer)
    sent = optimizer._outer._across.sent_bytes
    error = error_of(optimizer.sync)
    sent = optimizer._outer._across.sent_bytes - sent
    after = snapshot(optimizer)
    weight.data.copy_(kept)
    return {"error": error, "sent": sent, "before": before, "after": after, "next": optimizer.sync().round}


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_non_finite_is_refused_on_every_site_before_anything_is_sent(kind: str) -> None:
    for result in run_ranks(3, non_finite, kind):
        name, text = result["error"]
        assert name == "NonFiniteError"
        assert text.startswith("round 2, site 2: the update of 2.weight is infinite or NaN")
        assert result["sent"] == 2 * 2 * 64  # a header and a vote to each of two peers
        assert_same(result["before"], result["after"])
        assert result["next"] == 2


def drifted(rank: int) -> list[tuple[str, str]]:
    errors = []
    for kind in (loco.PulseLoCo, loco.DiLoCo):
        optimizer = kind(Scripted(parameters(3, 1003), 3, rank), sync_every=2)
        if rank == 1:  # one bit of one weight, on one of three sites
            optimizer._outer.anchor.view(torch.int32)[700] ^= 1
        errors.append(error_of(optimizer.sync))
        if rank == 1:
            optimizer._outer.anchor.view(torch.int32)[700] ^= 1
            optimizer._outer.rounds = 5
        errors.append(error_of(optimizer.sync))
        optimizer._outer.rounds = 0
        assert optimizer.sync().round == 1
    return errors


def test_replicas_that_drift_apart_are_named_in_the_same_round() -> None:
    for errors in run_ranks(3, drifted):
        for kind, text in errors[0::2]:
            assert kind == "ReplicaError"
            assert text.startswith("round 1: the sites' anchors differ (site 0 holds ")
            holds = [part.split()[-1] for part in text.split("(")[1].split(")")[0].split(", ")]
            assert holds[0] == holds[2] != holds[1]
        for kind, text in errors[1::2]:
            assert kind == "ReplicaError"
            assert "(site 0 in round 1, site 1 in round 6, site 2 in round 1)" in text


def silent_site(rank: int) -> dict[str, Any]:
    optimizer = loco.PulseLoCo(
        Scripted(parameters(3, 1003), 3, rank), sync_every=2, topology=loco.Topology(timeout=1.0)
    )
    dist.barrier()
    optimizer.inner.step()
    before = snapshot(optimizer)
    if rank == 1:
        return {}
    error = error_of(optimizer.sync)
    return {"error": error, "before": before, "after": snapshot(optimizer)}


def test_a_silent_site_is_an_error_that_names_it_and_the_timeout() -> None:
    result = run_ranks(2, silent_site)[0]
    kind, text = result["error"]
    assert kind == "TransportError"
    assert text.startswith("round 1, announcement: no answer from site 1 within 1 s")
    assert_same(result["before"], result["after"])


def late_site(rank: int) -> dict[str, Any]:
    """Site 1 comes when the others have given up; they try again until all are there."""

    def build() -> loco.PulseLoCo:
        inner = Scripted(parameters(3, 1003), 3, rank)
        return loco.PulseLoCo(inner, sync_every=2, topology=loco.Topology(timeout=1.0))

    clean, hurt = build(), build()
    for _ in range(4):
        clean.step()
    hurt.step()
    hurt.inner.step()
    before = snapshot(hurt)
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)
    errors = []
    while hurt.round == 0:
        try:
            hurt.sync()
        except loco.TransportError as error:
            errors.append(str(error))
            assert_same(before, snapshot(hurt))
    for _ in range(2):
        hurt.step()
    return {"errors": errors, "hurt": snapshot(hurt), "clean": snapshot(clean)}


def test_a_round_that_timed_out_can_be_repeated() -> None:
    """A real timeout, after which torch's groups are of no use: the repeat builds new ones."""
    results = run_ranks(3, late_site)
    assert results[0]["errors"][0].startswith("round 1, announcement: no answer from site 1 within 1 s")
    assert any(text.startswith("reconnecting: ") for text in results[0]["errors"])
    for result in results:
        assert result["errors"]
        assert_same(result["hurt"], result["clean"])


def test_who_gives_up_a_meeting_is_not_counted_when_the_others_come() -> None:
    store = HashStore()
    with pytest.raises(loco.TransportError, match=r"1 of 2 ranks came within 0\.1 s"):
        meet(store, "here", 2, 0.1)
    for _ in range(2):  # the same key serves every meeting
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(meet, store, "here", 2, 30.0) for _ in range(2)]
        assert [one.result() for one in both] == [None, None]


# --- agreement


def disagree(rank: int) -> list[tuple[str, str]]:
    def build(kind: Any = loco.PulseLoCo, numel: int = 1003, bf16: bool = False, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        return kind(Scripted(parameters(0, numel, bf16), 0, rank), **options)

    odd = rank == 1
    attempts = [
        lambda: build(sync_every=16 if odd else 8),
        lambda: build(outer_lr=0.5 if odd else 0.7),
        lambda: build(outer_momentum=0.0 if odd else 0.9),
        lambda: build(nesterov=not odd),
        lambda: build(gate_gain=7.0 if odd else 1.0),
        lambda: build(kind=loco.DiLoCo if odd else loco.PulseLoCo, gate=None if odd else "open"),
        lambda: build(numel=1004 if odd else 1003),
        lambda: build(bf16=odd),
        lambda: loco.Topology(ranks_per_site=3 if odd else 1),
        # A rank that can't be built tells the others, who would wait for it.
        lambda: loco.PulseLoCo(torch.optim.SGD([torch.ones(2, dtype=torch.float64 if odd else None)], lr=1)),
        lambda: build(sync_every=8.0 if odd else 8, outer_lr=1 if odd else np.float64(1), nesterov=1),
    ]
    return [error_of(attempt) for attempt in attempts]


def test_sites_that_were_built_differently_all_learn_what_differs() -> None:
    expected = [
        "the sites differ in sync_every: site 0 has 8, site 1 has 16",
        "the sites differ in outer_lr: site 0 has 0.7, site 1 has 0.5",
        "the sites differ in outer_momentum: site 0 has 0.9, site 1 has 0.0",
        "the sites differ in nesterov: site 0 has True, site 1 has False",
        "the sites differ in gate_gain: site 0 has 1.0, site 1 has 7.0",
        "the sites differ in kind: site 0 has PulseLoCo, site 1 has DiLoCo",
        "the sites differ in parameters (number 3): site 0 has ['group0.param3', [990], 'torch.float32'], "
        "site 1 has ['group0.param3', [991], 'torch.float32']",
        "the sites differ in parameters (number 3): site 0 has ['group0.param3', [990], 'torch.float32'], "
        "site 1 has ['group0.param3', [990], 'torch.bfloat16']",
        "ranks_per_site differs: rank 0 has 1, rank 1 of 3 has 3",
    ]
    broken = "group0.param0 is torch.float64; loco synchronises float32, bfloat16 and float16"
    for rank, errors in enumerate(run_ranks(3, disagree)):
        assert [text for _, text in errors[:9]] == expected
        assert {kind for kind, _ in errors[:9]} == {"AgreementError"}
        if rank == 1:
            assert errors[9] == ("ValueError", f"parameter {broken}")
        else:
            said = f"site 1 could not be built: ValueError: parameter {broken}"
            assert errors[9] == ("AgreementError", said)
        assert errors[10] == ("", "nothing was raised")  # 8.0 is 8


def first_anchor(rank: int) -> dict[str, Any]:
    params = parameters(seed=rank, numel=1003, bf16=True)
    loco.PulseLoCo(torch.optim.SGD(params, lr=0.1))
    return {"weights": bits(flat(params)), "own": bits(flat(parameters(rank, 1003, bf16=True)))}


def test_all_sites_start_from_site_0s_weights() -> None:
    results = run_ranks(2, first_anchor)
    assert not np.array_equal(results[0]["own"], results[1]["own"])
    for result in results:
        np.testing.assert_array_equal(result["weights"], results[0]["own"])


# --- resuming


def resumed(rank: int, kind: str, stop_at: int) -> tuple[Snapshot, Snapshot, int]:
    """Train 10 steps at a stretch, and again stopping after `stop_at`, into fresh objects."""

    def fresh(seed: int) -> tuple[nn.Module, Any, Any]:
        net = small_model(seed)
        inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
        optimizer = getattr(loco, kind)(inner, sync_every=4)
        return net, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    def go(net: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            train(net, optimizer, rank, range(step, step + 1))
            scheduler.step()

    whole = fresh(seed=0)
    go(*whole, range(10))

    first = fresh(seed=0)
    go(*first, range(stop_at))
    file = io.BytesIO()
    torch.save({"optimizer": first[1].state_dict(), "scheduler": first[2].state_dict()}, file)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = fresh(seed=50 + rank)  # other weights, and no model file: the state carries what a site needs
    second[1].load_state_dict(saved["optimizer"])
    second[2].load_state_dict(saved["scheduler"])
    go(*second, range(stop_at, 10))
    return snapshot(whole[1]), snapshot(second[1]), second[1].round


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
@pytest.mark.parametrize("stop_at", [4, 6])
def test_resuming_equals_never_stopping_also_inside_a_round(kind: str, stop_at: int) -> None:
    for whole, pieced, rounds in run_ranks(2, resumed, kind, stop_at):
        assert_same(whole, pieced)
        assert rounds == 2


def another_ranks_state(rank: int) -> tuple[str, str]:
    """Rank 0's file on every rank: how error feedback is lost."""
    optimizer = build_scripted(rank)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    files: list[Any] = [file.getvalue()]
    dist.broadcast_object_list(files, src=0)
    saved = torch.load(io.BytesIO(files[0]), weights_only=True)
    return error_of(optimizer.load_state_dict, saved)


def test_rank_0s_state_is_not_taken_for_everyones() -> None:
    mine, other = run_ranks(2, another_ranks_state)
    assert mine == ("", "nothing was raised")
    assert other[0] == "ValueError"
    assert other[1].startswith("this state was saved with site = 0, this optimizer has 1")
