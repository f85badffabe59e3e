"""What all ranks tell each other outside of rounds: everyone reads everything, or all learn why not."""

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from loco.checkpoints.restore import exchange_or_fail
from loco.coordination.authentication import StoreSeals
from loco.coordination.heartbeats import Loss, NoHeartbeats
from loco.coordination.reconnect_barrier import BarrierContext
from loco.coordination.rendezvous import Alone, NeededError, Rendezvous
from loco.errors import AuthenticationError, CheckpointError, TransportError

KEY = b"sixteen bytes and a few"
LONG = 30.0  # seconds: nothing here waits for it


class Ear(NoHeartbeats):
    """Hears of losses what the test tells."""

    def __init__(self) -> None:
        self.told: list[Callable[[Loss], None]] = []
        self.listening = threading.Event()
        self.then: Callable[[], object] = lambda: None  # once it listens

    @contextmanager
    def watching(self, ranks: Sequence[int], alarm: Any, **_: Any) -> Iterator[None]:
        self.told.append(alarm)
        self.listening.set()
        self.then()
        yield

    def lose(self, loss: Loss) -> None:
        assert self.listening.wait(LONG)
        self.told[-1](loss)

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        return f"no heartbeat from {name(loss.silent)}"

    def last_words(self, rank: int) -> str:
        return "computing"


class Unsteady(HashStore):
    """Does not answer some questions."""

    def __init__(self, store: HashStore) -> None:
        super().__init__()
        self.store: Any = store
        self.mute: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in ("check", "compare_set", "get", "multi_get", "delete_key"):
            if name in self.mute:
                raise RuntimeError("no answer within 1 s")
            return getattr(self.store, name)
        return super().__getattribute__(name)


class Ranks:
    """The notes of some ranks, each in a thread of its own."""

    def __init__(self, world: int = 3, *, patience: float = LONG, key: bytes | None = None) -> None:
        self.store = HashStore()
        self.ears: list[Any] = [Ear() for _ in range(world)]
        self.stores = [Unsteady(self.store) for _ in range(world)]
        self.notes = [
            Rendezvous(
                BarrierContext(
                    store=self.stores[rank],
                    root="loco/run/notes",
                    seals=StoreSeals(key, bytes(16)),
                    liveness=self.ears[rank],
                    rank=rank,
                    world=world,
                    patience=patience,
                    named=lambda ranks: f"site {', '.join(map(str, ranks))}",
                )
            )
            for rank in range(world)
        ]

    def copy(self) -> dict[str, str]:
        """What the store holds."""
        with suppress(RuntimeError):  # a key is gone by now
            return {key: self.store.get(key).decode() for key in self.store.list_keys()}
        return self.copy()

    def note_of(self, call: int, rank: int) -> str:
        """Its key."""
        start = f"loco/run/notes/{call}/{rank}/"
        (key,) = (key for key in self.store.list_keys() if key.startswith(start))
        return key

    def lose_the_store(self) -> None:
        """Rank 1, once it has come to a call."""
        self.ears[1].then = lambda: self.stores[1].mute.add("compare_set")

    def find_the_store(self) -> None:
        self.ears[1].then = lambda: None
        self.stores[1].mute.clear()

    def swap(self, call: str, ranks: Sequence[int] = (0, 1, 2), note: str = "") -> list[Any]:
        """What came of a call, by rank: all notes, or the error."""

        def one(rank: int) -> Any:
            try:
                return self.notes[rank].exchange_notes({"rank": rank, "call": note or call}, call)
            except TransportError as error:
                return str(error)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))


def all_of(call: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "call": call} for rank in range(3)]


@pytest.mark.parametrize("key", [None, KEY])
def test_every_rank_reads_every_note_of_every_call_and_the_store_does_not_fill_up(key: bytes | None) -> None:
    ranks, keys = Ranks(key=key), []
    for number in range(5):
        assert ranks.swap(f"call {number}") == [all_of(f"call {number}")] * 3
        keys.append(ranks.store.num_keys())
    assert keys == [5] * 5  # a note of each, the roll, and the number of the call


