"""What ranks say when a first round, its links or its store fail, each tried alone."""

import logging
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

import loco
from loco.coordination import commit, hosted_store
from loco.coordination.authentication import StoreSeals
from loco.coordination.commit import ABORT, COMMIT, Verdicts
from loco.coordination.hosted_store import Guests, HostedStore
from loco.coordination.store_client import StoreClient
from loco.members import fixed
from loco.net import linking
from loco.net.links import Links
from loco.net.listening import Endpoint
from loco.round.announcements import replica_problem
from loco.round.joining.first_anchor import agree_to_adopt
from loco.round.views import Views


def test_sites_in_different_rounds_are_named() -> None:
    across: Any = SimpleNamespace(called="site {}".format)
    said: Any = [SimpleNamespace(site=site, round=4 + site) for site in (0, 1)]
    problem = replica_problem(across, said)
    assert problem is not None
    assert str(problem.seen) == (
        "the sites are in different rounds (site 0 in round 4, site 1 in round 5): resume all from the same "
        "checkpoint"
    )


def adopting(*failures: str | None, in_doubt: bool = False) -> None:
    rendezvous = SimpleNamespace(
        exchange_notes=lambda note, phase: [{"failure": failure} for failure in failures],
        called="site {}".format,
    )
    state: Any = SimpleNamespace(rounds_done=2, topology=SimpleNamespace(rendezvous=rendezvous, site=1))
    agree_to_adopt(state, others_may_be_ahead=False, round_in_doubt=in_doubt)


def test_weights_are_not_adopted_before_an_interrupted_round_is_settled_or_while_a_rank_can_not() -> None:
    with pytest.raises(loco.LocoError, match=r"round 3 was interrupted: call settle\(\) on every rank, load"):
        adopting(None, in_doubt=True)
    with pytest.raises(loco.PeerError) as raised:
        adopting("its round is in doubt", None)
    assert str(raised.value) == (
        "adopting weights after round 2: site 0 can't: its round is in doubt. No state has changed"
    )


def test_a_round_that_counts_though_its_links_broke_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise loco.errors.TransportError("lost site 1")

    current: Any = SimpleNamespace(run=run, is_promised=True)
    views: Any = SimpleNamespace(pending=None, conversing=nullcontext, decide=lambda vote: current)
    assert Views.run(views, current) is current
    assert caplog.messages == ["lost site 1; the round counts all the same"]


def test_a_round_that_another_rank_gave_up_in_the_last_vote_is_told_of() -> None:
    views: Any = SimpleNamespace(pending=None, conversing=nullcontext, decide=lambda vote: None, hang_up=str)
    current: Any = SimpleNamespace(run=lambda: None, number=3)
    with pytest.raises(
        loco.TransportError, match="round 3: another rank lost its links in the last vote, so no"
    ):
        Views.run(views, current)


def test_a_site_that_does_not_come_to_be_linked_is_named() -> None:
    hosted = hosted_store.host_at_port([])
    with pytest.raises(loco.TransportError, match=r"linking 2 sites: site b did not come within 0\.2 s"):
        Links(
            "early",
            store=f"127.0.0.1:{hosted.port}",
            member=0,
            names=["a", "b"],
            endpoint=Endpoint("127.0.0.1"),
            timeout=0.2,
            dead_after=5.0,
        )


@pytest.mark.usefixtures("single_site")
def test_a_store_that_is_too_slow_for_dead_after_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(StoreClient):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.round_trip = 1.25

    monkeypatch.setattr(fixed, "StoreClient", Slow)
    loco.Topology(dead_after=5.0).close()
    assert caplog.messages[0].startswith(
        "the sites' store answers within 1.25 s: dead_after must be at least eight times as long, or ranks"
    )


def test_a_store_that_lost_a_commit_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liveness: Any = SimpleNamespace(is_confirmed=lambda ranks, vote: True, confirm=lambda voter, vote: None)
    monkeypatch.setattr(commit, "decide", lambda *_: ABORT)
    verdicts = Verdicts(HashStore(), StoreSeals(bytes(16)), "a", clears_up=False, liveness=liveness)
    assert verdicts.on(3, ABORT) == COMMIT
    assert "round 3: the store says that it was given up, another rank that it was committed" in caplog.text


def test_a_program_that_ends_says_that_it_serves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosted_store, "_await_end", lambda *_: False)
    host: Any = HostedStore(SimpleNamespace(port=1))  # pyright: ignore[reportArgumentType]
    host.serve("a", [Guests("", "", [1], StoreSeals())])
    with caplog.at_level(logging.WARNING):
        host._serve_guests()
    said = "this program has ended, and serves the others for 30 s more: the store of all sites is in it"
    assert caplog.messages == [said]
    hosted_store.atexit.unregister(host._serve_guests)


def test_a_machine_that_can_not_listen_and_a_rank_that_hangs_up_are_named() -> None:
    def listen() -> None:
        raise OSError("can't listen at 10.0.0.1")

    endpoint: Any = SimpleNamespace(listen=listen)
    store: Any = SimpleNamespace(check=lambda: None)
    with pytest.raises(RuntimeError, match=r"links to other ranks: can't listen at 10\.0\.0\.1"):
        linking.link(store, "a", 0, 2, endpoint=endpoint)
    with pytest.raises(loco.TransportError, match="linking 2 ranks: links to other ranks: can't listen"):
        linking.link_ranks(HashStore(), "a", 0, 2, limit=1.0, endpoint=endpoint)
    one, other = socket.socketpair()
    other.close()
    with one, pytest.raises(RuntimeError, match="another rank closed its new connection"):
        linking._read(one, 16, store)
