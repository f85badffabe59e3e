"""A round whose links were lost, between sites that live, is tried again by itself."""

import copy
import logging
import os
import time
from typing import Any

import pytest
from scripted import Scripted, parameters
from selection import MESSAGES
from sites import error_of, hear, run_ranks, tell
from states import Snapshot, assert_same, snapshot

import loco
from loco.coordination.reconnect_barrier import ReconnectBarrier
from loco.exchange.stream import FrameStream
from loco.exchange.transfer import Transfer
from loco.members import fixed
from loco.net.transport import Transport
from loco.wire.records import FrameHeader, Kind


def build(rank: int, **options: Any) -> loco.PulseLoCo:
    topology = loco.Topology(dead_after=5.0, **options)
    inner = Scripted(parameters(3, 1003), 3, rank)
    return loco.PulseLoCo(inner, sync_every=2, exchange="gather", topology=topology)


def kept_warnings(of: str = "loco") -> list[str]:
    """What this package or a part of it warns of from now on."""
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger(of).addHandler(Keep())
    return warnings


def lost_links(rank: int, repeats: int, losses: int, hears: str = "") -> dict[str, Any]:
    """In the second round site 1 loses its links `losses` times, once entries have arrived. Before it goes on
    all that it `hears` have an error."""
    clean, hurt = build(rank), build(rank, repeats=repeats)
    for _ in range(6):
        clean.step()
    for _ in range(3):
        hurt.step()
    arrived, left = FrameStream.arrived, losses

    def lose(self: FrameStream) -> Any:
        nonlocal left
        frames = arrived(self)
        if rank == 1 and frames and left:
            left -= 1
            raise loco.TransportError("lost a link (injected)")
        return frames

    warnings = kept_warnings("loco.members")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameStream, "arrived", lose)
        error = error_of(hurt.step)
    failed_at = hurt.round
    for other in hears:
        tell(f"{rank} has an error") if rank != 1 else hear(f"{other} has an error")
    while hurt.round < 2:
        hurt.sync()
    for _ in range(2):
        hurt.step()
    states = {"clean": snapshot(clean), "hurt": snapshot(hurt)}
    return {"error": error, "failed at": failed_at, "warnings": warnings, **states}


@pytest.mark.check(MESSAGES, sample="2")
@pytest.mark.parametrize("losses", [1, 2])
def test_a_lost_link_costs_a_warning_and_no_bit(losses: int) -> None:
    for rank, result in enumerate(run_ranks(3, lost_links, 2, losses)):
        assert result["error"] == ("", "nothing was raised")
        assert result["failed at"] == 2
        assert len(result["warnings"]) >= losses
        assert all("It is tried again over new links" in text for text in result["warnings"])
        assert rank != 1 or "lost a link (injected)" in result["warnings"][0]
        assert_same(result["clean"], result["hurt"])


def lost_links_on_two_machines(rank: int) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank % 2)  # as torchrun numbers the ranks of each of two machines
    return lost_links(rank, 2, 1)


@pytest.mark.check(MESSAGES)
def test_each_machine_says_once_that_a_round_is_repeated() -> None:
    results = run_ranks(4, lost_links_on_two_machines)
    assert [bool(result["warnings"]) for result in results] == [True, False, True, False]
    assert all(result["error"] == ("", "nothing was raised") for result in results)


@pytest.mark.check(MESSAGES, sample="2-3")
@pytest.mark.parametrize(("repeats", "losses"), [(0, 1), (2, 3)])
def test_a_link_that_is_lost_again_and_again_is_an_error(repeats: int, losses: int) -> None:
    for result in run_ranks(3, lost_links, repeats, losses):
        assert result["error"][0] == "TransportError"
        assert result["failed at"] == 1
        assert len(result["warnings"]) == repeats
        assert_same(result["clean"], result["hurt"])


def loses_its_links_and_gives_up(rank: int) -> dict[str, Any]:
    return lost_links(rank, 0 if rank == 1 else 2, 1, hears="02")


