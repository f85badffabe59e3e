"""A round that fails changes nothing, on any rank, and all can repeat it."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, parameters
from selection import MESSAGES
from sites import error_of, hear, run_ranks, tell
from states import assert_same, small_model, snapshot, train
from torch import nn
from torch._C._distributed_c10d import HashStore

import loco
from loco.coordination.authentication import StoreSeals
from loco.coordination.heartbeats import NoHeartbeats
from loco.coordination.reconnect_barrier import BarrierContext, ReconnectBarrier
from loco.errors import TransportError
from loco.exchange.stream import FrameStream
from loco.net.transport import Transport
from loco.wire.framing import Frame, Framing
from loco.wire.records import Kind


def build_scripted(rank: int, exchange: str = "gather") -> loco.PulseLoCo:
    inner = Scripted(parameters(3, 1003), 3, rank)
    return loco.PulseLoCo(inner, sync_every=2, exchange=exchange, topology=loco.Topology(repeats=0))


def hurt_in_round_2(
    rank: int, kind: str, fault: Callable[[pytest.MonkeyPatch], object], **options: Any
) -> dict[str, Any]:
    """A run whose second round fails once under `fault` and is repeated, beside one that never failed."""
    topology = loco.Topology(repeats=0)
    clean, hurt = (
        getattr(loco, kind)(
            # So many elements that all of them do not follow an announcement.
            Scripted(parameters(3, 3003), 3, rank),
            sync_every=2,
            topology=topology,
            **options,
        )
        for _ in "ab"
    )
    for _ in range(6):
        clean.step()
    for _ in range(3):
        hurt.step()
    hurt.inner.step()  # the fourth inner step, without its round, to see the state before the round
    before = snapshot(hurt)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        error = error_of(hurt.sync)
    after = snapshot(hurt)
    assert hurt.round == 1
    hurt.sync()
    for _ in range(2):
        hurt.step()
    states = {"before": before, "after": after, "hurt": snapshot(hurt), "clean": snapshot(clean)}
    return {"error": error, **states}


def damaged_frame(rank: int, kind: str, options: dict[str, Any], what: Kind) -> dict[str, Any]:
    """Site 1 receives a damaged frame of site 0."""
    arrived = FrameStream.arrived

    def damage(self: FrameStream) -> Any:
        frames = arrived(self)
        if rank == 1 and 0 in frames and frames[0][0].kind == what:
            frames[0][1][-1] ^= 0x40
        return frames

    return hurt_in_round_2(rank, kind, lambda patch: patch.setattr(FrameStream, "arrived", damage), **options)


@pytest.mark.check(MESSAGES, sample="PulseLoCo-options1-4")
@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("PulseLoCo", {"exchange": "gather"}, Kind.ENTRIES),
        ("PulseLoCo", {"exchange": "owner", "wire": "tight"}, Kind.SLICE),
        ("PulseLoCo", {"exchange": "owner", "wire": "fast"}, Kind.SUMS),
        ("PulseLoCo", {"exchange": "dense"}, Kind.SUMS),
        ("DiLoCo", {}, Kind.SLICE),
        ("DiLoCo", {}, Kind.SUMS),
    ],
)
def test_a_failed_round_changes_nothing_and_can_be_repeated(
    kind: str, options: dict[str, Any], what: Kind
) -> None:
    for rank, result in enumerate(run_ranks(3, damaged_frame, kind, options, what)):
        name, text = result["error"]
        assert name == "WireError"
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
    arrived = FrameStream.arrived

    def fail(self: FrameStream) -> Any:
        if arrived(self):
            raise TransportError("round 1, entries: lost site 0 (injected)")
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameStream, "arrived", fail)
        error = error_of(optimizer.sync)
    assert optimizer.last_report is None
    after = snapshot(optimizer)
    report = optimizer.sync()
    return {"error": error, "before": before, "after": after, "round": report.round}


def test_no_residual_is_spent_on_a_broken_link() -> None:
    for result in run_ranks(2, lost_link):
        kind, text = result["error"]
        assert kind == "TransportError"
        assert text == (
            "round 1, entries: lost site 0 (injected). All ranks can go on with the next step() or sync(); "
            "if a process has died, restart all sites from their last checkpoint"
        )
        assert_same(result["before"], result["after"])
        assert result["round"] == 1


def one_rank_out_of_memory(rank: int, kind: str, where: str, options: dict[str, Any]) -> dict[str, Any]:
    """Site 1 fails at one place of the round."""

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left (injected)")

    return hurt_in_round_2(rank, kind, lambda patch: rank == 1 and patch.setattr(where, fail), **options)


@pytest.mark.check(MESSAGES, sample=r".*(encode-options0|seal-options2|open-options6|sums-options10).*")
@pytest.mark.parametrize(
    ("kind", "where", "options"),
    [
        ("PulseLoCo", "loco.kernels.encode", {}),
        ("PulseLoCo", "loco.round.announcements.fp32_bits", {}),
        *(
            ("PulseLoCo", where, {"exchange": exchange})
            for exchange in ("gather", "owner", "dense")
            for where in (
                "loco.wire.framing.Framing.seal",
                "loco.wire.framing.Framing.open",
                "loco.kernels.add_up" if exchange == "dense" else "loco.kernels.Entries.join",
            )
        ),
        ("PulseLoCo", "loco.kernels.add_up", {"exchange": "owner"}),
        ("DiLoCo", "loco.kernels.encode", {}),
        ("DiLoCo", "loco.wire.framing.Framing.seal", {}),
        ("DiLoCo", "loco.wire.framing.Framing.open", {}),
    ],
)
def test_a_failure_on_one_rank_is_everyones_in_the_same_round(
    kind: str, where: str, options: dict[str, Any]
) -> None:
    for rank, result in enumerate(run_ranks(3, one_rank_out_of_memory, kind, where, options)):
        if rank == 1:
            assert result["error"] == ("OutOfMemoryError", "no memory left (injected)")
        else:
            assert result["error"][0] == "PeerError"
            assert result["error"][1].startswith("round 2, site 1 failed, and its own error says why")
        assert_same(result["before"], result["after"])
        assert_same(result["hurt"], result["clean"])


def repeated_while_handling(rank: int) -> tuple[float, int]:
    """A round is repeated while its error is still alive, and with it all that its traceback holds."""
    optimizer = build_scripted(rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            seal = Framing.seal

            def forge(self: Framing, *args: Any) -> Frame:
                frame = seal(self, *args)
                return frame._replace(header=replace(frame.header, round=9), whole=None)

            patch.setattr(Framing, "seal", forge)
        try:
            optimizer.sync()
        except loco.LocoError:
            patch.undo()
            start = time.monotonic()
            optimizer.sync()
            return time.monotonic() - start, optimizer.round
    raise AssertionError("nothing was raised")


def test_a_round_can_be_repeated_while_its_error_is_handled() -> None:
    """The peers learn at once that a link is given up, long before a timeout of 300 s."""
    for seconds, rounds in run_ranks(3, repeated_while_handling):
        assert seconds < 60
        assert rounds == 1


def non_finite(rank: int, kind: str) -> dict[str, Any]:
    net = small_model()
    weight = net.get_parameter("2.weight")
    optimizer = getattr(loco, kind)(torch.optim.SGD(net.named_parameters(), lr=1e-3), sync_every=2)
    train(net, optimizer, rank, range(3))
    kept = weight.data.clone()
    if rank == 2:
        weight.data[1, 1] = float("inf")
    before = snapshot(optimizer)
    sent = 0

    def count(progress: loco.RoundProgress) -> None:
        nonlocal across, sent
        across = progress.view.across
        sent = sent or across.sent_bytes  # before the round

    across = None
    handle = optimizer.register_round_hook(count)
    error = error_of(optimizer.sync)
    handle.remove()
    assert across is not None
    sent = across.sent_bytes - sent
    after = snapshot(optimizer)
    weight.data.copy_(kept)
    return {"error": error, "sent": sent, "before": before, "after": after, "next": optimizer.sync().round}


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_non_finite_is_refused_on_every_site_before_anything_of_it_is_sent(kind: str) -> None:
    for rank, result in enumerate(run_ranks(3, non_finite, kind)):
        name, text = result["error"]
        assert name == "NonFiniteError"
        assert text.startswith("round 2, site 2: the update of 2.weight is infinite or NaN")
        # An announcement, or a vote in its place, to each of two peers; few entries follow an announcement.
        assert result["sent"] == 2 * 64 if rank == 2 or kind == "DiLoCo" else result["sent"] > 2 * 64
        assert_same(result["before"], result["after"])
        assert result["next"] == 2


def two_problems(rank: int) -> tuple[str, str]:
    param, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = loco.PulseLoCo(torch.optim.SGD([param, other], lr=0.1))
    if rank:
        (param if rank == 2 else other).data.fill_(float("nan"))
    return error_of(optimizer.sync)


def test_of_several_problems_all_sites_raise_the_first_sites() -> None:
    errors = run_ranks(3, two_problems)
    assert errors[0][1].startswith("round 1, site 1: the update of group0.param1 is infinite or NaN")
    assert errors[1:] == errors[:1] * 2


def drifted(rank: int) -> list[tuple[str, str]]:
    errors = []
    for kind in (loco.PulseLoCo, loco.DiLoCo):
        optimizer = kind(Scripted(parameters(3, 1003), 3, rank), sync_every=2)
        if rank == 1:  # one bit of one weight, on one of three sites
            optimizer.outer_state.anchor.view(torch.int32)[700] ^= 1
        errors.append(error_of(optimizer.sync))
        if rank == 1:
            optimizer.outer_state.anchor.view(torch.int32)[700] ^= 1
            optimizer.outer_state.rounds_done = 5
        errors.append(error_of(optimizer.sync))
        optimizer.outer_state.rounds_done = 0
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
        Scripted(parameters(3, 1003), 3, rank),
        sync_every=2,
        topology=loco.Topology(timeout=1.0, patience=1.0),
    )
    dist.barrier()
    optimizer.inner.step()
    before = snapshot(optimizer)
    if rank == 1:
        hear("given up")
        return {}
    error = error_of(optimizer.sync)
    tell("given up")
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
        topology = loco.Topology(timeout=1.0, patience=1.0, repeats=0)
        return loco.PulseLoCo(inner, sync_every=2, topology=topology)

    clean, hurt = build(), build()
    for _ in range(4):
        clean.step()
    hurt.step()
    hurt.inner.step()
    before = snapshot(hurt)
    dist.barrier()
    if rank == 1:
        hear("site 0 has given up")
    errors = []
    while hurt.round == 0:
        try:
            hurt.sync()
        except loco.TransportError as error:
            errors.append(str(error))
            assert_same(before, snapshot(hurt))
            if rank == 0 and len(errors) == 2:  # in the round, and while it waited to reconnect
                tell("site 0 has given up")
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


def interrupted_linking(rank: int) -> tuple[tuple[str, str], float, int]:
    """Ctrl-C on rank 0 just after its new links are complete; rank 1 has them too, and trains on."""
    optimizer = loco.DiLoCo(Scripted(parameters(3, 1003), 3, rank), topology=loco.Topology())
    connect, built = loco.Topology.connect, []

    def interrupt(*args: Any) -> Any:
        built.append(connect(*args))  # as a traceback that somebody keeps does: they are not closed
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(loco.Topology, "connect", interrupt)
        began = time.monotonic()
        optimizer._loop.views.membership.give_up("")
        try:
            error = error_of(optimizer.sync)
        except KeyboardInterrupt:
            error = "KeyboardInterrupt", ""
        took = time.monotonic() - began
    while optimizer.round == 0:
        error_of(optimizer.sync)
    return error, took, optimizer.round


def test_who_is_interrupted_when_its_links_are_complete_keeps_nobody_waiting() -> None:
    """The others would wait for it for `patience`, which is ten minutes."""
    results = run_ranks(2, interrupted_linking)
    assert results[0][0][0] == "KeyboardInterrupt"
    assert all(took < 60.0 for _, took, _ in results)
    assert [rounds for _, _, rounds in results] == [1, 1]


HERE = "run/reconnect/here"  # the store's key


def barrier(store: Any, rank: int, patience: float, key: bytes | None = None) -> ReconnectBarrier:
    return ReconnectBarrier(
        BarrierContext(
            store=store,
            root="run",
            seals=StoreSeals(key, bytes(16)),
            liveness=NoHeartbeats(),
            rank=rank,
            world=2,
            patience=patience,
            named=str,
        )
    )


def test_an_interrupted_arrival_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    def ctrl_c(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ReconnectBarrier, "_pause", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            barrier(store, 0, 30.0).meet("here")
    assert store.get(HERE) == b"0:"
    with pytest.raises(loco.TransportError, match="1 of 2 ranks came"):  # itself, not itself twice
        barrier(store, 0, 0.1).meet("here")


def test_ctrl_c_is_ctrl_c_also_if_the_store_does_not_answer_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SimpleNamespace(compare_set=HashStore().compare_set)

    def ctrl_c(_: Any) -> None:
        def no_answer(*_: Any) -> None:
            raise RuntimeError("no answer within 1 s")

        store.compare_set = store.check = no_answer
        raise KeyboardInterrupt

    monkeypatch.setattr(ReconnectBarrier, "_pause", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        barrier(store, 0, 30.0).meet("here")


@pytest.mark.parametrize("old", [None, 0, 1])
def test_a_meeting_never_has_the_number_of_an_earlier_one(old: int | None) -> None:
    """Somebody removes the meetings that were held from the store, or writes an older value again."""
    store, values = HashStore(), []
    pair = [barrier(store, rank, 30.0, b"sixteen bytes and a few") for rank in range(2)]

    def held() -> list[int]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda one: one.meet("here"), pair))

    for number in range(3):
        assert held() == [number, number]
        values.append(store.get(HERE))
    if old is None:
        store.delete_key(HERE)
    else:
        store.set(HERE, values[old])
    assert held() == [3, 3]


def misaligned(rank: int) -> tuple[list[str], list[list[float]]]:
    """Two optimizers on one topology; rank 0 comes back for the first while rank 1 does for the second."""
    topology = loco.Topology(timeout=5.0, patience=5.0, repeats=0)
    params = [nn.Parameter(torch.full((3,), float(k))) for k in (1, 2)]
    pair = [loco.DiLoCo(torch.optim.SGD([p], lr=1.0), topology=topology) for p in params]

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "swap", interrupt)
        for optimizer in pair:
            with pytest.raises(KeyboardInterrupt):
                optimizer.sync()
    errors = [error_of(pair[rank].sync)[0]]
    for optimizer in pair:
        while optimizer.round == 0:
            errors.append(error_of(optimizer.sync)[0])
    return errors, [p.tolist() for p in params]


def test_two_optimizers_that_reconnect_do_not_meet_each_other() -> None:
    results = run_ranks(2, misaligned)
    # The first attempts can't both succeed: they are for different optimizers.
    assert "TransportError" in [errors[0] for errors, _ in results]
    for _, weights in results:
        assert weights == [[1.0] * 3, [2.0] * 3]


def test_who_gives_up_a_meeting_is_not_counted_when_the_others_come() -> None:
    store = HashStore()
    with pytest.raises(loco.TransportError, match=r"1 of 2 ranks came within 0\.1 s"):
        barrier(store, 0, 0.1).meet("here")
    assert store.get(HERE) == b"0:"
    pair = [barrier(store, rank, 30.0) for rank in range(2)]
    for number in range(2):  # the same key serves every meeting
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(one.meet, "here") for one in pair]
        # Both, because one that fails leaves the other one waiting.
        assert [one.exception() or one.result() for one in both] == [number, number]
