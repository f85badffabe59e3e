"""With a key, a message counts only if it is genuine, in its place, and of this run."""

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, parameters
from selection import MESSAGES
from sites import error_of, run_ranks, run_worlds
from states import assert_same, snapshot
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

import loco
from loco.coordination.authentication import SEAL_BYTES, MessageSeals, StoreSeals
from loco.coordination.commit import ABORT, COMMIT, Verdicts, decide
from loco.coordination.heartbeats import NoHeartbeats
from loco.coordination.liveness import Liveness
from loco.errors import AuthenticationError
from loco.members.elastic.elastic_sites import ElasticSites
from loco.members.elastic.quorum import Claim, Plan
from loco.net.mesh import Parcel
from loco.net.pending import PendingMessages
from loco.net.transport import Transport

KEY = b"sixteen bytes and a few"


def build(rank: int, key: bytes | None = KEY, **options: Any) -> loco.PulseLoCo:
    inner = Scripted(parameters(3, 3003), 3, rank)  # a slice for each of three sites
    return loco.PulseLoCo(inner, sync_every=2, topology=loco.Topology(key=key, repeats=0), **options)


def with_and_without(rank: int, exchange: str) -> dict[str, Any]:
    options: dict[str, Any] = {"exchange": exchange} | (
        {} if exchange == "dense" else {"wire": "fast"}
    )  # "auto" tries both
    sealed, plain = build(rank, **options), build(rank, None, **options)
    for _ in range(6):
        sealed.step()
        plain.step()
    assert sealed.last_report is not None
    assert plain.last_report is not None
    more = sealed.last_report.sent_bytes - plain.last_report.sent_bytes
    return {"sealed": snapshot(sealed), "plain": snapshot(plain), "more": more}


@pytest.mark.check(MESSAGES, sample=r"owner")
@pytest.mark.parametrize("exchange", ["gather", "owner", "dense"])
def test_seals_change_no_bit_of_a_round_and_their_bytes_are_counted(exchange: str) -> None:
    for result in run_ranks(3, with_and_without, exchange):
        assert_same(result["sealed"], result["plain"])
        # To each of two peers: an announcement, a vote, and a frame (of entries; or of a slice, and of its
        # sums). Where the sizes of all frames are known beforehand, header and body are two messages.
        messages = 2 * (2 + {"gather": 1, "owner": 2, "dense": 4}[exchange])
        assert result["more"] == SEAL_BYTES * messages


