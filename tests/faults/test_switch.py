"""Sites train over links that lose, repeat, reorder and delay packets, or carry them in one direction."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from fault_cases import clean
from fault_harness import Run, Told
from fault_row import NO_STORE as STORE
from fault_site import Setup
from faulty import Fault
from selection import CELLS, INTERRUPTIONS
from states import assert_same
from switch import Conditions, Cut, Switch, received, sent, why_not
from test_faults import MARGIN

pytestmark = [pytest.mark.root, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

# A packet that is lost five times in a row arrives after six seconds. One that is lost more often may cost a
# link: there are two repeats, as a user has them.
PATIENT = Setup(networks=True, rounds=5, dead_after=15.0, repeats=2)
# What all need of round 2 may have come before the cut, which is then noticed in round 3.
SILENT = r"round [23], .*: no heartbeat from site 1 within 2 s"
# The last: what it needs of the round had come before the cut, and only the verdict is missing.
NO_STORE = rf"round [23], .*: {STORE} for 2 s|the sites' store does not answer"
# Who waits for the sites that lack something is told so by them when they give up.
# Or it has tried again while they gave up.
LATE = (
    r"(reconnecting: site \d has left: )?"
    r"round 2, .*: (no answer from site \d within 4 s, which is alive|lost|site \d has left)"
)


def assert_same_as_without(told: Told, setup: Setup) -> None:
    expected = clean(replace(setup, networks=False))
    for rank, states in told.states.items():
        assert_same(states[-1], expected.states[rank][-1])


@pytest.mark.check(CELLS, sample="30% reordered")
@pytest.mark.parametrize(
    ("conditions", "what", "setup"),
    [
        pytest.param(Conditions(loss=0.2), {"lost"}, PATIENT, id="20% lost"),
        pytest.param(Conditions(duplication=0.5), {"repeated"}, PATIENT, id="half repeated"),
        pytest.param(Conditions(reordering=0.3), {"held back"}, PATIENT, id="30% reordered"),
        pytest.param(
            Conditions(delay=0.3),
            set(),
            replace(PATIENT, dead_after=5.0, rounds=2),
            id="600 ms there and back",
        ),
        pytest.param(
            Conditions(loss=0.05, duplication=0.2, reordering=0.2, delay=0.02),
            {"lost", "repeated", "held back"},
            PATIENT,
            id="everything",
        ),
    ],
)
def test_a_bad_network_costs_time_and_no_bit(conditions: Conditions, what: set[str], setup: Setup) -> None:
    switch = Switch(conditions)
    with Run(setup, switch=switch) as run:
        run.finish()
        counts = switch.counts()
    assert {name for name in counts if counts[name] > 10} == {"passed"} | what, counts
    assert not any(run.told.raised.values()), run.told.raised
    assert_same_as_without(run.told, setup)


def to_one_other(size: int, place: int) -> set[Cut]:
    return {(place, size - 1)}


@pytest.mark.check(INTERRUPTIONS, sample=r"what it sends to one other")
@pytest.mark.parametrize(
    ("cuts", "others_say", "it_says"),
    [
        # It may hear that another rank has hung up before it knows that nobody hears it: it tries again, and
        # finds no store then.
        pytest.param(sent, SILENT, rf"{NO_STORE}|reconnecting: {STORE} for 2 s", id="all that it sends"),
        # On a machine that stands still for seconds, what it waits for is late before the store is.
        pytest.param(received, SILENT, f"{NO_STORE}|{LATE}", id="all that is sent to it"),
        pytest.param(to_one_other, LATE, LATE, id="what it sends to one other"),
    ],
)
def test_a_link_that_carries_one_direction_only_is_noticed_and_costs_no_bit(
    cuts: Callable[[int, int], set[Cut]], others_say: str, it_says: str
) -> None:
    setup = replace(PATIENT, rounds=3, dead_after=2.0, timeout=4.0)
    with Run(setup, [Fault("cut", "payload")], switch=Switch(Conditions(), cuts=cuts)) as run:
        run.all_raised(range(setup.world))
        run.link_is_back(1)
        run.finish()
    for rank, errors in run.told.raised.items():
        assert re.match(it_says if rank == 1 else others_say, errors[0].text), errors[0].text
        assert all(error.unchanged for error in errors)
        assert run.told.within(rank, [1]) <= 2 * setup.dead_after + MARGIN
    assert_same_as_without(run.told, setup)
