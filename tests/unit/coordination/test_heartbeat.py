"""Signs of life: who is silent, who has left, and who is only busy."""

import ctypes
import gc
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from selection import INTERRUPTIONS, MESSAGES
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from loco.coordination.authentication import StoreSeals
from loco.coordination.heartbeats import AT_WORK, ENDED, LEFT, Beat, Loss
from loco.coordination.liveness import Liveness
from loco.coordination.pulse.store_wire import set_request

DEAD_AFTER = 0.8


def pair(store: HashStore) -> tuple[Liveness, Liveness]:
    listener, other = (Liveness(store, "x", rank, dead_after=DEAD_AFTER) for rank in (0, 1))
    return listener, other


def losses_while(
    listener: Liveness,
    happens: Callable[[], object],
    *,
    within: float = 4 * DEAD_AFTER,
    left_may_return: bool = False,
    link: str = "",
) -> list[Loss]:
    """What is noticed of rank 1 in some time after something happens."""
    found: list[Loss] = []
    with listener.watching([1], found.append, left_may_return=left_may_return, link=link):
        happens()
        deadline = time.monotonic() + within
        while not found and time.monotonic() < deadline:
            time.sleep(0.01)
    return found


def fall_silent(one: Liveness) -> None:
    """As a stopped process does: without a word."""
    one._ticker._state.once_more = False
    one._ticker._state.ended = True


def test_who_is_busy_is_not_missed() -> None:
    listener, other = pair(HashStore())
    assert losses_while(listener, lambda: other.say("computing, step 3 of 8 after round 6")) == []
    assert listener.last_words(1) == "computing, step 3 of 8 after round 6"


def test_only_who_gave_a_link_up_takes_that_back() -> None:
    listener, other = pair(HashStore())
    other.leave("it gave up", "links")
    listener.take_back("links")
    time.sleep(DEAD_AFTER / 4)  # a key is deleted some time later
    [loss] = losses_while(listener, lambda: other.say("working again"), link="links", left_may_return=True)
    assert (loss.gone, loss.why) == ((1,), "it gave up")
    other.take_back("links")
    time.sleep(DEAD_AFTER / 4)
    assert losses_while(listener, lambda: None, link="links", left_may_return=True) == []


def test_who_falls_silent_is_missed_by_rank_and_with_its_last_words() -> None:
    listener, other = pair(HashStore())
    other.say("round 7, encoding")
    time.sleep(DEAD_AFTER / 2)
    [loss] = losses_while(listener, lambda: fall_silent(other))
    assert (loss.silent, loss.gone, loss.store) == ((1,), (), "")
    text = listener.describe(loss, lambda ranks: f"site {ranks[0]}")
    assert text == (
        "no heartbeat from site 1 within 0.8 s: dead, stopped or cut off; last heard of: round 7, encoding"
    )


def test_who_never_began_is_missed_too() -> None:
    listener = Liveness(HashStore(), "x", 0, dead_after=DEAD_AFTER)
    [loss] = losses_while(listener, lambda: None)
    assert loss.silent == (1,)


# The names that `World` gives to a run's first links and to those after them; names that break other formats.
VOTES = ["loco/ab12/first 0/vote/5", "loco/ab12/1/vote/5", 'a:b c\n"d",[e]\\', "", "é\u2028"]


@pytest.mark.parametrize("status", [AT_WORK, f"{LEFT}round 6: gave up", f"{ENDED}its program has ended"])
@pytest.mark.parametrize("confirmed", [(), *((vote,) for vote in VOTES), tuple(VOTES)])
def test_a_beat_is_read_as_it_was_written_whatever_its_votes_are_called(
    confirmed: tuple[str, ...], status: str
) -> None:
    beat = Beat(3, status, confirmed)
    assert Beat.parse(str(beat)) == beat
    assert beat.has_left == (status != AT_WORK)


@pytest.mark.parametrize(
    "text", ["", "3 +", "3", "[]", "[3]", '["3","+"]', "[true,0]", '[3,"+",4]', "{}", "[" * 100_000]
)
def test_a_malformed_beat_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Beat.parse(text)


