"""What `make test` runs: a sample of every class of claim. `make check` (pytest's --check) runs everything.

Without --check these are left out, and the end of the run says so:

- a test that is marked `check(beyond)`, or the cases of it whose ids do not match `check(beyond, sample=…)`.
  `beyond` is one of the sentences below: what these tests try beyond what the sample has tried;
- of a test that is marked `pairs`, those cases of its product of options whose every pair of options has been
  tried by other cases.

With --check, such products are left out where Triton's interpreter runs them, a thousand times slower than C,
and of the ties it has every 29th: a GPU runs the same kernels on all cases and all ties.

A test that the command line names by its id (`file.py::test`) is run in any case.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

CELLS = "every phase of every fault in the fault table"
FLEETS = "every way in which sites come and go"
INTERRUPTIONS = "every moment of an interruption or a kill; long runs under random faults"
SCHEDULES = "publishers and subscribers: every schedule, length of a chain, kill and exchanged file"
MESSAGES = "every message that fails, is damaged or forged, by every exchange"
CHECKPOINTS = "checkpoints: every format, damage and change of sites"
HOSTILE = "1,200,000 hostile payloads and 300,000 patches against every build, under the sanitizers"
GPU_TARGETS = "the Triton kernels, compiled for every GPU"
C_BUILDS = "the C kernels: every build, under every sanitizer and in odd environments"
ALL_VALUES = "the kernels and the codecs on every BF16 value and tie, and on more sizes and densities"
MEMORY = "memory at full size, by every home and exchange"
COMMANDS = "the commands as a person runs them: each way to start, interrupt and resume one"
BASELINES = "the baselines, recordings and benchmarks in full"
LANGUAGES = "language models of every architecture"
PAGES = "plots and pages of any size"
SHARDINGS = "sharded parameters: every kind of training, layout and trap"
PRODUCTS = "full products of options, of which every pair has been tried"


def left_out(items: Sequence[pytest.Item], *, whole: bool = True) -> dict[pytest.Item, str]:
    """What `make test` does not run, each with what it tries beyond the sample.

    whole: all cases of each test are among them, so a sample that matches none of them is a mistake.
    """
    found: dict[pytest.Item, str] = {}
    unused: dict[str, str] = {}
    products: list[pytest.Item] = []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        mark = item.get_closest_marker("check")
        if mark is not None:
            sample = mark.kwargs.get("sample", "")
            unused.setdefault(test, sample)
            if not sample or not re.fullmatch(sample, case[:-1]):
                found[item] = mark.args[0]
                continue
            unused[test] = ""
        if item.get_closest_marker("pairs"):
            products.append(item)
    missed = {test: sample for test, sample in unused.items() if sample}
    if whole and missed:
        raise pytest.UsageError(f"samples that match no case: {missed}")
    return found | dict.fromkeys(_tried_in_pairs(products), PRODUCTS)


def too_slow(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """What `make check` does not run either."""
    interpreted = [item for item in items if "interpreted" in item.name]
    rest = [item for item in interpreted if getattr(item, "callspec").params.get("every") != 1]  # noqa: B009
    products = [item for item in rest if item.get_closest_marker("pairs")]
    return [item for item in interpreted if item not in rest] + _tried_in_pairs(products)


def _tried_in_pairs(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of tests' products of options, the cases whose every pair of options other cases try."""
    products: defaultdict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        # What is skipped for want of a device must not stand for what is run.
        products[item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None].append(item)
    found = []
    for cases in products.values():
        # A product's cases share the options themselves.
        options = [getattr(item, "callspec").params for item in cases]  # noqa: B009
        kept = covering([{name: id(value) for name, value in case.items()} for case in options])
        found += [item for k, item in enumerate(cases) if k not in kept]
    return found


def covering(cases: Sequence[dict[str, int]]) -> set[int]:
    """The numbers of cases that have every pair of options between them: by greed, so not the fewest."""
    pairs: list[set[Any]] = [set(combinations(sorted(case.items()), 2)) or {*case.items()} for case in cases]
    wanted = set[Any]().union(*pairs)
    kept: set[int] = set()
    while wanted:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & wanted))
        kept.add(best)
        wanted -= pairs[best]
    return kept


def summary(beyond: Iterable[str]) -> list[str]:
    return [f"{count:6,}  {what}" for what, count in Counter(beyond).most_common()]