def test_who_gives_up_does_so_for_all_also_for_who_comes_later() -> None:
    """And the next call is the same one for all ranks again."""
    ranks = Ranks()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.swap, "saving", [0, 2])
        ranks.ears[0].lose(Loss(silent=(1,)))
        early = waiting.result(LONG)
    late = ranks.swap("saving", [1])
    for text in early + late:
        assert text == "saving: no heartbeat from site 1 (so site 0 gave it up)"
    assert ranks.swap("again") == [all_of("again")] * 3
    assert ranks.swap("and again") == [all_of("and again")] * 3
    assert ranks.store.num_keys() == 5


def test_who_missed_a_call_altogether_meets_the_others_in_the_next_one() -> None:
    """It was interrupted before it came, say, and its loop goes on."""
    ranks = Ranks()
    for number in range(3):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ranks.swap, f"saving {number}", [0, 2])
            ranks.ears[0].lose(Loss(silent=(1,)))
            waiting.result(LONG)
        for ear in ranks.ears:
            ear.listening.clear()
    assert ranks.swap("saving 3") == [all_of("saving 3")] * 3


class Reconnecting:
    """What a rank uses the notes for beside saving."""

    def __init__(self, notes: Rendezvous) -> None:
        self.met: list[int] = []
        self._meet = lambda: self.met.append(notes.barrier.meet("optimizer"))
        notes.answers(self, "optimizer")

    def reconnect(self) -> None:
        self._meet()


def test_a_reconnection_outranks_a_swap() -> None:
    """Rank 1 waits to reconnect; the others wait for it in a save, and come to it first."""
    ranks = Ranks()
    users = [Reconnecting(notes) for notes in ranks.notes]

    def save(rank: int) -> str:
        with pytest.raises(NeededError) as error:
            ranks.notes[rank].exchange_notes({}, "saving")
        ranks.notes[rank].reconnect()
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        saving = [pool.submit(save, rank) for rank in (0, 2)]
        meeting = pool.submit(users[1].reconnect)
        told = {future.result(LONG) for future in saving}
        meeting.result(LONG)
    assert told <= {f"saving: others wait for it elsewhere (so site {k} gave it up)" for k in (0, 2)}
    for notes in ranks.notes:
        notes.reconnect()  # nobody waits
    assert [user.met for user in users] == [[0]] * 3
    assert ranks.swap("saving") == [all_of("saving")] * 3


def test_a_user_that_is_gone_answers_no_more() -> None:
    ranks = Ranks()
    users = [Reconnecting(notes) for notes in ranks.notes]
    del users[0]
    gc.collect()
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(ranks.notes[1].barrier.meet, "optimizer")
        assert ranks.ears[1].listening.wait(LONG)
        ranks.notes[0].reconnect()  # it has nobody to do so
        for rank in (0, 2):
            pool.submit(ranks.notes[rank].barrier.meet, "optimizer")
        assert late.result(LONG) == 0


def test_ranks_that_come_for_different_things_are_told_so() -> None:
    ranks = Ranks()

    def one(rank: int) -> str:
        try:
            ranks.notes[rank].exchange_notes({}, "saving 5" if rank == 1 else "after saving 5")
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(one, range(3)))
    assert (
        texts
        == [
            "save() and load() belong at one place on all ranks, but came site 0 for 'after saving 5', "
            "site 1 for 'saving 5', site 2 for 'after saving 5'"
        ]
        * 3
    )
    assert ranks.swap("saving 6") == [all_of("saving 6")] * 3


def test_who_is_alive_but_does_not_come_is_waited_for_only_so_long() -> None:
    early = Ranks(patience=0.3).swap("saving", [0, 2])
    for text in early:
        assert re.fullmatch(
            r"saving: no answer from site 1 within 0\.3 s, though alive; last heard of: computing "
            r"\(so site [02] gave it up\)",
            text,
        )
    assert len(set(early)) == 1


