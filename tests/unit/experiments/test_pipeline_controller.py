"""Who may have which prompts and samples, and when; without Ray."""

import asyncio
import json

import pytest
from pipeline_parts import config_of

from experiments.pipeline.controller import Controller
from experiments.pipeline.samples import Lease, Parcel

LIFE = "a first process"


async def leased(
    controller: Controller, worker: str, *, life: str = LIFE, count: int = 4
) -> list[int] | None:
    """The tickets of a lease; None if the worker would have to wait."""
    while True:
        try:
            lease = await asyncio.wait_for(controller.lease(worker, life, count), 0.05)
        except TimeoutError:
            return None
        if lease is None or lease.evaluate is None:
            return [] if lease is None else list(lease.tickets)
        await controller.scored(worker, life, lease.evaluate)


async def given(controller: Controller, worker: str, tickets: list[int], version: int) -> None:
    parcels = [Parcel(t, oldest=version, tokens=3, reward=1.0, group=bytes([t])) for t in tickets]
    await controller.give(worker, LIFE, parcels)


async def answered(controller: Controller, worker: str, version: int) -> list[int] | None:
    tickets = await leased(controller, worker)
    if tickets:
        await given(controller, worker, tickets, version)
    return tickets


async def taken(
    controller: Controller, version: int, count: int = 2, *, trainer: int = 0, step: int = 0
) -> list[int] | None:
    try:
        found = await asyncio.wait_for(controller.take(trainer, version, step, count), 0.05)
    except TimeoutError:
        return None
    return None if found is None else [group[0] for group in found]


def test_without_staleness_training_and_sampling_take_turns() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        assert await answered(controller, "a", 1) is None  # nothing is published
        await controller.published(1)
        assert await answered(controller, "a", 1) == [0, 1, 2, 3]
        assert await answered(controller, "b", 1) == [4, 5, 6, 7]
        assert await answered(controller, "a", 1) is None
        # Each trainer has its own, whoever comes first: two of them, and rounds of two steps.
        assert [await taken(controller, 1, trainer=k) for k in (1, 0, 0, 1)] == [
            [2, 3],
            [0, 1],
            [4, 5],
            [6, 7],
        ]
        assert await answered(controller, "a", 1) is None  # the round is not done
        assert await taken(controller, 1) is None
        await controller.published(2)
        assert await answered(controller, "a", 2) == [8, 9, 10, 11]

    asyncio.run(play())


async def all_leases(controller: Controller, workers: str) -> list[Lease | None]:
    """Of six prompts each."""
    found = []
    for worker in workers:
        lease = await controller.lease(worker, LIFE, 6)
        while lease is not None and lease.evaluate is not None:
            await controller.scored(worker, LIFE, lease.evaluate)
            lease = await controller.lease(worker, LIFE, 6)
        found.append(lease)
    return found


def test_a_lease_says_which_weights_will_not_be_too_old() -> None:
    """Weights of version v may answer what rounds v … v + max_staleness learn from."""

    async def play() -> None:
        controller = Controller(config_of("max_staleness=1", "lease=6"))
        await controller.published(1)
        leases = await all_leases(controller, "abc")
        assert [(one.tickets[-1], one.version) for one in leases if one] == [(5, 1), (11, 1), (15, 1)]
        controller = Controller(config_of("max_staleness=0", "lease=6"))
        await controller.published(3)
        leases = await all_leases(controller, "ab")
        assert [(one.tickets[-1], one.version) for one in leases if one] == [(21, 3), (23, 3)]
        controller = Controller(config_of("max_staleness=1", "lease=6"))
        await controller.published(2)
        leases = await all_leases(controller, "abc")
        assert [(one.tickets[-1], one.version) for one in leases if one] == [(13, 1), (19, 2), (23, 2)]

    asyncio.run(play())


def test_a_version_is_there_when_all_of_its_parts_are() -> None:
    async def play() -> None:
        controller = Controller(config_of())
        await controller.published(1)
        await controller.published(2, 1, 2)
        await controller.published(2, 1, 2)
        assert await controller.newer(0, 0.0) == 1
        await controller.published(3, 0, 2)
        assert await controller.newer(0, 0.0) == 1
        await controller.published(3, 1, 2)
        assert await controller.newer(0, 0.0) == 3

    asyncio.run(play())


def test_workers_are_ahead_by_so_many_versions_and_never_behind_the_end() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=2"))
        await controller.published(1)
        for _ in range(6):
            assert await answered(controller, "a", 1)
        assert await answered(controller, "a", 1) is None  # 24 = 3 rounds
        for version in (1, 2, 3):
            await controller.published(version)
            for _ in range(4):
                assert await taken(controller, version)
        await controller.published(4)
        assert await answered(controller, "a", 4)
        assert await answered(controller, "a", 4)
        assert await answered(controller, "a", 4) is None  # all 32 are there

    asyncio.run(play())


