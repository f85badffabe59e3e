"""A list in the store by which sites find each other: who belongs to a quorum, and who is refused."""

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

import loco
from loco.coordination.site_directory import Arrival, SiteDirectory
from loco.coordination.store_client import RemoteStore

KEY, DEAD_AFTER, PATIENCE = bytes(range(16)), 3.0, 60.0
Quorum = tuple[str, list[Arrival]]


def hosting(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


class Run:
    """Sites of one run, each a thread when it asks."""

    def __init__(self, store: TCPStore, pool: ThreadPoolExecutor) -> None:
        self.store = store
        self._pool = pool
        self._numbers = iter(range(1, 100))
        self.places: dict[str, SiteDirectory] = {}

    def restart(self) -> None:
        port = self.store.port
        del self.store
        gc.collect()
        self.store = hosting(port)

    def enter(self, name: str, sites: int = 3, at_least: int = 1, *, key: bytes | None = None) -> None:
        who: dict[str, Any] = {"site": name.split()[0], "sites": sites, "at_least": at_least, "ranks": 1}
        mine = Arrival(process=next(self._numbers), where=f"process {name}", **who)
        store = RemoteStore(f"127.0.0.1:{self.store.port}", "sites", PATIENCE)
        self.places[name] = SiteDirectory(store, mine, dead_after=DEAD_AFTER, key=key)

    def ask(self, *names: str, patience: float = PATIENCE) -> dict[str, "Future[Quorum]"]:
        return {name: self._pool.submit(self.places[name].ask, {"of": name}, patience) for name in names}

    def waiting(self) -> list[str]:
        return [one["site"] for one in json.loads(self.store.get("sites/roll"))["waiting"]]

    def meet(self, *names: str) -> str:
        """These, and nobody else, are of one quorum -> its name."""
        met = [future.result(PATIENCE) for future in self.ask(*names).values()]
        assert len({name for name, _ in met}) == 1
        for _, quorum in met:
            assert [one.site for one in quorum] == sorted(name.split()[0] for name in names)
            assert sorted(one.claim["of"] for one in quorum) == sorted(names)
        return met[0][0]


@pytest.fixture
def run() -> Iterator[Run]:
    with ThreadPoolExecutor(8) as pool:
        run = Run(hosting(0), pool)
        yield run
        for place in run.places.values():
            place.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
def test_each_quorum_has_all_who_live_and_a_name_of_its_own(run: Run, key: bytes | None) -> None:
    for name in "abc":
        run.enter(name, at_least=3, key=key)
    names = [run.meet("a", "b", "c")]
    # Those who can lose none do not ask again, but nothing depends on that.
    names += [run.meet("c", "b", "a") for _ in range(3)]
    assert len(set(names)) == 4


def test_who_lives_is_waited_for_and_who_comes_takes_part(run: Run) -> None:
    run.enter("a")
    run.enter("b")
    run.meet("a")
    waits = run.ask("b")["b"]
    with pytest.raises(TimeoutError):
        waits.result(0.5)
    assert [one.site for one in run.ask("a")["a"].result(PATIENCE)[1]] == ["a", "b"]
    waits.result(PATIENCE)
    assert run.meet("a", "b")


def test_who_has_left_is_not_waited_for_and_comes_back_under_its_name(run: Run) -> None:
    for name in "abc":
        run.enter(name, sites=4, at_least=3)
    run.meet("a", "b", "c")
    run.places["b"].close()
    waits = run.ask("a", "c")
    run.enter("b again", sites=4, at_least=3)
    waits |= run.ask("b again")
    assert [len(one.result(PATIENCE)[1]) for one in waits.values()] == [3, 3, 3]


@pytest.mark.parametrize("waits", [False, True])
def test_who_was_taken_for_dead_comes_again(run: Run, waits: bool) -> None:
    """A process that was stopped keeps its number, in a quorum or while it waits for one."""
    for name in "abc":
        run.enter(name, sites=4, at_least=3)
    run.meet("a", "b", "c")
    asked = run.ask("c") if waits else {}
    while waits and "c" not in run.waiting():
        pass
    stopped = run.places["c"]._mine
    for name in "ab":
        run.places[name]._gone[stopped.process] = stopped.asked
    asked |= run.ask("a", "b") if waits else run.ask("a", "b", "c")
    assert [len(one.result(PATIENCE)[1]) for one in asked.values()] == [3, 3, 3]


def test_too_few_wait_for_others_and_then_say_how_many_are_needed(run: Run) -> None:
    run.enter("a", at_least=2)
    said = r"1 of 3 sites are here \(a\), and 2 are needed after 0.5 s. Start the sites that are missing"
    with pytest.raises(loco.TransportError, match=said):
        run.ask("a", patience=0.5)["a"].result(PATIENCE)
    # It has withdrawn: nobody else counts on it.
    run.enter("b", at_least=2)
    with pytest.raises(loco.TransportError, match=r"1 of 3 sites are here \(b\)"):
        run.ask("b", patience=0.5)["b"].result(PATIENCE)


def test_who_waits_for_one_that_lives_says_for_whom(run: Run) -> None:
    run.enter("a", at_least=2)
    run.enter("b", at_least=2)
    run.meet("a", "b")
    with pytest.raises(loco.TransportError, match=r"b, alive and not here yet after 0.5 s"):
        run.ask("a", patience=0.5)["a"].result(PATIENCE)


def test_a_site_of_other_terms_is_refused_and_a_run_that_is_on_hears_nothing_of_it(run: Run) -> None:
    run.enter("a", at_least=2)
    run.enter("b", at_least=2)
    run.meet("a", "b")
    terms: list[tuple[dict[str, Any], str]] = [
        ({"at_least": 1}, "with at least 2 sites, site x with 1: .*LOCO_AT_LEAST"),
        ({"sites": 4, "at_least": 2}, "expects 3 sites, site x 4"),
        ({"at_least": 3}, "a, b train with each other already, and x is none of them"),
    ]
    for number, (options, said) in enumerate(terms):
        run.enter(f"x {number}", **options)
        refused = run.ask(f"x {number}")[f"x {number}"]
        run.meet("a", "b")
        with pytest.raises(loco.AgreementError, match=said):
            refused.result(PATIENCE)
    run.meet("a", "b")


def test_a_second_process_of_a_name_is_refused_however_often_the_first_one_asks(run: Run) -> None:
    run.enter("a")
    run.meet("a")
    run.enter("a again")
    refused = run.ask("a again")["a again"]
    stop = threading.Event()
    while not refused.done():
        run.meet("a")
        stop.wait(0.05)
    with pytest.raises(loco.AgreementError, match=r"site a is here already, in process a, and is alive"):
        refused.result()


@pytest.mark.parametrize(("other", "said"), [(None, "same key or none"), (KEY[::-1], "was not written by")])
def test_without_the_key_nobody_gets_in(run: Run, other: bytes | None, said: str) -> None:
    run.enter("a", key=KEY)
    run.meet("a")
    run.enter("x", key=other)
    with pytest.raises(loco.LocoError, match=said):
        run.ask("x")["x"].result(PATIENCE)
    run.meet("a")


def test_a_store_that_was_started_again_still_waits_for_all_who_live(run: Run) -> None:
    for name in "ab":
        run.enter(name, at_least=2)
    run.meet("a", "b")
    for place in run.places.values():
        place._mine = replace(place._mine, at_least=1)  # so that nothing but the memory of b holds up a
    run.restart()
    waits = run.ask("a")["a"]
    with pytest.raises(TimeoutError):
        waits.result(2 * DEAD_AFTER)
    run.ask("b")["b"].result(PATIENCE)
    assert [one.site for one in waits.result(PATIENCE)[1]] == ["a", "b"]