@pytest.mark.parametrize("question", ["check", "multi_get", "compare_set"])
def test_for_whom_the_store_did_not_answer_the_next_call_is_the_same_one(question: str) -> None:
    """It may have been only its answer that was lost, and the others went on with what it said."""
    ranks = Ranks()
    ranks.stores[1].mute = {question}

    def a_little_later() -> list[Any]:
        time.sleep(0.3)  # who comes last has nothing to ask for
        return ranks.swap("saving", [0, 2])

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(a_little_later)
        (error,) = ranks.swap("saving", [1])
        assert error == "saving: the sites' store does not answer (no answer within 1 s)"
        ranks.stores[1].mute = set()
        assert ranks.swap("saving", [1]) == [all_of("saving")]
        assert others.result(LONG) == [all_of("saving")] * 2
    assert ranks.swap("next") == [all_of("next")] * 3


def test_who_did_not_hear_the_end_of_a_call_and_comes_for_something_else_calls_it_off() -> None:
    """The others would take the note that it wrote then for what it came with now."""
    ranks = Ranks()
    ranks.lose_the_store()
    (error,) = ranks.swap("after saving 5", [1])
    assert "does not answer" in error
    ranks.find_the_store()
    assert ranks.notes[1].missed("after saving 5")
    assert not ranks.notes[1].missed("saving 5")
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(ranks.swap, "after saving 5", [0])
        assert ranks.ears[0].listening.wait(LONG)
        mine = pool.submit(ranks.swap, "saving 6", [1])
        said = "after saving 5: it came for something else, saving 6 (so site 1 gave it up)"
        assert early.result(LONG) == ranks.swap("after saving 5", [2]) == [said]
        assert ranks.swap("saving 6", [0, 2]) == [all_of("saving 6")] * 2
        assert mine.result(LONG) == [all_of("saving 6")]


@pytest.mark.parametrize("come", [False, True])
def test_a_call_whose_end_was_not_heard_is_not_taken_for_another_one(come: bool) -> None:
    ranks = Ranks()
    ranks.lose_the_store()
    if come:  # rank 1 as the last one, so that it has seen that all have
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ranks.swap, "saved", [0, 2])
            assert ranks.ears[0].listening.wait(LONG)
            assert ranks.ears[2].listening.wait(LONG)
            assert "does not answer" in ranks.swap("saved", [1])[0]
            assert waiting.result(LONG) == [all_of("saved")] * 2
    else:  # one does not, and the other gives it up
        assert "does not answer" in ranks.swap("saved", [1])[0]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ranks.swap, "saved", [0])
            ranks.ears[0].lose(Loss(silent=(2,)))
            assert "no heartbeat from site 2" in waiting.result(LONG)[0]
    ranks.find_the_store()
    assert ranks.swap("saving again") == [all_of("saving again")] * 3


def test_who_has_come_and_lost_the_store_then_is_waited_for_only_shortly() -> None:
    ranks = Ranks()
    ranks.lose_the_store()
    ranks.swap("saving", [1])
    for ear in ranks.ears:
        ear.dead_after = 0.1
    early = ranks.swap("saving", [0, 2])
    for text in early:
        assert re.fullmatch(r"saving: no answer from site 1 within 0\.2 s, though alive; .*", text)
    ranks.find_the_store()
    assert ranks.swap("saving", [1]) == early[:1]


def test_an_interrupted_rank_calls_off_what_the_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks.notes[1], "_await_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.notes[1].exchange_notes({}, "saving")
    monkeypatch.undo()
    assert ranks.swap("saving", [0, 2]) == ["saving: KeyboardInterrupt (so site 1 gave it up)"] * 2
    assert ranks.swap("again") == [all_of("again")] * 3


