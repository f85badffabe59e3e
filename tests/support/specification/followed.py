"""The specification of overlapped rounds, led through what real sites did."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from paper import OverlappedPaper
from scripted import bits, flat, move, parameters
from states import Snapshot

SEED, NUMEL = 3, 1003


class Followed(OverlappedPaper):
    """Of sites with `Scripted` optimizers.

    weights: w of each site.
    steps: how many inner steps each has made.
    """

    def __init__(self, sites: int = 3, margin: float = 0.0, value_steps: int | None = None) -> None:
        super().__init__(
            anchor=flat(parameters(SEED, NUMEL)),
            bf16=np.zeros(NUMEL, dtype=bool),
            sites=sites,
            lr=0.7,
            mu=0.9,
            nesterov=True,
            gain=3.5,
            margin=margin,
            value_steps=value_steps,
        )
        self.weights = [began.copy() for began in self.began]
        self.steps = [0] * sites

    def step(self, site: int) -> None:
        self.weights[site] = self.weights[site] - move(SEED, site, self.steps[site], NUMEL, 3e-5)
        self.steps[site] += 1

    def train(self, count: int) -> None:
        for site in range(self.sites):
            for _ in range(count):
                self.step(site)

    def cross(self) -> None:
        self.boundary(self.weights)
        self.weights = [began.copy() for began in self.began]

    def finish(self) -> None:
        """The round in flight has come, and no inner step has been made."""
        self.land()
        self.weights = [self.cast(self.anchor) for _ in range(self.sites)]

    def follow(self, histories: Mapping[int, Sequence[str]]) -> None:
        """Args: histories: by rank, "step", "cross", "take_back" and "land" in their order.

        Where a round fails on one site, another may still be waiting to send its own part again. So what each
        site has done is told up to where it applies a round, and then all apply it.
        """
        each = len(histories) // self.sites
        left = [list(histories[site * each]) for site in range(self.sites)]
        assert all(list(history) == left[rank // each] for rank, history in histories.items())
        flying: list[Any] = [None] * self.sites
        while any(left):
            for site, events in enumerate(left):
                while events and (flying[site] is None or events[0] in ("step", "take_back")):
                    event = events.pop(0)
                    if event == "step":
                        self.step(site)
                    elif event == "take_back":
                        send, v = flying[site]
                        self.residuals[site][send] += v[send]
                        flying[site] = None
                    else:
                        assert event == "cross"
                        flying[site] = self._crossed(site)
            if any(left):
                self.flying = flying
                self.land()
                flying = [self._crossed(k) if left[k].pop(0) == "cross" else None for k in range(self.sites)]
        self.weights = [self.cast(self.anchor) for _ in range(self.sites)]

    def _crossed(self, site: int) -> tuple[np.ndarray, np.ndarray]:
        sent = self.sends(site, self.weights[site])
        self.weights[site] = self.began[site].copy()
        return sent

    def check(self, site: int, state: Snapshot, *names: str, start: int = 0) -> None:
        """Args: start: of the part that the rank holds of θ, m and e."""
        expected = {"residual": self.residuals[site], "anchor": self.anchor, "momentum": self.momentum}
        for name in names or (*expected, "weights"):
            got, vector = state[name], expected.get(name, self.weights[site])
            first = 0 if name == "weights" else start
            np.testing.assert_array_equal(got, bits(vector[first : first + got.size]), f"site {site}: {name}")