def test_what_is_too_old_is_dropped_and_asked_for_anew() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        await controller.published(1)
        await answered(controller, "a", 1)
        await answered(controller, "a", 0)  # a version that the worker should not have had
        assert [await taken(controller, 1, trainer=k) for k in (0, 1)] == [[0, 1], [2, 3]]
        assert await taken(controller, 1, step=1) is None
        assert await answered(controller, "b", 1) == [4, 5, 6, 7]
        assert await taken(controller, 1, step=1) == [4, 5]
        counts = (await controller.look())["notes"].counts
        assert counts["groups dropped, too old"] == 4
        assert counts["tokens dropped, too old"] == 12

    asyncio.run(play())


def test_a_round_waits_for_what_would_be_too_old_in_the_next_one() -> None:
    """Answers that take long are not left out."""

    async def play() -> None:
        controller = Controller(config_of("max_staleness=1"))
        await controller.published(1)
        slow = await leased(controller, "slow", count=2)
        assert slow is not None
        await controller.began("slow", LIFE, slow, 1)
        for _ in range(3):
            assert await answered(controller, "a", 1)
        for _ in range(4):
            assert await taken(controller, 1)  # round 1 may do without them
        await controller.published(2)
        for _ in range(2):
            assert await answered(controller, "a", 2)
        assert [await taken(controller, 2) for _ in range(2)] == [[10, 11], [12, 13]]  # of version 1
        assert await taken(controller, 2) == [14, 15]
        assert await taken(controller, 2) is None  # two are left of the round
        await given(controller, "slow", slow, 1)
        assert await taken(controller, 2) == [0, 1]
        await controller.published(3)
        assert await taken(controller, 3) == [16, 17]
        assert "groups dropped, too old" not in (await controller.look())["notes"].counts

    asyncio.run(play())


def test_what_a_lost_worker_had_is_given_to_the_next_one_and_counts_once() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        await controller.published(1)
        before = await leased(controller, "a")
        assert before is not None
        assert await leased(controller, "b") == [4, 5, 6, 7]
        assert await leased(controller, "c") is None
        assert await leased(controller, "a") is None  # it may go on asking
        assert await leased(controller, "a", life="a second process") == before
        await given(controller, "a", before, 1)  # from before it was lost
        assert await taken(controller, 1) is None

    asyncio.run(play())


async def to_evaluate(controller: Controller, worker: str, life: str = LIFE) -> int | None:
    lease = await controller.lease(worker, life, 1)
    assert lease is not None
    return lease.evaluate


def test_versions_are_scored_when_it_is_time_and_again_when_their_worker_is_lost() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=2", "steps=8", "eval_every=4"))  # every second round
        await controller.published(1)
        assert await to_evaluate(controller, "a") == 1
        await controller.published(3)  # 2 was never in the store
        assert await to_evaluate(controller, "a") is None  # it has one
        assert await to_evaluate(controller, "b") == 3
        assert await to_evaluate(controller, "a", "a second process") == 1
        await controller.scored("a", LIFE, 1)  # by the one that was lost
        await controller.published(4)
        finishing = asyncio.create_task(controller.finish())
        await controller.scored("a", "a second process", 1)
        await asyncio.sleep(0.01)
        assert await to_evaluate(controller, "a", "a second process") == 4  # the last one in any case
        await controller.scored("a", "a second process", 4)
        await asyncio.sleep(0.01)
        assert not finishing.done()
        await controller.scored("b", LIFE, 3)
        await asyncio.wait_for(finishing, 1)

    asyncio.run(play())


def test_a_controller_that_was_lost_learns_from_a_trainer_where_it_is() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        assert await taken(controller, 3) is None
        assert await answered(controller, "a", 3) == [16, 17, 18, 19]
        assert await taken(controller, 3) == [16, 17]

    asyncio.run(play())