class Counting(HashStore):
    """A store that counts the requests that look for a rank's beats."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = {"check": 0, "multi_get": 0}

    def clone(self) -> "Counting":
        return self

    def check(self, keys: list[str]) -> bool:
        self.asked["check"] += any("alive" in key for key in keys)
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked["multi_get"] += 1
        return super().multi_get(keys)


def test_once_a_rank_has_begun_a_look_is_one_request_for_its_beats() -> None:
    store = Counting()
    listener, _ = pair(store)
    assert losses_while(listener, lambda: None) == []
    assert store.asked["check"] == 1
    assert store.asked["multi_get"] > 10


def test_of_whom_nothing_is_heard_since_the_store_is_silent_that_is_said() -> None:
    """Whoever notices first that the store is gone hangs up; the others must not take that for its fault."""

    class Silent(HashStore):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError("no route to it")

    listener, _ = pair(Silent())
    said = "nothing, since the sites' store does not answer (no route to it)"
    assert listener.last_words(1) == said


def test_who_is_removed_from_the_store_and_falls_silent_is_missed() -> None:
    store = HashStore()
    listener, other = pair(store)
    assert listener.last_words(1) == "starting"

    def vanish() -> None:
        fall_silent(other)
        store.delete_key("loco/x/alive/1")

    [loss] = losses_while(listener, vanish)
    assert loss.silent == (1,) or loss.store  # a store need not answer for what it does not have


def make_late(one: Liveness, seconds: float) -> None:
    beat = one._pulse.beat

    def late() -> None:
        time.sleep(seconds)
        beat()

    one._pulse.beat = late


@pytest.mark.check(INTERRUPTIONS)
def test_who_is_late_is_not_silent_to_a_listener_that_is_late_itself() -> None:
    """On an overloaded machine all heartbeats come late: two looks are then enough time for six beats."""
    listener, other = pair(HashStore())
    make_late(listener, DEAD_AFTER / 2)
    make_late(other, 1.5 * DEAD_AFTER)
    assert losses_while(listener, lambda: None) == []
    # Its last beat may come 1.5 · DEAD_AFTER later, and five looks of the listener take 4 · DEAD_AFTER.
    [loss] = losses_while(listener, lambda: fall_silent(other), within=10 * DEAD_AFTER)
    assert loss.silent == (1,)


def test_who_leaves_says_why_and_may_return() -> None:
    listener, other = pair(HashStore())
    [loss] = losses_while(listener, lambda: other.leave("round 7: lost site 2"))
    assert loss.gone == (1,)
    text = listener.describe(loss, lambda ranks: f"site {ranks[0]}")
    assert text == "site 1 has left: round 7: lost site 2"
    assert losses_while(listener, lambda: None, left_may_return=True) == []
    other.say("round 7, encoding")
    assert losses_while(listener, lambda: None) == []  # it is back


def test_why_a_rank_left_is_known_after_it_is_back() -> None:
    listener, other = pair(HashStore())
    assert listener.departed([1], "link a") is None
    other.leave("round 7: lost site 2")
    left = listener.departed([1], "link a")
    other.leave("round 8: lost site 3", "link a")
    other.say("round 8, applying")
    of_the_link = listener.departed([1], "link a")
    assert [left, of_the_link] == [
        Loss(gone=(1,), why="round 7: lost site 2"),
        Loss(gone=(1,), why="round 8: lost site 3"),
    ]
    assert listener.departed([1], "link b") is None


def test_who_left_a_link_has_left_it_for_good() -> None:
    listener, other = pair(HashStore())
    other.leave("round 7: lost site 2", "link a")
    other.say("round 7, encoding")
    assert losses_while(listener, lambda: None, link="link b") == []
    [loss] = losses_while(listener, lambda: None, link="link a")
    assert (loss.gone, loss.why) == ((1,), "round 7: lost site 2")


def test_who_ends_is_not_expected_back() -> None:
    listener, other = pair(HashStore())
    [loss] = losses_while(listener, other.close, left_may_return=True)
    assert loss.gone == (1,)
    assert listener.last_words(1) == "its program has ended, or dropped its optimizer"


def test_a_heartbeat_that_nobody_holds_ends_its_threads() -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    beats = pair(HashStore())
    own = set(threading.enumerate()) - before
    assert own
    del beats
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in own) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in own)


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize("destroyed", ["first", "never"])
def test_a_process_with_a_heartbeat_ends_with_its_own_status(destroyed: str) -> None:
    """Python stops a thread that is inside the store by ending the process, if it still runs then."""
    program = textwrap.dedent("""
        import sys, torch, torch.distributed as dist, loco
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = loco.PulseLoCo(torch.optim.SGD([parameter], lr=0.1), sync_every=1,
                                   topology=loco.Topology(dead_after=0.05))
        optimizer.step()
        if sys.argv[1] == "first":
            dist.destroy_process_group()
        loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == 4
        sys.exit(7)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", program, destroyed], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 7, ended.stderr
    assert "terminate called" not in ended.stderr


def sealed(store: HashStore, key: bytes = b"sixteen bytes and a few") -> tuple[Liveness, Liveness]:
    seals = StoreSeals(key, bytes(16))
    listener, other = (Liveness(store, "x", rank, dead_after=DEAD_AFTER, seals=seals) for rank in (0, 1))
    return listener, other


