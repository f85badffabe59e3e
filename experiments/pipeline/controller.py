"""Who owns the plan: how many prompts may be out, which samples a trainer gets, and which are too old.

With max_staleness = η, as many prompts may be out or waiting as the trainers need in this round and η more.
So a sample is begun at most η versions before it is used: workers that are ahead wait, and so do trainers
that are. What comes too late all the same, from a worker that was slow, is dropped and asked for anew. With
η = 0 training and sampling take turns.

Everything here is in memory. When the controller is lost, so are the samples that it has, and what it was
told of the run; the one that takes its place learns from the trainers where they are.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from contextlib import suppress
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Notes
from experiments.pipeline.samples import Lease, Parcel

_UNPUBLISHED = 10.0  # seconds that a trainer waits for somebody else to publish the version it has


class Controller:
    """An asynchronous actor: its methods take turns, and wait without holding up each other."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._version = self._published = 0  # of the trainers, and in the store; 0: none
        self._taken = self._taken_before = 0  # groups that trainers have; when the version was published
        self._tickets = 0  # given so far
        self._again: list[int] = []  # tickets of workers that were lost
        self._out: dict[str, Lease] = {}  # by worker
        self._ready: list[tuple[int, int, Parcel]] = []  # a heap, by ticket and lease
        self._turns: dict[str, object] = {}  # by trainer: its latest question
        self._notes = Notes()
        self._ended = False

    # ---- workers ----

    async def lease(self, worker: str) -> Lease | None:
        """Prompts for a worker, once there may be more out; None when the run has ended."""
        async with self._changed:
            if worker in self._out:  # it was lost with what it had, and is back
                lost = self._out.pop(worker)
                self._again += lost.tickets
                self._notes.counts["prompts of lost workers"] += len(lost.tickets)
                self._notes.said.append(f"{worker} was lost with {len(lost.tickets)} prompts, and is back")
            await self._changed.wait_for(lambda: self._ended or self._room() > 0)
            if self._ended:
                return None
            count = min(self._config.lease, self._room())
            ahead = self._taken - self._taken_before + self._waiting() + count - 1
            used = self._version + ahead // self._config.quota  # the last of them, if all are used in turn
            tickets, self._again = self._again[:count], self._again[count:]
            fresh = count - len(tickets)
            tickets += range(self._tickets, self._tickets + fresh)
            self._tickets += fresh
            lease = Lease(time.time_ns(), tickets, max(1, used - self._config.max_staleness))
            self._out[worker] = lease
            return lease

    async def give(self, worker: str, lease: Lease, parcels: list[Parcel]) -> None:
        async with self._changed:
            if self._out.get(worker) != lease:
                return  # it counts as lost, and others answer
            del self._out[worker]
            for one in parcels:
                heapq.heappush(self._ready, (one.ticket, lease.number, one))
                self._notes.counts["groups"] += 1
                self._notes.counts["tokens"] += one.tokens
                self._notes.counts["sample bytes"] += len(one.group)
                self._notes.counts["reward of groups, in thousandths"] += round(1000 * one.reward)
            self._changed.notify_all()

    def _room(self) -> int:
        config = self._config
        most = self._taken_before + (1 + config.max_staleness) * config.quota
        last = config.rounds * config.quota
        return (min(most, last) if self._version > 0 else 0) - self._taken - self._waiting()

    def _waiting(self) -> int:
        """Prompts that are out, and groups that no trainer has taken yet."""
        return len(self._ready) + sum(len(lease.tickets) for lease in self._out.values())

    # ---- trainers ----

    async def take(self, trainer: str, version: int, count: int) -> list[bytes] | None:
        """So many groups, for a trainer whose round began with this version. None: nobody has published that
        version for a while, and without it there may be no more."""
        batch: list[tuple[int, int, Parcel]] = []
        until = time.monotonic() + _UNPUBLISHED
        async with self._changed:
            self._learn(version)
            turn = self._turns[trainer] = object()
            while len(batch) < count:
                lost = self._turns[trainer] is not turn  # who asked for this was lost, and asks anew
                if lost or (not self._ready and version > self._published and time.monotonic() >= until):
                    for one in batch:
                        heapq.heappush(self._ready, one)
                    self._taken -= len(batch)
                    self._changed.notify_all()
                    return None
                if not self._ready:
                    await self._some_time()
                    continue
                found = heapq.heappop(self._ready)
                parcel = found[-1]
                if version - parcel.oldest > self._config.max_staleness:
                    self._notes.counts["groups dropped, too old"] += 1
                    self._notes.counts["tokens dropped, too old"] += parcel.tokens
                    self._changed.notify_all()
                    continue
                self._taken += 1
                batch.append(found)
            self._changed.notify_all()
        return [parcel.group for *_, parcel in batch]

    async def _some_time(self) -> None:
        """Until something changes, or for long enough to look at the clock."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _UNPUBLISHED / 10)

    async def published(self, version: int) -> None:
        async with self._changed:
            self._published = max(self._published, version)
            self._learn(version)
            self._changed.notify_all()

    def _learn(self, version: int) -> None:
        """Where the trainers are; a controller that was started again learns so how far the run is."""
        if version > self._version:
            used = (version - 1) * self._config.quota
            self._version, self._taken = version, max(self._taken, used)
            self._tickets, self._taken_before = max(self._tickets, used), self._taken
            self._changed.notify_all()

    async def newer(self, version: int, wait: float) -> int:
        """The newest version in the store, once it is newer than this one or so many seconds have passed."""
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
        """Where the run is, and what was noted since the last look."""
        notes, self._notes = self._notes, Notes()
        return {
            "version": self._version,
            "taken": self._taken,
            "ready": len(self._ready),
            "out": sum(len(lease.tickets) for lease in self._out.values()),
            "notes": notes,
        }

    async def end(self) -> None:
        """No more prompts."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()
