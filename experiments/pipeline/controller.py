"""The controller decides how many prompts may be leased, which samples a trainer gets, and which are too old.

With max_staleness = η, the prompts that are leased or answered but not yet used never exceed what the
trainers need for this round and the next η. So workers that are ahead wait, and so do trainers that are.
A sample is to be used η versions after it was begun at the latest: in each round, room is kept for samples of
that age that are still under way, and trainers wait for them rather than leave out what takes long. A sample
that is too old all the same, because a part was lost, is dropped and its prompt is asked again.

With η = 0 training and sampling take turns, and each trainer gets the samples of its own tickets: what is
learned depends on nothing but the seed, as far as sampling does.

All state is in memory. If the controller is lost, its samples are lost too; its successor learns from the
trainers how far the run is.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Notes
from experiments.pipeline.samples import Lease, Parcel, UsedTickets

_UNPUBLISHED = 10.0  # seconds that a trainer waits for another site to publish the current version
_Aged = tuple[int, int, Parcel]  # by its oldest version and its ticket


@dataclass
class _Holder:
    """A worker's process, and what it has been given."""

    life: str
    tickets: dict[int, int | None] = field(default_factory=dict)  # and by which version they were begun
    evaluates: int | None = None  # a version


class Controller:
    """An asynchronous actor: a method that waits does not block the others."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._version = self._published = 0  # of the trainers, and the newest in the store; 0: none yet
        self._taken = self._taken_before = 0  # groups given to trainers: so far, and before this version
        self._tickets = 0  # handed out so far
        self._again: deque[int] = deque()  # tickets to be handed out again
        self._out: dict[str, _Holder] = {}  # by worker
        self._ready: list[_Aged] = []  # a heap
        self._used = UsedTickets()
        self._at: dict[int, int] = {}  # each trainer's version
        self._lacking: dict[int, int] = {}  # groups that trainers wait for, by trainer
        self._parts: set[tuple[int, int]] = set()  # of versions, that have been published
        self._turns: dict[int, object] = {}  # the latest `take` of each trainer
        self._to_evaluate: deque[int] = deque()  # versions
        self._seen = self._evaluated = 0  # newest version that was considered, and that was put there
        self._notes = Notes()
        self._ended = False

    # ---- workers ----

    async def lease(self, worker: str, life: str, count: int) -> Lease | None:
        """At most so many prompts for a worker, as soon as more may be leased, or a version to be scored.
        None: the run has ended.

        Args:
            life: of the worker's process; with another one it has lost all that it was given.
        """
        async with self._changed:
            holder = self._holder(worker, life)

            def is_to_evaluate() -> bool:
                return bool(self._to_evaluate) and holder.evaluates is None

            def may_go_on() -> bool:
                return self._ended or is_to_evaluate() or self._room() > 0

            await self._changed.wait_for(lambda: may_go_on() or self._out[worker] is not holder)
            if self._out[worker] is not holder:
                return None  # nobody hears it
            if is_to_evaluate():
                holder.evaluates = self._to_evaluate.popleft()
                return Lease(evaluate=holder.evaluates)
            if self._ended:
                return None
            count = min(count, self._room())
            ahead = self._taken - self._taken_before + self._waiting() + count - 1
            used = self._version + ahead // self._config.quota  # version that will use the last of them
            tickets = [self._again.popleft() for _ in range(min(count, len(self._again)))]
            fresh = count - len(tickets)
            tickets += range(self._tickets, self._tickets + fresh)
            self._tickets += fresh
            holder.tickets |= dict.fromkeys(tickets)
            return Lease(tickets=tickets, version=max(1, used - self._config.max_staleness))

    def _holder(self, worker: str, life: str) -> _Holder:
        found = self._out.get(worker)
        if found is not None and found.life == life:
            return found
        if found is not None:  # its process was lost
            self._again += sorted(found.tickets)
            if found.evaluates is not None:
                self._to_evaluate.appendleft(found.evaluates)
            self._notes.counts["prompts of lost workers"] += len(found.tickets)
            self._notes.said.append(f"{worker} was lost with {len(found.tickets)} prompts, and is back")
            self._changed.notify_all()
        holder = self._out[worker] = _Holder(life)
        return holder

    def _of(self, worker: str, life: str) -> _Holder:
        """An empty one, if its tickets count as lost and have been handed out again."""
        holder = self._out.get(worker)
        return holder if holder is not None and holder.life == life else _Holder(life)

    async def began(self, worker: str, life: str, tickets: Sequence[int], version: int) -> None:
        """The worker has begun to answer these."""
        holder = self._of(worker, life)
        for ticket in tickets:
            if ticket in holder.tickets:
                holder.tickets[ticket] = version

    async def give(self, worker: str, life: str, parcels: list[Parcel]) -> None:
        async with self._changed:
            holder = self._of(worker, life)
            for one in parcels:
                if one.ticket not in holder.tickets:
                    continue
                del holder.tickets[one.ticket]
                heapq.heappush(self._ready, (one.oldest, one.ticket, one))
                self._notes.counts["groups"] += 1
                self._notes.counts["tokens"] += one.tokens
                self._notes.counts["sample bytes"] += len(one.group)
                self._notes.counts["reward of groups, in thousandths"] += round(1000 * one.reward)
            self._changed.notify_all()

    async def scored(self, worker: str, life: str, version: int) -> None:
        """Of this version. Older ones that are still to be scored are left out: no worker has them."""
        async with self._changed:
            self._of(worker, life).evaluates = None
            self._to_evaluate = deque(one for one in self._to_evaluate if one > version)
            self._changed.notify_all()

    def _room(self) -> int:
        config = self._config
        most = self._taken_before + (1 + config.max_staleness) * config.quota
        last = config.rounds * config.quota
        waiting = self._waiting()
        room = (min(most, last) if self._version > 0 else 0) - self._taken - waiting
        # What was lost is not in that: a trainer that returns, or one behind, takes more than its share.
        return max(room, sum(self._lacking.values()) - waiting)

    def _waiting(self) -> int:
        """Prompts that are leased, and groups that no trainer has taken yet."""
        return len(self._ready) + sum(len(holder.tickets) for holder in self._out.values())

    # ---- trainers ----

    async def take(self, trainer: int, version: int, step: int, count: int) -> list[bytes] | None:
        """`count` groups for step 0, 1, … of a trainer's round that began with this version. None: the
        version is still not published after a while, and without it no more samples may be begun."""
        async with self._changed:
            self._learn(version)
            self._at[trainer] = version
            turn = self._turns[trainer] = object()
            own = self._own_tickets(trainer, version, step, count)
            try:
                batch = await self._gather(trainer, version, own, count)
            finally:
                if self._turns[trainer] is turn:
                    self._lacking.pop(trainer, None)
                self._changed.notify_all()
            if batch is None:
                return None
            self._used.add((ticket for _, ticket, _ in batch), version)
        return [parcel.group for *_, parcel in sorted(batch, key=lambda one: one[1])]

    async def _gather(self, trainer: int, version: int, own: set[int], count: int) -> list[_Aged] | None:
        batch: list[_Aged] = []
        turn, until = self._turns[trainer], time.monotonic() + _UNPUBLISHED
        while len(batch) < count:
            lost = self._turns[trainer] is not turn  # the trainer was restarted and has asked again
            if lost or (not self._ready and version > self._published and time.monotonic() >= until):
                for one in batch:
                    heapq.heappush(self._ready, one)
                self._taken -= len(batch) if version == self._version else 0
                return None
            found = self._next(version, own - {ticket for _, ticket, _ in batch})
            if found is None:
                await self._some_time(trainer, count - len(batch))
                continue
            # Where rounds overlap, others are ahead. All of an earlier round counts as taken.
            self._taken += version == self._version
            batch.append(found)
        return batch

    def _next(self, version: int, own: set[int]) -> _Aged | None:
        """What a trainer may have now."""
        self._drop_old(version)
        if own and self._will_come(own):
            mine = [one for one in self._ready if one[1] in own]
            if mine:
                self._ready.remove(mine[0])
                heapq.heapify(self._ready)
            return mine[0] if mine else None
        if not self._ready:
            return None
        oldest_allowed = version - self._config.max_staleness
        to_wait_for = [
            begun
            for holder in self._out.values()
            for begun in holder.tickets.values()
            if begun is not None and begun <= oldest_allowed
        ]
        left = self._taken_before + self._config.quota - self._taken  # of this round
        if left <= len(to_wait_for) and self._ready[0][0] > oldest_allowed:
            return None
        return heapq.heappop(self._ready)

    def _own_tickets(self, trainer: int, version: int, step: int, count: int) -> set[int]:
        """Without staleness, those of this trainer's step."""
        if self._config.max_staleness:
            return set()
        first = (version - 1) * self._config.quota + (step * self._config.trainers + trainer) * count
        return set(range(first, first + count))

    def _will_come(self, tickets: set[int]) -> bool:
        """False if some were used, or dropped, because a part was lost."""
        there = {ticket for _, ticket, _ in self._ready} | set(self._again)
        there = there.union(*(holder.tickets for holder in self._out.values()))
        return all(ticket in there or ticket >= self._tickets for ticket in tickets)

    def _drop_old(self, version: int) -> None:
        too_old = [one for oldest, _, one in self._ready if version - oldest > self._config.max_staleness]
        if not too_old:
            return
        self._ready = [one for one in self._ready if one[-1] not in too_old]
        heapq.heapify(self._ready)
        for one in too_old:
            self._notes.counts["groups dropped, too old"] += 1
            self._notes.counts["tokens dropped, too old"] += one.tokens
        # Without staleness each round has tickets of its own.
        first = 0 if self._config.max_staleness else (version - 1) * self._config.quota
        self._again += sorted(one.ticket for one in too_old if one.ticket >= first)
        self._changed.notify_all()

    async def _some_time(self, trainer: int, lacking: int) -> None:
        """Wait for a change, but wake up now and then to check the time limit."""
        if self._lacking.get(trainer) != lacking:
            self._lacking[trainer] = lacking
            self._changed.notify_all()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _UNPUBLISHED / 10)

    async def published(self, version: int, part: int = 0, parts: int = 1) -> None:
        """This version is in the store, or this part of it: it is there when all of them are."""
        async with self._changed:
            self._learn(version)
            self._parts = {key for key in self._parts if key[0] >= version} | {(version, part)}
            if not self._parts.issuperset((version, k) for k in range(parts)):
                return
            every = self._config.eval_every
            due = [
                one
                for one in range(self._seen + 1, version + 1)
                if (one - 1) * self._config.sync_every % every == 0
            ]
            self._to_evaluate += due
            self._evaluated = max([self._evaluated, *due])
            self._published, self._seen = max(self._published, version), max(self._seen, version)
            self._changed.notify_all()

    async def used(self, trainer: int, version: int) -> dict[str, Any]:
        """The tickets that rounds before this version have used, for `resume`. Where rounds overlap, trainers
        that are still in the round before are waited for, but not long: they may be lost."""
        async with self._changed:
            self._learn(version)
            self._at[trainer] = version
            self._changed.notify_all()
            limit = 0.0 if self._config.overlap is None else _UNPUBLISHED / 5
            all_there = self._changed.wait_for(lambda: min(self._at.values()) >= version)
            with suppress(TimeoutError):
                await asyncio.wait_for(all_there, limit)
            return self._used.before(version)

    async def resume(self, version: int, used: dict[str, Any]) -> None:
        """The run goes on with this version. Tickets below the highest that were not used are asked again."""
        async with self._changed:
            saved, known = UsedTickets(**used), self._version
            self._learn(version)
            if version > known and not any(holder.tickets for holder in self._out.values()):
                self._used, self._again = saved, deque(saved.unused())
                self._tickets = max(self._tickets, saved.end)
            elif version == known:  # another trainer may have seen more of them taken
                self._again = deque(ticket for ticket in self._again if ticket not in saved)

    def _learn(self, version: int) -> None:
        """Note the trainers' version; a restarted controller learns here how far the run is."""
        if version > self._version:
            used = (version - 1) * self._config.quota
            if not self._version:
                self._seen, self._used = version - 1, UsedTickets(used)
            self._version, self._taken = version, max(self._taken, used)
            self._tickets, self._taken_before = max(self._tickets, used), self._taken
            self._changed.notify_all()

    async def newer(self, version: int, wait: float) -> int:
        """The newest version in the store, as soon as it is newer than `version`, or after `wait` seconds."""
        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._published > version), wait)
            return self._published

    async def version(self) -> int:
        return self._version

    # ---- what happened ----

    async def note(self, notes: Notes) -> None:
        self._notes.add(notes)

    async def look(self) -> dict[str, Any]:
        """The state of the run, and what was noted since the last look."""
        notes, self._notes = self._notes, Notes()
        return {
            "version": self._version,
            "taken": self._taken,
            "ready": len(self._ready),
            "out": sum(len(lease.tickets) for lease in self._out.values()),
            "notes": notes,
        }

    async def finish(self) -> None:
        """Training is done: score the last version, and hand out no more prompts."""
        async with self._changed:
            if self._evaluated < self._published:
                self._evaluated = self._published
                self._to_evaluate.append(self._published)
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: not self._to_evaluate and all(one.evaluates is None for one in self._out.values())
            )
            self._ended = True
            self._changed.notify_all()
