"""Which exchange and which code a round takes: the one of the fewest bytes, the one of the least time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loco.exchange.tuning import ExchangeTuner, predicted_bytes
from loco.kernels import Entries
from loco.wire.codecs import FAST, TIGHT, Codec
from loco.wire.records import Announcement

NUMEL = 10_000_000


def announced(density: float, sites: int, entry_bytes: float, spread: float) -> list[Announcement]:
    payload = round(NUMEL * density * entry_bytes)
    sums = round(min(NUMEL * density * spread, NUMEL) * entry_bytes)
    return [
        Announcement(site=k, round=1, numel=NUMEL, payload_bytes=payload, sums_bytes=sums)
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


def learn(tuner: ExchangeTuner, seconds: float) -> Codec:
    """A round in the code that comes next, which took so long. -> that code"""
    codec = tuner.codec()
    coded_bytes = 240_000 if codec is TIGHT else 510_000
    framing = SimpleNamespace(coded_entries=100_000, coded_bytes=coded_bytes, known=None)
    work: Any = SimpleNamespace(framing=framing, seconds=seconds)
    own = Entries.whole(torch.zeros(1000))
    tuner.learn(codec, work, [own], own)
    return codec


@pytest.mark.parametrize(
    ("tight", "fast", "best"),
    [
        (0.8, 1.7, TIGHT),  # a slow link
        (0.5, 0.1, FAST),  # a quick one, which waits for the coder
        (0.11, 0.1, TIGHT),  # no great difference: then fewer bytes
    ],
)
def test_both_codes_are_tried_and_the_quicker_is_taken(tight: float, fast: float, best: Codec) -> None:
    tuner = ExchangeTuner("auto", 4)
    assert [learn(tuner, tight), learn(tuner, fast)] == [TIGHT, FAST]
    for _ in range(20):
        assert learn(tuner, tight if best is TIGHT else fast) is best


def test_what_may_have_changed_is_tried_again() -> None:
    tuner = ExchangeTuner("auto", 4)
    learn(tuner, 5.0)  # on a machine that was busy
    codes = [learn(tuner, 0.1) for _ in range(100)]
    assert codes[:32] == [FAST] * 32
    assert codes[32:].count(FAST) == 2  # tried again, twice
    assert codes[32] is codes[-1] is TIGHT


def test_what_the_user_chose_is_taken() -> None:
    for name, codec in (("tight", TIGHT), ("fast", FAST)):
        tuner = ExchangeTuner(name, 4)
        assert [learn(tuner, seconds) for seconds in (9.0, 0.1, 5.0)] == [codec] * 3


def test_without_a_compiler_auto_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loco.kernels.packs_fast", lambda: False)
    assert ExchangeTuner("auto", 2).codec() is FAST
    assert ExchangeTuner("tight", 2).codec() is TIGHT


def test_what_can_not_be_learned_or_chosen_fails_no_round(caplog: pytest.LogCaptureFixture) -> None:
    tuner = ExchangeTuner("auto", 4)
    assert learn(tuner, 0.1) is TIGHT
    own = Entries.whole(torch.zeros(1000))
    tuner.learn(TIGHT, None, [own], own)  # pyright: ignore[reportArgumentType]
    assert "could not learn" in caplog.text
    tuner.wire = "a code that is none"
    assert tuner.codec() is TIGHT  # as in the last round
    assert "could not choose a code" in caplog.text


def test_a_site_that_sends_nothing_learns_nothing_of_how_long_an_entry_takes() -> None:
    tuner = ExchangeTuner("auto", 4)
    assert [learn(tuner, 0.2), learn(tuner, 0.1)] == [TIGHT, FAST]
    assert tuner.codec() is FAST
    nothing: Any = Entries.at(torch.arange(0), torch.zeros(0), NUMEL)
    framing = SimpleNamespace(coded_entries=0, coded_bytes=64, known=None)
    tuner.learn(FAST, SimpleNamespace(framing=framing, seconds=9.0), [nothing], nothing)  # pyright: ignore[reportArgumentType]
    assert tuner.codec() is FAST
