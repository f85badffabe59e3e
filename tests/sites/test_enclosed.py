"""Few entries follow their announcement in the same message: no bit differs from an exchange of frames."""

from dataclasses import replace
from typing import Any

import pytest
from scripted import Scripted, parameters
from selection import MESSAGES
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot

import loco
from loco.exchange.stream import FrameStream
from loco.members.view import View
from loco.round import announcements
from loco.round import round as one_round

NUMEL, ROUNDS, SITES = 303, 4, 3
FEW = 203  # elements, all of which cost fewer bytes at once than summed by owners
ECONOMIES: dict[str, Any] = {"gate_gain": 2.0, "gate_margin": 0.1, "value_steps": 4, "sums_margin": 2.0}
HEADERS = (64, 64)  # an announcement and a vote

Reports = list[loco.SyncReport]


def run(rank: int, kind: str, encloses: bool, options: dict[str, Any], scales: list[float]) -> Any:
    """-> the reports and the state after some rounds, and how many streams of frames there were"""
    all_are_sent = kind == "DiLoCo" or "gate" in options
    inner = Scripted(parameters(5, FEW if all_are_sent else NUMEL), 5, rank, scales[rank])
    streams = 0
    messages = FrameStream.messages

    def counted(self: FrameStream, *frames: Any) -> Any:
        nonlocal streams
        streams += 1
        return messages(self, *frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameStream, "messages", counted)
        if not encloses:
            patch.setattr(announcements, "most_enclosed", lambda view: 0)
        optimizer = getattr(loco, kind)(inner, sync_every=1, **options)
        reports: Reports = []
        for _ in range(ROUNDS):
            optimizer.step()
            reports.append(optimizer.last_report)
    return reports, snapshot(optimizer), streams


def both(rank: int, kind: str, options: dict[str, Any], scales: list[float]) -> list[Any]:
    return [run(rank, kind, encloses, options, scales) for encloses in (True, False)]


ALIKE = [3e-5] * SITES
CASES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "default": ("PulseLoCo", {}, ALIKE),
    "fast": ("PulseLoCo", {"wire": "fast"}, [1e-5] * SITES),
    "economies": ("PulseLoCo", ECONOMIES, ALIKE),
    "a site sends nothing": ("PulseLoCo", {}, [3e-5, 0.0, 3e-5]),
    "a site is left out": ("PulseLoCo", {"outlier_factor": 20.0}, [3e-5, 3e-2, 3e-5]),
    "all elements": ("DiLoCo", {}, ALIKE),
    "an open gate": ("PulseLoCo", {"gate": "open"}, ALIKE),
}


@pytest.mark.check(MESSAGES, sample="default")
@pytest.mark.parametrize("case", CASES)
def test_what_follows_an_announcement_is_what_frames_bring(case: str) -> None:
    for enclosed, framed in run_ranks(SITES, both, *CASES[case]):
        assert_same(enclosed[1], framed[1])
        assert enclosed[2] == 0 < framed[2]
        for one, other in zip(enclosed[0], framed[0], strict=True):
            assert (one.entries, one.left_out, one.update_norms) == (
                other.entries,
                other.left_out,
                other.update_norms,
            )


@pytest.mark.check(MESSAGES, sample="PulseLoCo")
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_a_round_is_two_messages_to_each_peer(kind: str) -> None:
    results = [enclosed for enclosed, _ in run_ranks(SITES, both, kind, {}, ALIKE)]
    for rank, (reports, _, _) in enumerate(results):
        for number, report in enumerate(reports):
            payloads = [other[0][number].payload_bytes for other in results]
            assert report.sent_bytes == (SITES - 1) * (sum(HEADERS) + payloads[rank])
            assert report.received_bytes == (SITES - 1) * sum(HEADERS) + sum(payloads) - payloads[rank]
            assert report.exchange == ("gather" if kind == "PulseLoCo" else "dense")


def too_many_at_one_site(rank: int) -> tuple[Snapshot, Snapshot, int]:
    """Those of site 1 do not follow its announcement."""

    framed = run(rank, "PulseLoCo", False, {}, ALIKE)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(announcements, "is_worth_enclosing", lambda mine, sites: False)
        mixed = run(rank, "PulseLoCo", True, {}, ALIKE)
    return mixed[1], framed[1], mixed[2]


def test_where_one_site_has_too_many_all_exchange_frames() -> None:
    for mixed, framed, streams in run_ranks(SITES, too_many_at_one_site):
        assert_same(mixed, framed)
        assert streams > 0


def untrue_size(rank: int) -> tuple[tuple[str, str], int]:
    """Site 1 says that less follows than does."""
    optimizer = loco.PulseLoCo(Scripted(parameters(5, NUMEL), 5, rank), sync_every=1)
    announce = one_round.announce

    def lie(view: View, mine: Any, *frame: Any) -> Any:
        return announce(view, replace(mine, enclosed_bytes=70) if rank == 1 else mine, *frame)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(one_round, "announce", lie)
        error = error_of(optimizer.step)
    optimizer.sync()
    return error, optimizer.round


def test_a_wrong_size_of_what_follows_is_refused_and_costs_no_link() -> None:
    results = run_ranks(SITES, untrue_size)
    for rank in (0, 2):
        kind, text = results[rank][0]
        assert kind == "WireError"
        assert "the message of site 1 can't be read: a body of 6 bytes, not" in text
    assert [rounds for _, rounds in results] == [1] * SITES