def test_who_tries_again_is_told_of_one_that_does_not() -> None:
    """And does not wait for it as long as its patience lasts, which is ten minutes."""
    for rank, result in enumerate(run_ranks(3, loses_its_links_and_gives_up)):
        told = "" if rank == 1 else "reconnecting: site 1 has left: "
        kind, text = result["error"]
        assert kind == "TransportError"
        assert text.startswith(f"{told}lost a link (injected). All ranks can go on with the next step()")
        assert text.count("All ranks can go on") == 1  # what the others quote is without it
        assert len(result["warnings"]) == (rank != 1)
        assert result["failed at"] == 1
        assert_same(result["clean"], result["hurt"])


def comes_late_to_one_that_gives_up(rank: int) -> dict[str, Any]:
    """Site 2, after site 0 has been told, and has come back to wait."""
    meet, is_late = ReconnectBarrier.meet, rank == 2

    def meet_late(self: ReconnectBarrier, *args: Any) -> int:
        nonlocal is_late
        if is_late:
            is_late = False
            hear("0 has an error")
            time.sleep(1.0)
        return meet(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReconnectBarrier, "meet", meet_late)
        return loses_its_links_and_gives_up(rank)


def test_who_comes_late_is_told_too_of_one_that_does_not_try_again() -> None:
    for rank, result in enumerate(run_ranks(3, comes_late_to_one_that_gives_up)):
        told = "" if rank == 1 else "reconnecting: site 1 has left: "
        assert result["error"][1].startswith(f"{told}lost a link (injected). All ranks can go on")
        assert_same(result["clean"], result["hurt"])


def unlinked(rank: int, repeats: int, losses: int) -> dict[str, Any]:
    """Site 1 can't build its first links, `losses` times; the others can."""
    link, left = fixed.link, losses

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        pairs = link(*args, **kwargs)
        if rank == 1 and left:
            left -= 1
            pairs.close()
            raise RuntimeError("no route (injected)")
        return pairs

    clean = build(rank)
    warnings = kept_warnings("loco.members")
    built: list[loco.PulseLoCo] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed, "link", fail)
        error = error_of(lambda: built.append(build(rank, repeats=repeats)))
    if built:
        for optimizer in (clean, built[0]):
            for _ in range(4):
                optimizer.step()
    states = [snapshot(optimizer) for optimizer in (clean, *built)]
    return {"error": error, "warnings": warnings, "states": states}


@pytest.mark.check(MESSAGES)
def test_links_that_could_not_be_built_are_built_anew() -> None:
    for rank, result in enumerate(run_ranks(3, unlinked, 2, 2)):
        assert result["error"] == ("", "nothing was raised")
        assert len(result["warnings"]) == 2
        assert rank != 1 or "no route (injected)" in result["warnings"][0]
        clean, hurt = result["states"]
        assert_same(clean, hurt)


def test_links_that_can_not_be_built_are_an_error_on_all_ranks() -> None:
    for rank, result in enumerate(run_ranks(3, unlinked, 1, 2)):
        kind, text = result["error"]
        assert kind == "TransportError"
        assert ("no route (injected)" if rank == 1 else "another rank could not connect") in text
        assert text.endswith(". Start all sites again")
        assert len(result["warnings"]) == 1


def never_comes(rank: int) -> tuple[tuple[str, str], list[str]]:
    """Site 1 lives, and does not come to the round."""
    optimizer = build(rank, patience=1.5)
    optimizer.inner.step()
    if rank == 1:
        hear("given up")
        return ("", ""), []
    warnings = kept_warnings("loco.members")
    error = error_of(optimizer.sync)
    tell("given up")
    return error, warnings


def test_who_has_been_waited_for_long_enough_is_not_waited_for_again() -> None:
    (kind, text), warnings = run_ranks(2, never_comes)[0]
    assert kind == "TransportError"
    assert "no answer from site 1 within 1.5 s, which is alive" in text
    assert not warnings  # there was one attempt