def test_a_trainer_that_is_behind_gets_the_samples_of_its_last_steps() -> None:
    """Rounds overlap, and a group is lost: the other one has saved its last round, so all counts as taken."""

    async def play() -> None:
        controller = Controller(config_of("max_staleness=1", "overlap=1"))
        await controller.published(4)
        for _ in range(2):
            assert await answered(controller, "a", 4)
        assert [await taken(controller, 4, trainer=0) for _ in range(2)] == [[24, 25], [26, 27]]
        assert await taken(controller, 4, trainer=1) == [28, 29]
        used = asyncio.ensure_future(controller.used(0, 5))
        await asyncio.sleep(0)
        controller._ready.clear()  # what was there for its last step is lost
        waiting = asyncio.ensure_future(controller.take(1, 4, 1, 2))
        await asyncio.sleep(0.01)
        tickets = await answered(controller, "b", 4)
        assert tickets is not None
        assert len(tickets) == 2
        assert await waiting == [bytes([ticket]) for ticket in tickets]
        assert not used.done()  # it waits for the other one to come as far
        assert (await controller.used(1, 5))["beyond"] == tickets
        assert (await used)["all_below"] == 30

    asyncio.run(play())


def test_a_controller_that_takes_over_in_the_middle_counts_what_was_used_before() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=1"))
        await controller.published(3)
        assert await answered(controller, "a", 3)
        assert await taken(controller, 3) == [16, 17]
        assert await controller.used(0, 4) == {"all_below": 18, "beyond": []}

    asyncio.run(play())


def test_a_run_that_goes_on_asks_what_was_not_used_and_scores_what_is_new() -> None:
    async def play() -> None:
        before = Controller(config_of("max_staleness=1", "eval_every=2"))  # each round
        await before.published(1)
        assert await leased(before, "slow", count=2) == [0, 1]
        for _ in range(3):
            assert await answered(before, "a", 1)
        found = [await taken(before, 1) for _ in range(4)]
        assert found == [[2, 3], [4, 5], [6, 7], [8, 9]]
        used = await before.used(0, 2)
        assert [await taken(before, 2) for _ in range(2)] == [[10, 11], [12, 13]]  # are lost with the run
        assert await before.used(1, 2) == used
        again = Controller(config_of("max_staleness=1", "eval_every=2"))
        for _ in range(2):  # by each site
            await again.resume(2, json.loads(json.dumps(used)))
        await again.published(2)
        lease = await again.lease("a", LIFE, 4)
        assert lease is not None
        assert lease.evaluate == 2
        await again.scored("a", LIFE, 2)
        assert [await leased(again, "a"), await leased(again, "a")] == [[0, 1, 10, 11], [12, 13, 14, 15]]

    asyncio.run(play())


def test_a_worker_that_waits_is_told_of_the_end() -> None:
    async def play() -> None:
        controller = Controller(config_of())
        waiting = asyncio.create_task(controller.lease("a", LIFE, 4))
        await asyncio.sleep(0)
        await controller.finish()
        assert await waiting is None

    asyncio.run(play())


def test_a_version_that_nobody_publishes_is_asked_for_of_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.pipeline.controller._UNPUBLISHED", 0.02)

    async def play() -> None:
        controller = Controller(config_of("max_staleness=1"))
        await controller.published(1)
        with pytest.raises(TimeoutError):  # others are sampling, it waits
            await asyncio.wait_for(controller.take(0, 1, 0, 1), 0.1)
        assert await controller.take(0, 2, 0, 1) is None
        await answered(controller, "a", 1)
        assert await controller.take(0, 2, 0, 5) is None
        assert await controller.take(0, 2, 0, 4) == [bytes([k]) for k in range(8, 12)]  # none is lost
        await controller.published(2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(controller.take(0, 2, 0, 1), 0.1)

    asyncio.run(play())


def test_what_a_lost_trainer_asked_for_is_not_given_to_nobody() -> None:
    async def play() -> None:
        controller = Controller(config_of("max_staleness=0"))
        await controller.published(1)
        lost = asyncio.create_task(controller.take(0, 1, 0, 8))
        await asyncio.sleep(0)
        assert await answered(controller, "a", 1) == [0, 1, 2, 3]
        await asyncio.sleep(0.01)  # four of eight are in its hands
        back = asyncio.create_task(controller.take(0, 1, 0, 8))
        assert await answered(controller, "a", 1) == [4, 5, 6, 7]
        assert await asyncio.wait_for(lost, 2) is None
        assert await asyncio.wait_for(back, 2) == [bytes([k]) for k in range(8)]
        assert await answered(controller, "a", 1) is None  # the round has all that it may

    asyncio.run(play())


def test_a_worker_hears_of_a_version_when_it_is_published() -> None:
    async def play() -> None:
        controller = Controller(config_of())
        assert await controller.newer(0, 0.01) == 0
        asked = asyncio.create_task(controller.newer(0, 60.0))
        await asyncio.sleep(0.01)
        await controller.published(1)
        assert await asyncio.wait_for(asked, 1.0) == 1
        assert await controller.newer(0, 60.0) == 1

    asyncio.run(play())
