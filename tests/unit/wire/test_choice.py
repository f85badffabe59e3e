"""Which exchange and which code a round takes: the one of the fewest bytes, the one of the least time."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loco.exchange.codec_choice import (
    NEEDS_CHALLENGER,
    NEEDS_FIRST,
    NO_OPINION,
    RETRY_BUDGET,
    ROUNDS_NEEDED,
    CodecChoice,
)
from loco.exchange.tuning import ExchangeTuner, is_worth_enclosing, predicted_bytes
from loco.kernels import Entries
from loco.wire.codecs import FAST, SPARSE, TIGHT, Codec
from loco.wire.records import Announcement, fp32_bits

NUMEL = 10_000_000


def announced(density: float, sites: int, entry_bytes: float, spread: float) -> list[Announcement]:
    payload = round(NUMEL * density * entry_bytes)
    sums = round(min(NUMEL * density * spread, NUMEL) * entry_bytes)
    return [
        Announcement(site=k, round=1, numel=NUMEL, payload_bytes=payload, sums_bits=fp32_bits(sums))
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


ENTRIES = 1000


class Sites:
    """Some sites, each with a tuner, whose rounds take what they are told to: the slowest site's time."""

    def __init__(self, wire: str = "auto", sites: int = 2) -> None:
        self.tuners = [ExchangeTuner(wire, sites) for _ in range(sites)]
        self.round = 0

    def run(self, seconds: dict[str, float], rounds: int = 1) -> list[Codec]:
        """-> the code of each round, which is the same at all sites."""
        found = []
        for _ in range(rounds):
            self.round += 1
            said = [
                Announcement(
                    site=k,
                    round=self.round,
                    entries=ENTRIES,
                    codec_time_ratio=tuner.codec_time_ratio(self.round),
                )
                for k, tuner in enumerate(self.tuners)
            ]
            (codec,) = {tuner.codec() for tuner in self.tuners}
            for tuner in self.tuners:
                tuner.hear(said)
                learn(tuner, codec, seconds[codec.name])
            found.append(codec)
        return found


def learn(tuner: ExchangeTuner, codec: Codec, seconds: float) -> None:
    """From a round in a code that took so long."""
    coded_bytes = 240_000 if codec is TIGHT else 510_000
    framing: Any = SimpleNamespace(coded_entries=100_000, coded_bytes=coded_bytes, known=None)
    own = Entries.whole(torch.zeros(ENTRIES))
    tuner.learn(codec, framing, seconds, [own], own)


@pytest.mark.parametrize(
    ("tight", "fast", "best"),
    [
        (0.8, 1.7, TIGHT),  # a slow link
        (0.5, 0.1, FAST),  # a quick one, which waits for the coder
        (0.11, 0.1, TIGHT),  # no great difference: then fewer bytes
    ],
)
def test_both_codes_are_tried_and_the_quicker_is_taken(tight: float, fast: float, best: Codec) -> None:
    codes = Sites().run({"tight": tight, "fast": fast}, 15)
    # What a round tells is announced in the next one, and counts from the one after it.
    assert codes[:6] == [TIGHT] * 3 + [FAST] * 3
    assert set(codes[6:]) == {best}


@pytest.mark.parametrize(("tight", "fast"), [(1.0, 0.1), (0.3, 0.1), (0.2, 0.1), (0.1, 0.4), (0.1, 0.15)])
def test_trying_costs_little_over_two_hundred_rounds(tight: float, fast: float) -> None:
    seconds = {"tight": tight, "fast": fast}
    taken = sum(seconds[codec.name] for codec in Sites().run(seconds, 1000))
    assert taken < (1 + 1.5 * RETRY_BUDGET) * 1000 * min(seconds.values()) + 3 * max(seconds.values())


def test_a_round_that_was_disturbed_does_not_decide() -> None:
    sites, quick = Sites(), {"tight": 0.5, "fast": 0.1}
    sites.run(quick, 6)
    codes = sites.run({"tight": 0.5, "fast": 30.0}, 2) + sites.run(quick, 10)
    assert set(codes) == {FAST}


def test_what_may_have_changed_is_tried_again() -> None:
    sites = Sites()
    assert sites.run({"tight": 0.2, "fast": 0.1}, 40)[-1] is FAST
    codes = sites.run({"tight": 0.2, "fast": 5.0}, 20)  # a slow link, from now on
    assert codes[:4] == [FAST] * 4  # one quick round is remembered for some more
    assert set(codes[6:]) == {TIGHT}
    assert sites.run({"tight": 0.2, "fast": 0.1}, 2100)[-1] is FAST


def test_a_code_that_was_slower_at_first_is_tried_again_though_the_other_became_quicker() -> None:
    """More and more entries make each of them cheaper, in the code that is in use."""
    sites = Sites()
    assert sites.run({"tight": 0.10, "fast": 0.15}, 20)[-1] is TIGHT
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        sites.run({"tight": 0.10 * share, "fast": 0.08 * share}, 8)
    assert sites.run({"tight": 0.04, "fast": 0.032}, 20)[-1] is FAST