def changed_on_its_way(rank: int, which: int) -> dict[str, Any]:
    """One bit of the `which`-th message that site 1 receives in a round is another one."""
    optimizer = build(rank, exchange="owner")
    optimizer.step()
    optimizer.inner.step()
    before = snapshot(optimizer)
    count, check = 0, Transport.check_seal

    def meddle(self: Transport, parcel: Parcel, size: int, number: int, *, phase: str) -> None:
        nonlocal count
        if rank == 1 and count == which:
            parcel.data[size // 2] ^= 1
        count += 1
        check(self, parcel, size, number, phase=phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "check_seal", meddle)
        error = error_of(optimizer.sync)
    after = snapshot(optimizer)
    goal = optimizer.round + 1
    while optimizer.round < goal:  # the links may have to be built anew
        error_of(optimizer.sync)
    return {"error": error, "before": before, "after": after, "round": goal}


# Announcements, slices and sums, from each of two peers.
@pytest.mark.check(MESSAGES, sample=r"0|2|5")
@pytest.mark.parametrize("which", range(6))
def test_a_changed_message_is_refused_whatever_it_is(which: int) -> None:
    results = run_ranks(3, changed_on_its_way, which)
    assert results[1]["error"][0] == "AuthenticationError"
    assert "is not genuine: its key is another one, or the message was forged or" in results[1]["error"][1]
    for result in results:
        assert result["error"][0] in ("AuthenticationError", "TransportError")
        assert_same(result["before"], result["after"])
        assert result["round"] == 1


@pytest.mark.check(MESSAGES, sample=r"6")
@pytest.mark.parametrize("which", [6, 7])
def test_a_changed_vote_leaves_all_sites_agreed(which: int) -> None:
    """Site 1 can't tell, but the verdict does, whether the others had all votes and went on."""
    results = run_ranks(3, changed_on_its_way, which)
    changed = [(r["before"]["anchor"] != r["after"]["anchor"]).any() for r in results]
    assert changed in ([True] * 3, [False] * 3)
    assert [r["round"] for r in results] == [1 + changed[0]] * 3


def repeated_message(rank: int) -> tuple[str, str]:
    """Site 1 gets, in place of the second message from site 0, the first one again, seal and all."""
    all_ranks = loco.Topology(key=KEY).all_ranks()
    all_ranks.swap_records(b"pay ten", phase="first")
    kept: list[Parcel] = []
    check = Transport.check_seal

    def repeat(self: Transport, parcel: Parcel, size: int, number: int, *, phase: str) -> None:
        if rank == 1 and kept:
            assert parcel.seal is not None
            assert kept[0].seal is not None
            parcel.data.copy_(kept[0].data)
            parcel.seal.copy_(kept[0].seal)
        kept[:] = kept or [parcel]
        check(self, parcel, size, number, phase=phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "check_seal", repeat)
        all_ranks.swap_records(b"pay one", phase="second")
        return error_of(lambda: all_ranks.swap_records(b"pay two", phase="third"))


def test_an_old_message_is_refused() -> None:
    right, wrong = run_ranks(2, repeated_message)
    assert right == ("", "nothing was raised")
    assert wrong[0] == "AuthenticationError"


def other_keys(rank: int, keys: list[bytes | None]) -> tuple[str, str]:
    return error_of(lambda: build(rank, keys[rank]))


def test_another_key_and_a_missing_key_are_refused_on_all_ranks() -> None:
    for kind, text in run_ranks(2, other_keys, [KEY, b"another key of enough bytes"]):
        assert kind == "AuthenticationError"
        assert "its key is another one" in text
    for kind, text in run_ranks(3, other_keys, [KEY, KEY, None]):
        assert (kind, text) == ("AgreementError", "site 0 has a key, site 2 has none")


def short_key(rank: int) -> tuple[str, str]:
    return error_of(lambda: loco.Topology(key=b"short"))


def test_a_key_has_enough_bytes() -> None:
    assert run_ranks(1, short_key) == [("ValueError", "key must have at least 16 bytes, got 5")]


def test_a_seal_is_of_the_message_and_of_its_place() -> None:
    message = torch.arange(100, dtype=torch.uint8)

    def seals(key: bytes = KEY, session: bytes = bytes(16), group: str = "a", rank: int = 0) -> MessageSeals:
        return MessageSeals(key, session, group, rank)

    seal = seals().seal(message, 1)
    assert seal.numel() == SEAL_BYTES
    assert seals(rank=1).is_genuine(message, seal, 0, 1)
    assert not seals(rank=1).is_genuine(message[:-1], seal, 0, 1)
    assert not seals(rank=1).is_genuine(message, seal, 0, 2)
    assert not seals(rank=1).is_genuine(message, seal, 2, 1)
    assert not seals(rank=2).is_genuine(message, seal, 0, 1)
    assert not seals(rank=0).is_genuine(message, seal, 1, 1)  # sent back to its sender
    assert not seals(rank=1, group="b").is_genuine(message, seal, 0, 1)
    assert not seals(rank=1, session=bytes(15) + b"1").is_genuine(message, seal, 0, 1)
    assert not seals(rank=1, key=KEY[:-1]).is_genuine(message, seal, 0, 1)


def test_a_verdict_is_taken_only_from_ranks() -> None:
    store, words = HashStore(), StoreSeals(KEY, bytes(range(16)))
    assert decide(store, "round/1", COMMIT, words) == COMMIT
    assert decide(store, "round/1", ABORT, words) == COMMIT  # the first one counts
    for forged in (COMMIT, store.get("round/1").decode(), "nonsense"):
        store.set("round/2", forged)
        with pytest.raises(AuthenticationError, match="was not written by a rank of this run"):
            decide(store, "round/2", COMMIT, words)


class Ear(NoHeartbeats):
    """Hears of commits what the test tells."""

    def __init__(self, confirmed: set[str]) -> None:
        self.confirmed = confirmed

    def confirm(self, voter: object, vote: str) -> None:
        self.confirmed.add(vote)

    def is_confirmed(self, ranks: Any, vote: str) -> bool:
        return vote in self.confirmed


def verdicts(store: HashStore, confirmed: set[str], links: str = "run/0") -> Verdicts:
    seals: Any = StoreSeals(KEY, bytes(16))
    ear: Any = Ear(confirmed)
    return Verdicts(store, seals, links, clears_up=False, liveness=ear, others=(0,))


def test_a_commit_that_was_removed_from_the_store_still_counts() -> None:
    """A rank that was cut in the last vote asks after somebody has deleted the verdict of the others."""
    store, confirmed = HashStore(), set[str]()
    assert verdicts(store, confirmed).on(4, COMMIT) == COMMIT
    store.delete_key("run/0/vote/1")
    assert verdicts(store, confirmed).on(4, ABORT) == COMMIT


def test_a_verdict_of_before_a_state_was_loaded_is_not_on_the_round_of_the_same_number() -> None:
    """Nor is one on a round over other links, which somebody has kept and writes into the store again."""
    store: Any = HashStore()
    confirmed = set[str]()
    pair = [verdicts(store, confirmed) for _ in range(2)]
    for one in pair:
        one.prepare(4)
        assert one.on(4, COMMIT) == COMMIT
        assert one.on(4, ABORT) == COMMIT  # asked again, as after Ctrl-C
    kept = store.get("run/0/vote/1")
    for one in pair:  # a state of round 3 was loaded
        one.prepare(4)
    assert pair[0].on(4, ABORT) == ABORT
    for key in ("run/0/vote/2", "run/1/vote/1"):
        store.set(key, kept)
    with pytest.raises(AuthenticationError, match="was not written by a rank of this run"):
        pair[1].on(4, ABORT)
    with pytest.raises(AuthenticationError, match="was not written by a rank of this run"):
        verdicts(store, confirmed, "run/1").on(4, ABORT)


@pytest.mark.parametrize("links", ["loco/ab12/first 0", "loco/ab12/1"])
def test_a_commit_is_confirmed_by_heartbeats(links: str) -> None:
    store, seals = HashStore(), StoreSeals(KEY, bytes(16))
    pair = [Liveness(store, "x", rank, dead_after=0.8, seals=seals) for rank in range(2)]
    assert not pair[1].is_confirmed([0], f"{links}/vote/1")
    voter = object.__new__(Verdicts)
    pair[0].confirm(voter, f"{links}/vote/1")
    assert pair[1].is_confirmed([0], f"{links}/vote/1")
    pair[0].confirm(voter, f"{links}/vote/2")
    assert pair[1].is_confirmed([0], f"{links}/vote/2")
    pair[0].close()
    began = time.monotonic()
    assert not pair[1].is_confirmed([0], f"{links}/vote/3")  # who does not beat is not waited for
    assert time.monotonic() - began < 5.0


def lose_what_is_sent(connection: Any) -> None:
    """The system takes it, and it does not arrive."""

    def send(finish: Any) -> None:
        while connection._leaving:
            _, message = connection._leaving.popleft()
            if message is not None:
                finish(message)

    connection.send = send


def verdict_is_removed(rank: int, links: str) -> dict[str, Any]:
    """In round 3 site 2's last vote does not reach site 0, whose link then breaks. Meanwhile somebody without
    the key removes the verdict from the store, each time that another site has written it."""
    topology = loco.Sites(key=KEY)
    optimizer = loco.PulseLoCo(Scripted(parameters(3, 1003), 3, topology.site), topology=topology)
    host, port = os.environ["LOCO_AT"].split(":")
    store = PrefixStore("sites", TCPStore(host, int(port), is_master=False))
    names: dict[int, str] = {}

    def to_site_0(view: Any) -> Any:
        return view.across.mesh._connections._by_member[0]

    def meddle(progress: loco.RoundProgress) -> None:
        number, phase, view = progress.number, progress.phase, progress.view
        names[number] = view.name
        if links == "later" and number == 1 and phase == "encoded" and topology.site == 2 and len(names) == 1:
            names[0] = view.name
            to_site_0(view).end.shutdown(socket.SHUT_RDWR)
        if number != 3 or topology.site == 0:
            return
        if phase == "received" and topology.site == 2:
            lose_what_is_sent(to_site_0(view))
        if phase == "committed":
            if topology.site == 2:
                store.wait(["tests/site 1 has committed"])
            for key in store.underlying_store.list_keys():
                if "/vote/" in key:
                    store.delete_key(key.removeprefix("sites/"))
            store.set(f"tests/site {topology.site} has committed", "")
            if topology.site == 2:
                to_site_0(view).end.shutdown(socket.SHUT_RDWR)

    optimizer.register_round_hook(meddle)
    error = ("", "")
    while optimizer.round < 5 and error[0] != "ReplicaError":
        optimizer.inner.step()
        error = error_of(optimizer.sync)
    return {"error": error, "names": names, "anchor": snapshot(optimizer)["anchor"]}


@pytest.mark.check(MESSAGES, sample="later")
@pytest.mark.parametrize("links", ["first", "later"])
def test_whoever_removes_verdicts_from_the_store_does_not_split_the_run(links: str) -> None:
    sites = [site[0] for site in run_worlds(["a", "b", "c"], 1, verdict_is_removed, links)]
    for site in sites:
        assert site["error"] == ("", "nothing was raised")
        assert (" " in site["names"][3]) == (links == "first")
        assert site["names"][3] != site["names"][5]  # they lost a link in it
        np.testing.assert_array_equal(site["anchor"], sites[0]["anchor"])


def first_anchor(rank: int) -> np.ndarray:
    """θ reaches all sites by sealed messages too, not by a collective of torch's."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a broadcast can't be sealed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", never)
        optimizer = loco.DiLoCo(
            torch.optim.SGD(parameters(rank, 1003), lr=0.1), topology=loco.Topology(key=KEY)
        )
    return snapshot(optimizer)["anchor"]


def test_the_first_anchor_is_sealed_too() -> None:
    first, *others = run_ranks(3, first_anchor)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_a_message_counts_only_once_its_seal_is_checked() -> None:
    """Whoever changes this order makes the rest of this file worthless: `wait` checks before it returns."""
    names = PendingMessages.wait.__code__.co_names
    assert names.index("check_seal") < names.index("received_bytes")


def test_messages_are_of_one_quorum_and_of_what_all_its_members_were_told() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limits: dict[str, Any] = {"timeout": 20.0, "patience": 60.0, "dead_after": 5.0}
    at = f"127.0.0.1:{store.port}"
    sites = [ElasticSites(sites=2, name=name, at=at, at_least=2, key=KEY, **limits) for name in "ab"]
    held = ""

    def told(k: int, change: Callable[[Plan], Plan]) -> tuple[str, str]:
        """What comes of one message from each to the other, on each."""
        nonlocal held
        plan = sites[k].gather(Claim(round=0, digest="", ready=True, links=held))
        sites[k].link(plan)
        link = sites[k].among(change(plan))
        links = sites[k].links
        assert links is not None
        held = links.name
        return error_of(lambda: link.swap_records(b"as it is", phase="saying"))

    def another(plan: Plan) -> Plan:
        """As a store tells it that is somebody else's."""
        return replace(plan, attempt="of before")

    with ThreadPoolExecutor(2) as pool:
        for changes in ([same, same], [another, another], [same, same], [another, same]):
            first, second = pool.map(told, range(2), changes)
            genuine = changes[0] is changes[1]
            for kind, text in (first, second):
                assert (kind == "") == genuine, text
                assert genuine or (kind == "AuthenticationError" and "is not genuine" in text)
    for site in sites:
        site.close()


def same(plan: Plan) -> Plan:
    return plan