@pytest.mark.check(MESSAGES, sample=r"pair-7|sealed-x \+forged")
@pytest.mark.parametrize("malformed", ["", "x +forged", "\udcff 3", "7"])
@pytest.mark.parametrize("pair_of", [pair, sealed])
def test_a_malformed_beat_is_none_and_ends_nobodys_heartbeat(
    malformed: str, pair_of: Callable[[HashStore], tuple[Liveness, Liveness]]
) -> None:
    store: Any = HashStore()
    listener, other = pair_of(store)

    def spoil() -> None:
        for _ in range(20):
            store.set("loco/x/alive/1", malformed.encode(errors="surrogateescape"))
            time.sleep(0.01)

    assert losses_while(listener, spoil) == []  # the next beat is heard again
    for one in (listener, other):
        assert one._ticker.is_alive
    [loss] = losses_while(listener, lambda: fall_silent(other))  # and silence still is
    assert loss.silent == (1,)


def test_with_a_key_only_ranks_beat_and_no_beat_is_heard_twice() -> None:
    store: Any = HashStore()
    listener, other = sealed(store)
    time.sleep(DEAD_AFTER / 2)
    old = store.get("loco/x/alive/1")
    assert losses_while(listener, lambda: None) == []
    fall_silent(other)
    time.sleep(DEAD_AFTER)
    for forged in (b"99 +computing", b"99 -gone", b"99 !gone", old):

        def meddle(forged: bytes = forged) -> None:
            store.set("loco/x/alive/1", forged)

        [loss] = losses_while(listener, meddle)
        assert (loss.silent, loss.gone) == ((1,), ())  # neither alive nor gone


def test_with_a_key_only_ranks_give_up_a_link() -> None:
    store: Any = HashStore()
    listener, other = sealed(store)
    store.set("loco/x/left/link a", "1 forged")
    assert losses_while(listener, lambda: None, link="link a") == []
    other.leave("round 7: lost site 2", "link b")
    other.say("round 7, encoding")
    [loss] = losses_while(listener, lambda: None, link="link b")
    assert (loss.gone, loss.why) == ((1,), "round 7: lost site 2")


def hold_the_lock(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.check(INTERRUPTIONS, sample="keyed")
@pytest.mark.parametrize("key", [b"", b"sixteen bytes and a few"], ids=["plain", "keyed"])
def test_beats_go_on_without_the_interpreter_lock_and_none_comes_after_the_end(key: bytes) -> None:
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("some", PrefixStore("prefix", store))
    seals = StoreSeals(key or None, bytes(16))
    one = Liveness(store, "x", 1, dead_after=2 * DEAD_AFTER, seals=seals)
    assert one.needs_interpreter_lock == ""

    def beat() -> Beat:
        return Beat.parse(seals.read("loco/x/alive/1", store.get("loco/x/alive/1").decode()))

    before = beat().count
    for _ in range(3):
        hold_the_lock(2 * DEAD_AFTER)
        after = beat().count
        assert after != before  # one of Python's own may have waited long to be sent
        before = after
    one.say("round 7, encoding")
    hold_the_lock(2 * DEAD_AFTER)
    one.close("enough")
    ended = beat()
    assert ended.status == f"{ENDED}enough"
    time.sleep(DEAD_AFTER)
    assert beat() == ended


def test_beats_go_on_over_a_connection_that_was_cut() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Liveness(PrefixStore("some", server), "x", 1, dead_after=DEAD_AFTER)
    stand_in = one._pulse.stand_in
    assert stand_in is not None
    assert stand_in._end is not None
    stand_in._end.shutdown(socket.SHUT_RDWR)
    first = stand_in._end
    deadline = time.monotonic() + 10
    while stand_in._end in (first, None) and time.monotonic() < deadline:
        time.sleep(0.01)
    before = one._pulse.beats
    hold_the_lock(2 * DEAD_AFTER)
    assert Beat.parse(server.get("some/loco/x/alive/1").decode()).count > before
    one.close()


def test_what_the_store_does_not_understand_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's format may change: the first beat of the thread's must arrive as it was sent."""
    monkeypatch.setattr("loco.coordination.pulse.store_wire._SET", 13)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Liveness(store, "x", 1, dead_after=DEAD_AFTER)
    stand_in = one._pulse.stand_in
    assert stand_in is not None
    assert stand_in._end is None
    assert one.last_words(1) == "starting"
    one.close()


def test_a_beat_that_stands_elsewhere_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loco.coordination.pulse.stand_in.set_request", lambda key, _: set_request(key, "x"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Liveness(store, "x", 1, dead_after=DEAD_AFTER)
    assert "does not understand" in one.needs_interpreter_lock
    assert losses_while_alone(one) == []


def losses_while_alone(one: Liveness) -> list[Loss]:
    found: list[Loss] = []
    with one.watching([1], found.append):
        time.sleep(2 * DEAD_AFTER)
    one.close()
    return found
