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
from collections import Counter
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.samples import Lease, Parcel


class Controller:
    """An asynchronous actor: its methods take turns, and wait without holding up each other."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._version = 0  # that is published; 0: none
        self._taken = self._taken_before = 0  # groups that trainers have; when the version was published
        self._tickets = 0  # given so far
        self._again: list[int] = []  # tickets of workers that were lost
        self._out: dict[str, Lease] = {}  # by worker
        self._ready: list[tuple[int, int, Parcel]] = []  # a heap, by ticket and lease
        self._events: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()  # of tokens, when they are used
        self._ended = False

    # ---- workers ----

    async def lease(self, worker: str) -> Lease | None:
        """Prompts for a worker, once there may be more out; None when the run has ended."""
        async with self._changed:
            if worker in self._out:  # it was lost with what it had, and is back
                lost = self._out.pop(worker)
                self._again += lost.tickets
                self._counts["prompts of lost workers"] += len(lost.tickets)
            await self._changed.wait_for(lambda: self._ended or self._room() > 0)
            if self._ended:
                return None
            count = min(self._config.lease, self._room())
            tickets, self._again = self._again[:count], self._again[count:]
            fresh = count - len(tickets)
            tickets += range(self._tickets, self._tickets + fresh)
            self._tickets += fresh
            lease = self._out[worker] = Lease(time.time_ns(), tickets)
            return lease

    async def give(self, worker: str, lease: Lease, parcels: list[Parcel]) -> None:
        async with self._changed:
            if self._out.get(worker) != lease:
                return  # it counts as lost, and others answer
            del self._out[worker]
            for one in parcels:
                heapq.heappush(self._ready, (one.ticket, lease.number, one))
                self._counts["groups"] += 1
                self._counts["tokens"] += one.tokens
                self._counts["sample bytes"] += len(one.group)
                self._counts["reward of groups, in thousandths"] += round(1000 * one.reward)
            self._changed.notify_all()

    def _room(self) -> int:
        config = self._config
        most = self._taken_before + (1 + config.max_staleness) * config.quota
        last = config.rounds * config.quota
        out = sum(len(lease.tickets) for lease in self._out.values())
        return (min(most, last) if self._version > 0 else 0) - self._taken - len(self._ready) - out

    # ---- trainers ----

    async def take(self, version: int, count: int) -> list[bytes]:
        """So many groups, for a trainer whose round began with this version."""
        batch: list[bytes] = []
        async with self._changed:
            self._learn(version)
            while len(batch) < count:
                await self._changed.wait_for(lambda: self._ready)
                *_, one = heapq.heappop(self._ready)
                late = version - one.oldest
                if late > self._config.max_staleness:
                    self._counts["groups dropped, too old"] += 1
                    self._counts["tokens dropped, too old"] += one.tokens
                    self._changed.notify_all()
                    continue
                self._taken += 1
                batch.append(one.group)
            self._changed.notify_all()
        return batch

    async def published(self, version: int) -> None:
        async with self._changed:
            self._learn(version)

    def _learn(self, version: int) -> None:
        """That a version is published; a controller that was started again learns so how far the run is."""
        if version > self._version:
            used = (version - 1) * self._config.quota
            self._version, self._taken = version, max(self._taken, used)
            self._tickets, self._taken_before = max(self._tickets, used), self._taken
            self._changed.notify_all()

    async def version(self) -> int:
        return self._version

    # ---- what happened ----

    async def note(
        self, events: list[dict[str, Any]], counts: dict[str, int], staleness: dict[int, int]
    ) -> None:
        self._events += events
        self._counts.update(counts)
        self._staleness.update(staleness)

    async def status(self) -> dict[str, Any]:
        out = sum(len(lease.tickets) for lease in self._out.values())
        latest = {event["part"]: event for event in self._events}
        return {
            "time": time.time(),
            "version": self._version,
            "taken": self._taken,
            "ready": len(self._ready),
            "out": out,
            "parts": latest,
            "counts": dict(self._counts),
        }

    async def end(self) -> dict[str, Any]:
        """No more prompts -> everything that was noted."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()
        return {
            "events": self._events,
            "counts": dict(self._counts),
            "staleness": dict(sorted(self._staleness.items())),
        }
