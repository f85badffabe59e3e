"""The controller decides how many prompts may be leased, which samples a trainer gets, and which are too old.

With max_staleness = η, the prompts that are leased or answered but not yet used never exceed what the
trainers need for this round and the next η. So a sample is begun at most η versions before it is used:
workers that run ahead wait, and so do trainers that run ahead. A sample that is too old all the same, because
its worker was slow, is dropped and its prompt is asked again. With η = 0 training and sampling take turns.

All state is in memory. If the controller is lost, its samples are lost too; its successor learns from the
trainers how far the run is.
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

_UNPUBLISHED = 10.0  # seconds that a trainer waits for another site to publish the current version


class Controller:
    """An asynchronous actor: a method that waits does not block the others."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._version = self._published = 0  # of the trainers, and the newest in the store; 0: none yet
        self._taken = self._taken_before = 0  # groups given to trainers: so far, and before this version
        self._tickets = 0  # handed out so far
        self._again: list[int] = []  # tickets of lost workers, to be handed out again
        self._out: dict[str, Lease] = {}  # current lease of each worker
        self._ready: list[tuple[int, int, Parcel]] = []  # a heap, by ticket and lease
        self._turns: dict[str, object] = {}  # the latest `take` of each trainer
        self._notes = Notes()
        self._ended = False

    # ---- workers ----

    async def lease(self, worker: str) -> Lease | None:
        """Prompts for a worker, as soon as more may be leased; None when the run has ended."""
        async with self._changed:
            if worker in self._out:  # it was restarted and has lost its lease
                lost = self._out.pop(worker)
                self._again += lost.tickets
                self._notes.counts["prompts of lost workers"] += len(lost.tickets)
                self._notes.said.append(f"{worker} was lost with {len(lost.tickets)} prompts, and is back")
            await self._changed.wait_for(lambda: self._ended or self._room() > 0)
            if self._ended:
                return None
            count = min(self._config.lease, self._room())
            ahead = self._taken - self._taken_before + self._waiting() + count - 1
            used = self._version + ahead // self._config.quota  # version that will use the last of them
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
                return  # the lease counts as lost and has been handed out again
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
        """Prompts that are leased, and groups that no trainer has taken yet."""
        return len(self._ready) + sum(len(lease.tickets) for lease in self._out.values())

    # ---- trainers ----

    async def take(self, trainer: str, version: int, count: int) -> list[bytes] | None:
        """`count` groups for a trainer whose round began with this version. None: the version is still not
        published after a while, and without it no more samples may be begun."""
        batch: list[tuple[int, int, Parcel]] = []
        until = time.monotonic() + _UNPUBLISHED
        async with self._changed:
            self._learn(version)
            turn = self._turns[trainer] = object()
            while len(batch) < count:
                lost = self._turns[trainer] is not turn  # the trainer was restarted and has asked again
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
        """Wait for a change, but wake up now and then to check the time limit."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _UNPUBLISHED / 10)

    async def published(self, version: int) -> None:
        async with self._changed:
            self._published = max(self._published, version)
            self._learn(version)
            self._changed.notify_all()

    def _learn(self, version: int) -> None:
        """Note the trainers' version; a restarted controller learns here how far the run is."""
        if version > self._version:
            used = (version - 1) * self._config.quota
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

    async def end(self) -> None:
        """No more prompts."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()
