"""What all sites hold and send in one round, in a file: θ and m before the round, every site's entries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loco.kernels import BLOCK, Entries, Gate, Known


class Recording(NamedTuple):
    about: dict[str, Any]  # the run's settings and the number of the round
    anchor: Tensor  # θ  [n] float32
    momentum: Tensor | None  # m  [n] float32
    sites: list[Entries]

    @property
    def known(self) -> Known:
        gate = self.about["gate"]
        return Known(self.anchor, self.momentum, Gate(**gate | {"dtype": getattr(torch, gate["dtype"])}))

    def excerpt(self, runs: Sequence[slice]) -> Recording:
        """The elements of some runs, one after the other, as if they were all there is."""
        kept = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        place = torch.full((self.anchor.numel(),), -1)
        place[kept] = torch.arange(len(kept))
        sites = []
        for entries in self.sites:
            now = place[entries.indices()]
            sites.append(Entries.at(now[now >= 0], entries.values[now >= 0], len(kept)))
        momentum = None if self.momentum is None else self.momentum[kept]
        return Recording(self.about, self.anchor[kept], momentum, sites)

    def save(self, path: Path) -> None:
        arrays = {"about": np.array(json.dumps(self.about)), "anchor": self.anchor.numpy()}
        if self.momentum is not None:
            arrays["momentum"] = self.momentum.numpy()
        for site, entries in enumerate(self.sites):
            assert entries.starts is not None
            assert entries.offsets is not None
            arrays[f"counts{site}"] = entries.starts.diff().to(torch.int16).numpy()
            arrays[f"offsets{site}"] = entries.offsets.numpy()
            arrays[f"values{site}"] = entries.values.numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: Path) -> Recording:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "about"}
            about = json.loads(str(file["about"]))
        sites = []
        for site in range(about["sites"]):
            counts = arrays[f"counts{site}"].long()
            starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            sites.append(Entries(starts, arrays[f"offsets{site}"], arrays[f"values{site}"]))
        return Recording(about, arrays["anchor"], arrays.get("momentum"), sites)


def middles(sizes: Sequence[int], wanted: int) -> Iterator[slice]:
    """The middle of every parameter, by their sizes: the same share of each, `wanted` elements in all."""
    start, share = 0, min(1.0, wanted / sum(sizes))
    for size in sizes:
        # Whole blocks of the large ones.
        run = round(size * share / BLOCK) * BLOCK if size * share >= BLOCK else round(size * share)
        first = start + (size - run) // 2
        yield slice(first, first + run)
        start += size
