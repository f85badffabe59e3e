"""What one core takes to code a payload, and how large it is: measured alone, on the noise of `crowd`.

    seal    entries to a frame's body, and its checksum
    open    the checksum, and entries again
    add     all sites' entries to their sums

for one site's entries and for the sums of all, which are denser.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from experiments.bench.measuring import Row
from experiments.bench.simulation.crowd import Crowd, by_class
from experiments.bench.simulation.simulator import Code, Work
from experiments.processes.progress import Progress
from loco import kernels
from loco.kernels import Entries
from loco.wire.codecs import DENSE, SPARSE

SITES = (2, 4, 8, 16)
MANY = (32, 64, 128, 256)  # more than are simulated: the union of their entries is by classes


def measure(numel: int, *, repeats: int = 5) -> tuple[list[Row], list[Row]]:
    """-> a row for each code and number of sites; a row for each number of sites with its densities"""
    threads = torch.get_num_threads()
    coding, densities, classes = [], [], None
    with Progress("payloads", total=len(SITES)) as progress:
        for sites in reversed(SITES):  # the most first: the classes are made of them
            torch.set_num_threads(threads)
            crowd = Crowd(sites, numel // 2 if sites > 8 else numel)
            torch.set_num_threads(1)
            classes = classes or by_class(crowd)
            coding += _coding(crowd, repeats)
            density = crowd.senders().sum().item() / sites / crowd.numel
            union = crowd.sums().values.numel() / crowd.numel
            densities.append({"sites": sites, "density": density, "union": union})
            progress.advance(f"{sites} sites")
    torch.set_num_threads(threads)
    assert classes is not None
    densities += [{"sites": n, "density": classes.density(), "union": classes.union(n)} for n in MANY]
    return coding, sorted(densities, key=lambda row: row["sites"])


def _coding(crowd: Crowd, repeats: int) -> Iterator[Row]:
    own, sums, numel = crowd.entries[0], crowd.sums(), crowd.numel
    whole = Entries.whole(torch.zeros(numel).index_put_((own.indices(),), own.values) + 1e-9)
    common = {
        "sites": len(crowd.entries),
        "numel": numel,
        "all_entries": sum(e.values.numel() for e in crowd.entries),
        "add": _median(lambda: kernels.add_up(crowd.entries, numel), repeats),
        "add_whole": _median(lambda: kernels.add_up([whole] * len(crowd.entries), numel), repeats),
    }
    forms = [(codec, of, e) for codec in SPARSE.values() for of, e in (("one site", own), ("sums", sums))]
    forms += [(codec, "all", whole) for codec in DENSE.values()]
    for codec, of, entries in forms:
        body = codec.encode(entries, crowd.known)
        assert body is not None
        count = entries.values.numel()

        def seal(codec: Any = codec, entries: Entries = entries) -> None:
            kernels.digest(codec.encode(entries, crowd.known))

        def read(codec: Any = codec, body: torch.Tensor = body, count: int = count) -> None:
            kernels.digest(body)
            codec.decode(body, count, crowd.known)

        yield common | {
            "code": codec.name,
            "of": of,
            "entries": count,
            "bytes": body.numel(),
            "seal": _median(seal, repeats),
            "open": _median(read, repeats),
        }


def _median(call: Any, repeats: int) -> float:
    """Of the core's own seconds, which others on the machine don't lengthen; after one call to warm up."""
    taken = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return median(taken[1:])


def codes(rows: list[Row]) -> tuple[dict[str, Code], dict[str, Work]]:
    """-> the codes, and what adding up takes, of sparse and of whole vectors"""
    found = {}
    for name in dict.fromkeys(row["code"] for row in rows):
        mine = [row for row in rows if row["code"] == name]
        found[name] = Code(
            sizes={row["entries"] / row["numel"]: row["bytes"] / row["entries"] for row in mine},
            seal=_fit([(r["numel"], r["entries"], r["seal"]) for r in mine]),
            open=_fit([(r["numel"], r["entries"], r["open"]) for r in mine]),
            rounds=name in ("bfloat16", "int8"),
        )
    adding = {
        "sparse": _fit([(r["numel"], r["all_entries"], r["add"]) for r in rows]),
        "whole": Work(entry=fmean(r["add_whole"] / r["numel"] / r["sites"] for r in rows)),
    }
    return found, adding


def _fit(points: list[tuple[float, float, float]]) -> Work:
    """numel, entries, seconds -> the least squares of relative errors, neither term below zero."""
    numel, entries, taken = np.array(points).T
    both = np.stack([numel / taken, entries / taken], 1)
    (parameter, entry), *_ = np.linalg.lstsq(both, np.ones(len(points)), rcond=None)
    if np.ptp(entries / numel) < 1e-6 or parameter < 0:
        return Work(entry=float(np.mean(taken / entries)))
    if entry < 0:
        return Work(parameter=float(np.mean(taken / numel)))
    return Work(float(parameter), float(entry))