@pytest.mark.parametrize("forge", [lambda text: text, lambda text: text.replace("1", "2")])
def test_with_a_key_only_ranks_can_have_written_a_note(forge: Callable[[str], str]) -> None:
    """Another call's, and a changed one."""
    ranks = Ranks(key=KEY)
    ranks.swap("call 0")
    old = ranks.store.get(ranks.note_of(0, 1)).decode()
    ranks.ears[1].then = lambda: ranks.store.set(ranks.note_of(1, 1), forge(old))
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(notes.exchange_notes, {}, "call 1") for notes in ranks.notes[:2]]
        assert ranks.ears[1].listening.wait(LONG)
        futures.append(pool.submit(ranks.notes[2].exchange_notes, {}, "call 1"))
        for future in futures:
            with pytest.raises(AuthenticationError, match=r"notes/1/1/\w+ in the store was not wr"):
                future.result(LONG)


def test_what_ranks_wrote_to_an_old_call_is_never_taken_again() -> None:
    """Somebody without the key writes all of it again, as it was at some moment of that call."""
    ranks = Ranks(key=KEY)
    kept: list[dict[str, str]] = []
    for ear in ranks.ears:
        ear.then = lambda: kept.append(ranks.copy())
    ranks.swap("saving", note="0")
    kept.append(ranks.copy())
    for ear in ranks.ears:
        ear.then = lambda: None
    for number, old in enumerate(kept, 1):
        assert ranks.swap("saving", note=f"{number}") == [all_of(f"{number}")] * 3
        for key in ranks.store.list_keys():
            ranks.store.delete_key(key)
        for key, value in old.items():
            ranks.store.set(key, value)
        assert ranks.swap("saving", note=f"{number} again") == [all_of(f"{number} again")] * 3


def test_a_rank_that_missed_a_call_is_not_shown_it_later() -> None:
    """What the others wrote while they waited is genuine, and new to this rank; but they are not here."""
    ranks = Ranks(key=KEY, patience=0.5)
    kept: list[dict[str, str]] = []
    ranks.ears[2].then = lambda: kept.append(ranks.copy())
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(ranks.swap, "saving", [0])
        assert ranks.ears[0].listening.wait(LONG)
        assert "no answer from site 1" in ranks.swap("saving", [2])[0]
        early.result(LONG)
    for key in ranks.store.list_keys():
        ranks.store.delete_key(key)
    for key, value in kept[0].items():
        ranks.store.set(key, value)
    (told,) = ranks.swap("saving", [1])
    assert isinstance(told, str)
    assert "saving: no answer from site 0, 2 within 0.5 s" in told


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("found", ["x", "", "-1", "9" * 5000, "٣", " 7", '{"off": 1}'])
@pytest.mark.parametrize("where", ["call", "1"])
def test_what_is_no_number_and_no_roll_ends_in_a_sentence(key: bytes | None, found: str, where: str) -> None:
    ranks = Ranks(key=key)
    ranks.swap("saving")
    ranks.store.set(f"loco/run/notes/{where}", found)
    if not found or (key is None and where == "call"):  # nobody has written it, as it seems
        assert ranks.swap("saving again") == [all_of("saving again")] * 3
        return
    for notes in ranks.notes:
        with pytest.raises((AuthenticationError, TransportError)) as error:
            notes.exchange_notes({}, "saving again")
        assert (f"notes/{where} in the store" if key else "where ranks come together") in str(error.value)


@pytest.mark.parametrize("own", [ValueError("not mine"), OSError("disk full")])
def test_a_failure_of_one_is_all_ranks(own: Exception) -> None:
    ranks = Ranks()

    def one(rank: int) -> Exception | None:
        try:
            exchange_or_fail(ranks.notes[rank], {}, own if rank == 1 else None, "saving")
        except (ValueError, CheckpointError) as error:
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(one, range(3)))
    if isinstance(own, OSError):
        assert isinstance(errors[1], CheckpointError)
        assert (str(errors[1]), errors[1].__cause__) == ("saving: disk full", own)
    else:
        assert errors[1] is own
    for error in (errors[0], errors[2]):
        assert isinstance(error, CheckpointError)
        assert str(error) == f"saving: site 1 failed: {own}"


def test_a_rank_that_is_alone_reads_its_own_note() -> None:
    assert Alone().exchange_notes({"a": (1, 2)}, "saving") == [{"a": [1, 2]}]
