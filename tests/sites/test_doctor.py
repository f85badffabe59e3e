"""`python -m loco doctor` finds what is wrong between sites, and predicts what a round then takes."""

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from isolated_sites import MEETING, run_in_networks
from scripted import Scripted
from selection import COMMANDS
from sites import run_worlds
from switch import Conditions, Switch, why_not

import loco
from experiments.processes.namespaces import MBIT
from loco.commands.doctor import command, facts, methods
from loco.commands.doctor.rounds import Costs, predict
from loco.commands.doctor.work import Work
from loco.wire.codecs import FAST

QUICK = ("--limit", "0.4", "--patience", "30")  # MB, seconds
in_networks = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def doctor(*arguments: str) -> tuple[int, str]:
    """In this process -> its exit status, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = command.main(list(arguments))
    return status, printed.getvalue()


def findings(printed: str) -> list[str]:
    """Of its verdict."""
    return [line for line in printed.splitlines() if line[:1].isdigit() and line[1:2] == "."]


# ---- links of 100 Mbit/s with a round trip of 40 ms ----

SITES = ["berlin", "paris", "rome"]
NUMEL, ROUNDS = 2_000_000, 8  # the first one is over new connections, and is left out
SCALE = 8e-6  # of an inner step, with which a fifth of the entries is sent
ROUND_TRIP, RATE = 0.04, 100 * MBIT
BETWEEN = 1.0  # seconds: the inner steps of a round, in which links are idle


def in_network(
    conditions: Conditions, work: Callable[..., Any], variables: Mapping[str, Mapping[str, str]], *args: Any
) -> list[Any]:
    with Switch(conditions) as switch:
        return run_in_networks(switch, variables, work, *args, waits_for_others=False)


def examined_then_trained(folder: str) -> tuple[int, str, dict[str, list[loco.SyncReport]]]:
    """The doctor, and then rounds of the same sites."""
    site = os.environ["LOCO_SITE"]
    status, printed = doctor("--parameters", str(NUMEL), "--json", f"{folder}/{site}.json")
    topology = loco.Sites(patience=60.0)
    together = topology.all_ranks()
    reports: dict[str, list[loco.SyncReport]] = {}
    for name, make in {
        "DiLoCo": lambda inner: loco.DiLoCo(inner, topology=topology),
        "PAPER": lambda inner: loco.PulseLoCo(inner, topology=topology, wire="fast", **loco.PAPER),
    }.items():
        start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02
        optimizer = make(Scripted([torch.nn.Parameter(start)], 0, topology.site, SCALE))
        reports[name] = []
        for _ in range(ROUNDS):
            time.sleep(BETWEEN)
            optimizer.inner.step()
            together.swap_records(b"\0", phase="before a round")  # a round waits for the last, whoever it is
            reports[name].append(optimizer.sync())
    return status, printed, reports


@pytest.mark.check(COMMANDS)
@pytest.mark.root
@in_networks
def test_its_figures_are_within_a_fifth_of_what_rounds_then_take(tmp_path: Path) -> None:
    conditions = Conditions(delay=ROUND_TRIP / 2, rate=RATE)
    told = in_network(conditions, examined_then_trained, {name: {} for name in SITES}, str(tmp_path))
    for status, printed, _ in told:
        assert (status, findings(printed)) == (0, [])
        assert printed.endswith("ready: nothing was found that is in the way of a training\n")
    found = json.loads((tmp_path / "paris.json").read_text())
    print(told[0][1])
    for link in found["links"]:
        assert link["bytes_per_second"] == pytest.approx(RATE, rel=0.2)
        assert median(link["round_trips"]) == pytest.approx(ROUND_TRIP, rel=0.2)
    for name in ("DiLoCo", "PAPER"):
        rounds = [site[name][1:] for *_, site in told]
        took = median(max(sum(one.seconds.values()) for one in each) for each in zip(*rounds, strict=True))
        predicted = predicted_for(name, rounds[0][-1], found)
        print(name, f"predicted {predicted:.3f} s, took {took:.3f} s")
        assert predicted == pytest.approx(took, rel=0.2)


def predicted_for(name: str, seen: loco.SyncReport, found: dict[str, Any]) -> float:
    """Seconds of a round with the bytes of one that was seen: how many these are, is up to the training."""
    work = Work.read(found["work"][name])
    if name == "DiLoCo":
        (shown,) = (one for one in found["rounds"] if one["method"] == name)
        assert shown["sent_bytes"] == pytest.approx(seen.sent_bytes, rel=0.01)  # but for records and headers
        return shown["total"]
    # Of the payload and of the sums a site sends two thirds: the rest is its own slice.
    payload = seen.payload_bytes / NUMEL * 1.5
    sums = seen.sent_bytes / NUMEL * 1.5 - payload
    of_four = payload + (sums - payload) * 3 / 2  # as the table has it
    method = methods.Method(name=name, density=seen.density, payload=payload, sums=of_four)
    work.codecs = {FAST.name: work.codecs[FAST.name]}  # in which it was sent
    predicted = predict(method, NUMEL, len(SITES), Costs(**found["costs"]), work)
    assert predicted.sent_bytes == pytest.approx(seen.sent_bytes, rel=0.02)  # but for the blocks' counts
    return predicted.total


# ---- closed ports ----


@pytest.mark.root
@in_networks
def test_a_closed_port_is_named_on_both_sides_and_is_no_traceback() -> None:
    conditions = Conditions(open_ports=frozenset({MEETING}))
    told = in_network(conditions, doctor, {"berlin": {}, "paris": {}}, *QUICK)
    for status, printed in told:
        assert status == command.FOUND
        (only,) = findings(printed)
        assert "paris can't reach berlin at 10.0.0.1:" in only
        assert "open that port to paris. LOCO_PORTS=" in only


@pytest.mark.check(COMMANDS)
@pytest.mark.root
@in_networks
def test_a_port_that_is_closed_in_the_other_direction_is_found_too() -> None:
    conditions = Conditions(open_ports=frozenset({MEETING, 29511}))
    variables = {"berlin": {"LOCO_PORTS": "29511"}, "paris": {"LOCO_PORTS": "29512"}}
    told = in_network(conditions, doctor, variables, *QUICK)
    for status, printed in told:
        assert status == command.FOUND
        (only,) = findings(printed)
        assert "site berlin can't reach site paris at 10.0.0.2:29512 (it does not answer)" in only


# ---- sites that are not as they should be ----


def examined(rank: int, wrong: Mapping[str, str]) -> tuple[int, str]:
    """By the doctor, on a site with something wrong."""
    what = wrong.get(os.environ["LOCO_SITE"], "")
    now = time.time
    if what == "clock":
        time.time = lambda: now() - 90
    elif what == "version":
        facts.VERSION = "0.0.9"
    elif what == "wire":
        facts.records.VERSION = 8
    elif what == "compiler":
        os.environ.pop("CC", None)
        os.environ["PATH"] = ""
    return doctor(*QUICK)


@pytest.mark.check(COMMANDS)
def test_a_wrong_clock_and_a_missing_compiler_are_found() -> None:
    wrong = {"paris": "clock", "rome": "compiler"}
    told = [one for (one,) in run_worlds(SITES, 1, examined, wrong)]
    for status, printed in told:
        assert status == command.FOUND
        found = findings(printed)
        for says in (
            r"rome: rounds use plain torch, .* slower: .*Install gcc or clang",
            r"rome: a rank counts as dead, .*interpreter lock",
            r"the clock of paris is 90\.0 s behind most: let NTP set it",
        ):
            assert sum(re.search(says, one) is not None for one in found) == 1, says
        assert len(found) == 3
    assert len({printed[printed.index("\nsite ") :] for _, printed in told}) == 1  # one report for all


@pytest.mark.parametrize(
    ("what", "says"), [("version", "0.1.0 on berlin, 0.0.9 on paris"), ("wire", ", 8 on paris")]
)
def test_a_wrong_version_is_found_and_the_links_are_not_measured(what: str, says: str) -> None:
    told = [one for (one,) in run_worlds(["berlin", "paris"], 1, examined, {"paris": what})]
    for status, printed in told:
        assert status == command.FOUND
        first, second = findings(printed)
        assert says in first
        assert "install the same loco on all" in first
        assert "the links were not measured" in second


@pytest.mark.check(COMMANDS)
def test_the_ranks_of_a_site_measure_together_and_its_first_one_reports() -> None:
    told = run_worlds(["berlin", "paris"], 2, examined, {})
    for (status, printed), (other_status, others) in told:
        assert (status, other_status, others) == (0, 0, "")
        assert "2 sites of 2 ranks:" in printed
        assert printed.endswith("ready: nothing was found that is in the way of a training\n")
