"""Which exchange and which code a round takes: the one of the fewest bytes, the one of the least time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loco.choice import Habits, predicted_bytes
from loco.codec import FAST, TIGHT, Codec
from loco.kernels import Entries
from loco.wire import Header, Kind

NUMEL = 10_000_000


def announced(density: float, sites: int, entry_bytes: float, spread: float) -> list[Header]:
    payload = round(NUMEL * density * entry_bytes)
    sums = round(min(NUMEL * density * spread, NUMEL) * entry_bytes)
    return [
        Header(kind=Kind.ANNOUNCEMENT, site=k, round=1, numel=NUMEL, body_bytes=payload, checksum=sums)
        for k in range(sites)
    ]


@pytest.mark.parametrize(
    ("density", "sites", "entry_bytes", "spread", "best"),
    [
        (0.06, 2, 2.4, 1.6, "gather"),
        (0.06, 4, 2.4, 2.2, "owner"),
        (0.06, 8, 2.4, 2.9, "owner"),
        (0.001, 4, 2.4, 3.9, "gather"),  # hardly any overlap
        (0.7, 4, 5.0, 1.4, "dense"),  # 5 bytes an entry, and nearly all are sent
        (0.9, 4, 2.4, 1.1, "owner"),  # where every element takes 2.4 bytes, dense never pays
    ],
)
def test_the_exchange_is_the_one_of_the_fewest_bytes(
    density: float, sites: int, entry_bytes: float, spread: float, best: str
) -> None:
    predicted = predicted_bytes(announced(density, sites, entry_bytes, spread))
    assert min(predicted, key=lambda name: predicted[name]) == best
    # Dense is a ring's 2(R−1)/R · 4 bytes per element and a few headers.
    assert predicted["dense"] == pytest.approx(2 * (sites - 1) / sites * 4 * NUMEL, rel=1e-3)


def test_gathering_grows_with_the_sites_and_owner_reducing_does_not() -> None:
    costs = {sites: predicted_bytes(announced(0.06, sites, 2.4, 2.5)) for sites in (4, 8, 64)}
    assert costs[8]["gather"] == pytest.approx(7 / 3 * costs[4]["gather"], rel=0.01)
    assert costs[64]["owner"] < 63 / 64 / (3 / 4) * 1.01 * costs[4]["owner"]


def learn(habits: Habits, codec: Codec, *, coding: float, link: float | None, moved: int) -> None:
    framing = SimpleNamespace(
        coded_entries=100_000, coded_bytes=240_000 if codec is TIGHT else 510_000, known=None
    )
    work: Any = SimpleNamespace(framing=framing, coding_seconds=coding, link_speed=link)
    none = Entries.whole(torch.empty(0))
    habits.learn(codec, work, [none], none, moved)


def test_a_slow_link_gets_the_tight_code_and_a_quick_one_the_fast() -> None:
    slow = Habits("auto", 4)
    assert slow.codec() is TIGHT  # to find out
    learn(slow, TIGHT, coding=0.1, link=12.5e6, moved=10_000_000)
    assert slow.codec() is TIGHT  # 0.8 s on the link; the fast code would take 1.7 s

    quick = Habits("auto", 4)
    learn(quick, TIGHT, coding=0.5, link=None, moved=10_000_000)
    assert quick.codec() is FAST  # the link never made it wait, so nobody knows how quick it is
    learn(quick, FAST, coding=0.01, link=1e9, moved=21_250_000)
    assert quick.codec() is FAST  # 0.02 s against 0.5 s of coding
    learn(quick, FAST, coding=0.01, link=30e6, moved=21_250_000)
    assert quick.codec() is TIGHT  # the link has become slower: 0.7 s against 0.5 s


def test_what_may_have_changed_is_tried_again() -> None:
    habits = Habits("auto", 4)
    learn(habits, TIGHT, coding=5.0, link=1e9, moved=10_000_000)  # on a machine that was busy
    rounds = 0
    while habits.codec() is FAST:
        learn(habits, FAST, coding=0.01, link=1e9, moved=21_250_000)
        rounds += 1
    assert rounds == 63


def test_what_the_user_chose_is_taken() -> None:
    for name, codec in (("tight", TIGHT), ("fast", FAST)):
        habits = Habits(name, 4)
        learn(habits, codec, coding=9.0, link=1e12, moved=1)
        assert habits.codec() is codec


def test_without_a_compiler_auto_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loco.kernels.packs_fast", lambda: False)
    assert Habits("auto", 2).codec() is FAST
    assert Habits("tight", 2).codec() is TIGHT