def test_one_slow_round_of_a_code_that_is_tried_again_does_not_decide() -> None:
    sites, quicker_now = Sites(), {"tight": 0.10, "fast": 0.05}
    sites.run({"tight": 0.10, "fast": 0.13}, 31)
    assert sites.run({"tight": 0.10, "fast": 0.5}) == [FAST]
    assert sites.run(quicker_now, 100)[-1] is FAST


def test_sites_choose_together_though_they_measure_different_times() -> None:
    sites = Sites(sites=3)
    for codec in (TIGHT, FAST):
        for tuner, seconds in zip(sites.tuners, ((0.9, 0.1), (0.1, 0.15), (0.1, 0.1)), strict=True):
            for _ in range(ROUNDS_NEEDED):
                learn(tuner, codec, seconds[codec is FAST])
    sites.run({"tight": 0.1, "fast": 0.1})
    assert [tuner.codec() for tuner in sites.tuners] == [FAST] * 3


def test_who_sends_nothing_or_has_no_choice_has_no_opinion() -> None:
    choice = CodecChoice((FAST, TIGHT))
    alone = Announcement(site=0, round=1, entries=0, codec_time_ratio=NEEDS_CHALLENGER)
    fixed = Announcement(site=1, round=1, entries=5, codec_time_ratio=NO_OPINION)
    choice.hear([alone, fixed])
    assert choice.codec is TIGHT
    choice.hear([alone, fixed, replace(fixed, site=2, codec_time_ratio=NEEDS_CHALLENGER)])
    assert choice.codec is FAST
    choice.hear([alone, fixed])
    assert choice.codec is FAST


def test_what_the_user_chose_is_taken() -> None:
    for name, codec in (("tight", TIGHT), ("fast", FAST)):
        assert Sites(name).run({"tight": 9.0, "fast": 0.1}, 3) == [codec] * 3
        assert ExchangeTuner(name, 4).codec_time_ratio(1) == NO_OPINION


def test_without_a_compiler_auto_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loco.kernels.packs_fast", lambda: False)
    assert ExchangeTuner("auto", 2).codec() is FAST
    assert ExchangeTuner("auto", 2).codec_time_ratio(1) == NO_OPINION
    assert ExchangeTuner("tight", 2).codec() is TIGHT


def test_what_can_not_be_learned_or_chosen_fails_no_round(caplog: pytest.LogCaptureFixture) -> None:
    tuner = ExchangeTuner("auto", 4)
    own = Entries.whole(torch.zeros(ENTRIES))
    tuner.learn(TIGHT, None, 1.0, [own], own)  # pyright: ignore[reportArgumentType]
    assert "could not learn" in caplog.text
    tuner.hear([None])  # pyright: ignore[reportArgumentType]
    assert "could not choose a codec" in caplog.text
    assert tuner.codec() is TIGHT


@pytest.mark.parametrize("entries", [0, ENTRIES], ids=["sends nothing", "is alone"])
def test_a_site_that_sends_nothing_or_is_alone_learns_nothing_of_how_long_an_entry_takes(
    entries: int,
) -> None:
    tuner = ExchangeTuner("auto", 4)
    own = Entries.at(torch.arange(entries), torch.zeros(entries), NUMEL)
    framing: Any = SimpleNamespace(coded_entries=0, coded_bytes=64, known=None)
    for _ in range(ROUNDS_NEEDED):
        tuner.learn(TIGHT, framing, 9.0, [own], own)
    assert tuner.codec_time_ratio(1) == NEEDS_FIRST


@pytest.mark.parametrize(
    ("entries", "sums", "sites", "worth"),
    [
        (300, 500, 2, True),
        (300, 900, 4, True),  # what four messages cost is more than a second half of 600 bytes
        (3000, 5000, 2, True),
        (3000, 300, 4, False),  # an owner keeps most sums, so that hardly any come back
        (3000, 6000, 16, False),
    ],
)
def test_few_entries_follow_their_announcement_if_that_is_fewer_bytes(
    entries: int, sums: int, sites: int, worth: bool
) -> None:
    mine = Announcement(
        site=0, round=1, numel=50_000, payload_bytes=2 * entries, sums_bits=fp32_bits(2 * sums)
    )
    assert is_worth_enclosing(mine, sites) == worth


class Third(type(FAST)):
    id, name, entry_bytes = 9, "third", 8.0


@pytest.mark.parametrize(
    "order", [("tight", "fast", "third"), ("third", "tight", "fast"), ("fast", "third", "tight")]
)
def test_three_codecs_are_tried_the_quickest_is_taken_and_all_are_tried_again(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPARSE, "third", Third())
    sites, seconds = Sites(), dict(zip(order, (0.1, 0.2, 0.3), strict=True))
    assert {codec.name for codec in sites.run(seconds, 10)} == set(order)
    names = [codec.name for codec in sites.run(seconds, 1000)]
    assert set(names) == set(order)
    assert sum(map(seconds.__getitem__, names)) < (1 + 2 * 1.5 * RETRY_BUDGET) * 100
    for quicker in order[1:]:  # once conditions change it is noticed
        seconds[quicker] = min(seconds.values()) / 2
        assert sites.run(seconds, 300)[-1].name == quicker
