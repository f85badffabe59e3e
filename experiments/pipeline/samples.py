"""What travels from workers to trainers, through the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.tasks.grpo import advantages
from experiments.tasks.rollout import Rollout

# The types of a group's arrays in transit.
_KINDS = {
    "head": "<i4",
    "lengths": "<i4",
    "answers": "<i4",
    "logp": "<f4",
    "versions": "<i4",
    "advantage": "<f4",
}


GIVEN = -1  # the version of a token that was not sampled: an environment's


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, with their advantages."""

    head: np.ndarray  # the prompt's tokens
    lengths: np.ndarray  # of the answers, which are concatenated in the three arrays below
    answers: np.ndarray
    logp: np.ndarray  # of their tokens, under the weights that sampled them
    versions: np.ndarray  # of those weights
    advantage: np.ndarray  # [answers]

    def packed(self) -> bytes:
        """The length of each array, then their values; every number has four bytes."""
        arrays = [getattr(self, name).astype(kind) for name, kind in _KINDS.items()]
        counts = np.array([len(array) for array in arrays], dtype="<i4")
        return b"".join(array.tobytes() for array in (counts, *arrays))

    @classmethod
    def unpacked(cls, packed: bytes) -> Group:
        """
        Raises:
            ValueError: these bytes are not a group.
        """
        head = 4 * len(_KINDS)
        counts = np.frombuffer(packed[:head], "<i4").tolist() if len(packed) >= head else []
        if not counts or min(counts) < 0 or head + 4 * sum(counts) != len(packed):
            raise ValueError(f"{len(packed)} bytes are not a group of answers")
        arrays, begun = [], head
        for count, kind in zip(counts, _KINDS.values(), strict=True):
            found = np.frombuffer(packed, kind, count, begun)
            arrays.append(found.astype("i8" if kind == "<i4" else "f4"))
            begun += 4 * count
        return cls(*arrays)

    @property
    def sampled_versions(self) -> np.ndarray:
        """The versions of the tokens that were sampled."""
        return self.versions[self.versions != GIVEN]

    @property
    def tokens(self) -> int:
        """That were sampled."""
        return len(self.sampled_versions)

    def rows(self) -> list[Tensor]:
        """Each prompt followed by its answer."""
        head = torch.from_numpy(self.head)
        return [torch.cat([head, answer]) for answer in self.split(self.answers)]

    def split(self, values: np.ndarray) -> list[Tensor]:
        """Cut into one tensor for each answer."""
        return list(torch.from_numpy(values).split(self.lengths.tolist()))


def groups_of(rollout: Rollout, rewards: Tensor, group: int) -> list[Group]:
    found = []
    for k, advantage in enumerate(advantages(rewards.view(-1, group))):
        own = slice(k * group, (k + 1) * group)
        logp, rows = rollout.logp[own], rollout.tokens[own]
        head = len(rows[0]) - len(logp[0])
        found.append(
            Group(
                head=rows[0][:head].numpy(),
                lengths=np.array([len(one) for one in logp]),
                answers=_joined([row[head:] for row in rows]),
                logp=_joined(logp),
                versions=_joined(rollout.versions[own]),
                advantage=advantage.numpy(),
            )
        )
    return found


def _joined(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).numpy()


class UsedTickets:
    """Those whose groups trainers have been given: all below a number, and some beyond it; and the latest
    ones, by version."""

    def __init__(self, all_below: int = 0, beyond: Iterable[int] = ()) -> None:
        self._all_below, self._beyond = all_below, set(beyond)
        self._latest: dict[int, list[int]] = {}

    def add(self, tickets: Iterable[int], version: int) -> None:
        self._latest.setdefault(version, []).extend(tickets)

    def before(self, version: int) -> dict[str, Any]:
        """Those of earlier versions. They are no longer told apart."""
        for one in [one for one in self._latest if one < version]:
            self._beyond.update(ticket for ticket in self._latest.pop(one) if ticket >= self._all_below)
        while self._all_below in self._beyond:
            self._beyond.remove(self._all_below)
            self._all_below += 1
        return {"all_below": self._all_below, "beyond": sorted(self._beyond)}

    def __contains__(self, ticket: int) -> bool:
        return ticket < self._all_below or ticket in self._beyond

    def unused(self) -> list[int]:
        """Below the highest one."""
        highest = max(self._beyond, default=self._all_below)
        return [ticket for ticket in range(self._all_below, highest) if ticket not in self._beyond]

    @property
    def end(self) -> int:
        """From which on no ticket has been used."""
        return max(self._beyond, default=self._all_below - 1) + 1


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Prompts that a worker is to answer. Each ticket is a seed that decides the prompt and the sampling.

    version: the oldest one whose answers will still be young enough when they are used.
    evaluate: instead of tickets: score this version, or a newer one.
    """

    tickets: Sequence[int] = ()
    version: int = 0
    evaluate: int | None = None


@dataclass(frozen=True)
class Parcel:
    """A group in transit, with what the controller needs to know without unpacking it."""

    ticket: int
    oldest: int  # version of the weights that gave its oldest token
    tokens: int
    reward: float
    group: bytes  # packed