def taken_back(rank: int) -> dict[str, Any]:
    """All go back to an older state, and in the round that they run again site 1 loses its link when it has
    sent all, and not received all."""
    clean, hurt = build(rank, repeats=0), build(rank, repeats=2, patience=20.0)
    hurt.sync()
    saved = copy.deepcopy(hurt.state_dict())
    hurt.step()
    hurt.sync()  # the second round
    hurt.load_state_dict(saved)
    clean.load_state_dict(saved)
    wait, waits = Transfer.wait, 0

    def lose(self: Transfer, posted: Any) -> None:
        nonlocal waits
        wait(self, posted)
        waits += 1
        if rank == 1 and waits == 1:
            raise loco.TransportError("lost a link (injected)")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "wait", lose)
        error = error_of(hurt.sync)
    clean.sync()
    return {"error": error, "waits": waits, "clean": snapshot(clean), "hurt": snapshot(hurt)}


def test_a_verdict_of_before_a_load_does_not_count_for_the_round_that_is_run_again() -> None:
    for result in run_ranks(2, taken_back):
        assert result["error"] == ("", "nothing was raised")
        assert result["waits"] > 1
        assert_same(result["clean"], result["hurt"])


def refused(rank: int) -> tuple[str, str]:
    return error_of(lambda: loco.Topology(repeats=-1))


def test_repeats_are_a_number() -> None:
    assert run_ranks(1, refused) == [("ValueError", "repeats must be >= 0, got -1")]


def damaged_header(rank: int) -> tuple[tuple[str, str], int, Snapshot, Snapshot]:
    """Site 1's first frame of round 2 has a header that can't be read."""
    topology = loco.Topology(patience=30.0)
    clean, hurt = (
        loco.PulseLoCo(
            Scripted(parameters(3, 1003), 3, rank), sync_every=1, exchange="gather", topology=topology
        )
        for _ in "ab"
    )
    for optimizer in (clean, hurt):
        optimizer.step()
    clean.step()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            pack, done = FrameHeader.pack, False

            def damaged(self: FrameHeader) -> bytes:
                nonlocal done
                raw = pack(self)
                if self.kind is not Kind.ENTRIES or done:
                    return raw
                done = True
                return raw[:8] + bytes([raw[8] ^ 1]) + raw[9:]

            patch.setattr(FrameHeader, "pack", damaged)
        error = error_of(hurt.step)
    return error, hurt.round, snapshot(clean), snapshot(hurt)


def test_a_header_that_can_not_be_read_is_a_lost_link_and_the_round_is_repeated() -> None:
    """The rank that reads it gives up its links; the others must not wait for it to come back by itself."""
    for error, rounds, clean, hurt in run_ranks(3, damaged_header):
        assert error == ("", "nothing was raised")
        assert rounds == 2
        assert_same(clean, hurt)


def reports_after_a_link_lost_inside_the_site(rank: int) -> list[loco.SyncReport]:
    """A round that counts on all ranks, of which one could not get all parts of θ at first; and one more."""
    topology = loco.Topology(ranks_per_site=2)
    inner = Scripted(parameters(3, 1003), 3, rank // 2)
    optimizer = loco.PulseLoCo(inner, sync_every=1, topology=topology)
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        gather, lost = Transport.gather, rank != 1

        def lose(self: Transport, *args: Any, **kwargs: Any) -> Any:
            nonlocal lost
            parts = gather(self, *args, **kwargs)
            if not lost:
                lost = True
                raise loco.TransportError("lost a link (injected)")
            return parts

        patch.setattr(Transport, "gather", lose)
        optimizer.step()
    first = optimizer.last_report
    optimizer.step()
    second = optimizer.last_report
    assert first is not None
    assert second is not None
    return [first, second]


def test_bytes_are_never_negative_after_new_links() -> None:
    for reports in run_ranks(4, reports_after_a_link_lost_inside_the_site):
        assert [report.round for report in reports] == [2, 3]
        for report in reports:
            assert min(report.sent_bytes, report.received_bytes, report.site_bytes) > 0
