"""What a site says that no honest one would: the others refuse it, by name, and nothing has changed."""

import pytest
from lies import ANNOUNCEMENTS, FRAMES, LIES
from scripted import Scripted, parameters
from selection import MESSAGES
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot
from test_failures import build_scripted

import loco
from loco.net.transport import Transport
from loco.round import votes
from loco.wire.records import Vote


def lied_to(rank: int, lie: str, exchange: str = "gather") -> tuple[tuple[str, str], int]:
    """Site 1 sends what is not of this run."""
    optimizer = build_scripted(rank, exchange)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            LIES[lie](patch)
        error = error_of(optimizer.sync)
    while optimizer.round == 0:
        error_of(optimizer.sync)
    return error, optimizer.round


@pytest.mark.check(MESSAGES, sample=r"announces (another size|nothing)")
@pytest.mark.parametrize("lie", ANNOUNCEMENTS)
def test_a_foreign_announcement_is_refused_by_name_and_the_links_are_given_up(lie: str) -> None:
    results = run_ranks(2, lied_to, lie)
    assert results[0][0][0] == "WireError"
    assert "the message of site 1 can't be read: " in results[0][0][1]
    assert results[1][0][0] in ("TransportError", "WireError")  # its own numbers may be the forged ones
    assert [rounds for _, rounds in results] == [1, 1]


@pytest.mark.check(MESSAGES, sample="sends frames without end")
@pytest.mark.parametrize("lie", FRAMES)
def test_a_foreign_frame_is_refused_before_memory_is_taken_for_it(lie: str) -> None:
    """What follows such a header nobody knows: the link is given up, and the repeat builds a new one."""
    results = run_ranks(2, lied_to, lie)
    assert results[0][0][0] == "WireError"
    assert "the message of site 1 can't be read: a " in results[0][0][1]
    assert results[1][0][0] == "TransportError"
    assert [rounds for _, rounds in results] == [1, 1]


@pytest.mark.check(MESSAGES, sample="sends frames of another round")
@pytest.mark.parametrize("lie", FRAMES)
def test_a_foreign_frame_behind_an_announcement_is_refused_and_costs_no_link(lie: str) -> None:
    """Where it ends the announcement has said, so that the sites can vote on it."""
    results = run_ranks(2, lied_to, lie, "auto")
    assert results[0][0][0] == "WireError"
    assert "the message of site 1 can't be read: a " in results[0][0][1]
    assert results[1][0] == ("WireError", "round 1, site 0 could not read the message of site 1")
    assert [rounds for _, rounds in results] == [1, 1]


def silent_failure(rank: int, exchange: str) -> tuple[tuple[str, str], Snapshot, Snapshot, int]:
    """Site 1 sends frames that say it could not make them, and votes for the round nevertheless."""
    inner = Scripted(parameters(3, 1003), 3, rank)
    optimizer = loco.PulseLoCo(inner, exchange=exchange, topology=loco.Topology(repeats=0))
    optimizer.inner.step()
    before = snapshot(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            LIES["fails and votes for it"](patch)
        error = error_of(optimizer.sync)
    return error, before, snapshot(optimizer), optimizer.sync().round


@pytest.mark.check(MESSAGES, sample="owner")
@pytest.mark.parametrize("exchange", ["gather", "owner", "dense"])
def test_what_did_not_come_is_missed_even_if_its_sender_votes_for_the_round(exchange: str) -> None:
    for (kind, text), before, after, rounds in run_ranks(3, silent_failure, exchange):
        assert kind == "WireError"
        assert "did not receive all of site 1, which gives no reason" in text
        assert_same(before, after)
        assert rounds == 1


def other_exchange(rank: int) -> tuple[str, int]:
    """Site 0 gathers where the others owner-reduce, with frames of one size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loco.wire.framing.LEAST", 256)
        patch.setattr("loco.wire.framing.MOST", 256)
        inner = Scripted(parameters(3, 5003), 3, rank)
        optimizer = loco.PulseLoCo(inner, exchange="owner", topology=loco.Topology(repeats=0))
        with pytest.MonkeyPatch.context() as lie:
            if rank == 0:
                LIES["exchanges otherwise"](lie)
            kind, _ = error_of(optimizer.sync)
        while optimizer.round == 0:
            error_of(optimizer.sync)
        return kind, optimizer.round


def test_sites_that_choose_different_exchanges_find_out() -> None:
    for kind, rounds in run_ranks(3, other_exchange):
        assert kind in ("WireError", "TransportError")
        assert rounds == 1


def test_another_message_is_not_taken_for_a_vote() -> None:
    for (kind, text), rounds in run_ranks(2, lied_to, "is elsewhere"):
        assert kind == "WireError"
        assert text.startswith("round 1, vote: site 1 sent another message than its vote")
        assert rounds == 1


def damaged_last_vote(rank: int) -> tuple[tuple[str, str], Snapshot, Snapshot]:
    """A site's rank can't read its neighbour's last vote, and the other sites have all votes."""

    def built() -> loco.PulseLoCo:
        topology = loco.Topology(ranks_per_site=2, repeats=2)
        inner = Scripted(parameters(3, 1003), 3, rank // 2)
        return loco.PulseLoCo(inner, sync_every=1, topology=topology)

    clean, hurt = built(), built()
    read, damaged = votes.read_vote, rank != 1

    def misread(raw: bytes, site: int, transport: Transport, member: int, round: int) -> Vote:
        nonlocal damaged
        if not damaged and transport.member == "rank of this site":
            damaged = True
            raw = bytes([raw[0] ^ 0x40]) + raw[1:]
        return read(raw, site, transport, member, round)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(votes, "read_vote", misread)
        error = error_of(hurt.step)
    while hurt.round < 3:
        error_of(hurt.sync if hurt.round == 0 else hurt.step)
    for _ in range(3):
        clean.step()
    return error, snapshot(clean), snapshot(hurt)


def test_a_last_vote_that_can_not_be_read_inside_a_site_does_not_part_the_ranks() -> None:
    for _, clean, hurt in run_ranks(4, damaged_last_vote):
        assert_same(clean, hurt)
