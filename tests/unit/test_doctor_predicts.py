"""What `python -m loco doctor` computes from what it has measured."""

import csv
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from loco.commands.doctor import report
from loco.commands.doctor.command import main
from loco.commands.doctor.examination import Examination
from loco.commands.doctor.facts import Facts, clock_offsets, clock_problems, own_facts, version_problems
from loco.commands.doctor.links import FIRST, goes_on, pairs_by_round, rate_of
from loco.commands.doctor.methods import METHODS, Method
from loco.commands.doctor.network import Network
from loco.commands.doctor.ports import port_problems
from loco.commands.doctor.rounds import Costs, predict
from loco.commands.doctor.work import CodecWork, Work, slowest
from loco.exchange.stream import AHEAD
from loco.wire.framing import Frames

RL = Path(__file__).parents[2] / "experiments/results/rl"
DILOCO = METHODS[0]
MBYTE = 1_000_000
# A link of 10 MB/s, 20 ms away.
COSTS = Costs(one_way=0.02, store=0.04, together=[(MBYTE, 0.12), (10 * MBYTE, 1.02)])


def work(**codecs: CodecWork) -> Work:
    return Work(encode=1e-9, apply=2e-9, codecs=codecs)


def no_work(*names: str) -> Work:
    none = CodecWork(seal=0.0, open=0.0, add=0.0)
    return Work(encode=0.0, apply=0.0, codecs=dict.fromkeys(names, none))


@pytest.mark.parametrize("sites", [2, 3, 4, 7, 8])
def test_every_pair_is_measured_once_and_no_site_is_in_two_pairs_at_a_time(sites: int) -> None:
    rounds = pairs_by_round(sites)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(sites), 2))
    for pairs in rounds:
        assert len({site for pair in pairs for site in pair}) == 2 * len(pairs)
    assert len(rounds) == sites - 1 + sites % 2


def test_a_rate_is_that_of_the_last_bytes_without_latency_and_slow_start() -> None:
    assert rate_of([(FIRST, 0.5)]) == FIRST / 0.5
    assert rate_of([(MBYTE, 0.62), (4 * MBYTE, 0.92)]) == pytest.approx(10 * MBYTE)
    assert rate_of([(MBYTE, 0.9), (4 * MBYTE, 0.8)]) == 5 * MBYTE  # the one before was disturbed


def test_transfers_grow_until_they_take_long_or_no_longer_become_quicker() -> None:
    assert goes_on([(FIRST, 0.01)], 1.0)
    assert not goes_on([(FIRST, 5.0)], 1.0)  # a slow link
    assert not goes_on([(MBYTE, 0.3), (4 * MBYTE, 1.2)], 1.0)
    assert goes_on([(MBYTE, 0.8), (4 * MBYTE, 1.2)], 1.0)  # TCP's slow start over a long way
    assert not goes_on([(MBYTE, 3.0), (4 * MBYTE, 4.1)], 1.0)


def test_what_lies_between_and_beyond_what_was_measured() -> None:
    assert COSTS.sending(0) == 0.02
    assert COSTS.sending(MBYTE / 2) == pytest.approx(0.07)
    assert COSTS.sending(10 * MBYTE) == pytest.approx(1.02)
    assert COSTS.sending(100 * MBYTE) == pytest.approx(10.02)


def test_a_dense_round_is_its_bytes_and_the_waits_of_its_messages() -> None:
    numel, sites = 12_000_000, 4
    found = predict(DILOCO, numel, sites, COSTS, no_work("float32"))
    dense = 2 * (sites - 1) * 4 * numel / sites
    assert found.exchange == "dense"
    assert found.sent_bytes == pytest.approx(dense, rel=1e-3)  # and headers
    assert found.seconds["link"] == pytest.approx(dense / (10 * MBYTE) + 0.02, rel=1e-3)
    assert found.seconds["waits"] == pytest.approx(3 * 0.02 + 0.04)  # announcement, sums, vote; the verdict
    assert found.total == pytest.approx(sum(found.seconds.values()))


def test_the_sums_of_a_single_frame_are_a_transfer_of_their_own() -> None:
    found = predict(DILOCO, 1_000_000, 2, COSTS, no_work("float32"))
    assert found.seconds["link"] == pytest.approx(2 * COSTS.sending(found.sent_bytes / 2))
    assert found.seconds["waits"] == pytest.approx(2 * 0.02 + 0.04)


def test_link_and_coding_overlap_but_for_the_first_frame() -> None:
    method = Method(name="x", density=0.1, payload=0.2, sums=0.2)
    numel = 64 << 20  # 32 frames where there are two sites
    link = predict(method, numel, 2, COSTS, no_work("tight")).seconds["link"]
    for coding in (0.1, 0.5, 4.0):
        seal = coding * link / numel * 2  # of half of the elements
        found = predict(method, numel, 2, COSTS, work(tight=CodecWork(seal=seal / 2, open=0.0, add=0.0)))
        assert found.seconds["link"] == link
        took = found.seconds["link"] + found.seconds["code"]
        assert max(link, coding * link) <= took <= 1.1 * max(link, coding * link)


def test_many_short_frames_wait_for_the_way() -> None:
    method = Method(name="x", density=0.1, payload=0.2, sums=0.2)
    near = Costs(one_way=0.001, store=0.0, together=[(MBYTE, 0.1)])
    far = Costs(one_way=0.5, store=0.0, together=[(MBYTE, 0.6)])
    found = [predict(method, 256 << 20, 2, costs, no_work("tight")) for costs in (near, far)]
    assert [one.exchange for one in found] == ["gather", "gather"]
    assert found[0].seconds["waits"] == pytest.approx(2 * 0.001)
    frames = Frames.of(256 << 20).count  # of which AHEAD fly at once
    late = 0.5 - found[1].seconds["link"] / frames
    assert late > 0
    assert found[1].seconds["waits"] == pytest.approx(2 * 0.5 + (frames - AHEAD) * late / AHEAD)


def test_the_code_is_the_quicker_one_as_wire_auto_has_it() -> None:
    method = METHODS[2]
    slow = CodecWork(seal=1e-6, open=1e-6, add=0.0)
    quick = CodecWork(seal=1e-10, open=1e-10, add=0.0)
    lan = Costs(one_way=1e-4, store=1e-4, together=[(MBYTE, 0.001)])
    assert predict(method, 10 * MBYTE, 4, lan, work(tight=slow, fast=quick)).wire == "fast"
    assert predict(method, 10 * MBYTE, 4, COSTS, work(tight=quick, fast=quick)).wire == "tight"


def test_a_round_waits_for_the_slowest_and_uses_what_all_have() -> None:
    one = work(tight=CodecWork(seal=1.0, open=2.0, add=3.0), fast=CodecWork(seal=1.0, open=1.0, add=1.0))
    other = work(fast=CodecWork(seal=0.5, open=4.0, add=1.0))
    found = slowest([one, other])
    assert found.codecs == {"fast": CodecWork(seal=1.0, open=4.0, add=1.0)}


def stored(study: str, label: str) -> dict[str, Any]:
    with (RL / study / "results.csv").open() as file:
        (row,) = (one for one in csv.DictReader(file) if one["label"] == label)
    return {name: float(row[name]) for name in ("density", "payload_per_parameter", "sent_bytes")}


@pytest.mark.parametrize(
    ("name", "study", "label"),
    [
        ("PulseLoCo", "paper", "PULSELoCo"),
        ("PAPER", "equal-arithmetic", "PULSELoCo, as published"),
        ("saving 0.25", "saving", "PULSELoCo, saving 0.25"),
        ("saving 1", "saving", "PULSELoCo, saving 1"),
    ],
)
def test_the_table_of_methods_is_that_of_the_stored_runs(name: str, study: str, label: str) -> None:
    (method,) = (one for one in METHODS if one.name == name)
    row = stored(study, label)
    sent = row["sent_bytes"] / 30 / 828_544  # rounds, parameters
    rounded = 5e-3  # the table has three digits
    assert method.density == pytest.approx(row["density"], rel=rounded)
    assert method.payload == pytest.approx(row["payload_per_parameter"], rel=rounded)
    assert method.sums == pytest.approx(sent / 0.75 - row["payload_per_parameter"], rel=rounded)


def test_a_setting_is_timed_with_its_own_gate() -> None:
    gates = {one.name: one.gate for one in METHODS}
    assert gates["DiLoCo"] is None
    assert {name: gate.gain for name, gate in gates.items() if gate} == {
        "PulseLoCo": 3.5,
        "PAPER": 1.0,
        "saving 0.25": 2.0,
        "saving 1": 1.0,
    }


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        ([0.0, 0.01, -0.02], []),
        ([0.0, 90.0, 0.01], ["the clock of b is 90.0 s ahead of most"]),
        ([0.0, 90.0, 90.0], ["the clock of a is 90.0 s behind most"]),
        ([0.0, -5.0], ["the clocks of a and b are 5.0 s apart"]),
    ],
)
def test_the_clock_that_is_wrong_is_named_where_one_can_tell(ahead: list[float], said: list[str]) -> None:
    names = ["a", "b", "c"][: len(ahead)]
    offsets = clock_offsets({(0, site): seconds for site, seconds in enumerate(ahead) if site}, len(ahead))
    assert [one.partition(":")[0] for one in clock_problems(names, offsets)] == said


def test_another_versions_facts_may_be_fewer_or_more() -> None:
    mine = own_facts("berlin")
    other = Facts.read({"name": "paris", "loco": "9.0", "unheard of": 1, "wire": mine.wire})
    assert other.torch == "?"
    (only,) = version_problems([mine, other])
    assert only.startswith(f"the sites have different versions of loco ({mine.loco} on berlin, 9.0 on paris)")
    assert version_problems([mine, mine]) == []


def test_of_a_closed_port_the_two_ends_are_believed() -> None:
    closed, consequence = "b can't reach a at 10.0.0.1:5", "another rank closed its new connection"
    assert port_problems(["", "", ""]) == []
    (only,) = port_problems([closed, closed, consequence])
    assert only.startswith(closed + ". ")


def test_ranks_of_a_site_share_its_link() -> None:
    def note(site: int, other: int, rate: float, store: float) -> dict[str, Any]:
        return {
            "round_trips": [[0, 1, [0.04, 0.05]]] if site == 0 else [],
            "ahead": [[0, 1, 0.5]] if site == 0 else [],
            "rates": [[site, other, rate]],
            "together": [[MBYTE, 0.1]],
            "store": store,
        }

    berlin = [note(0, 1, 1e6, 0.0), note(0, 1, 2e6, 0.0)]
    found = Network.of([*berlin, note(1, 0, 4e6, 0.1), note(1, 0, 4e6, 0.1)])
    assert found.rates == {(1, 0): 3e6, (0, 1): 8e6}
    assert found.costs() == Costs(one_way=0.0225, store=0.1, together=[(MBYTE, 0.1)])


def test_a_report_shows_what_was_found() -> None:
    network = Network(
        round_trips={(0, 1): [0.04, 0.05, 0.06]},
        ahead={(0, 1): 0.5},
        rates={(0, 1): 12.5e6, (1, 0): 250e6},
        together=COSTS.together,
        store=0.04,
    )
    found = Examination(
        sites=[Facts(name="berlin", gpus=("H100", "H100")), Facts(name="paris")],
        ranks=2,
        parameters=7_000_000_000,
        problems=[],
        network=network,
        clocks=[0.0, 0.5],
        rounds=[predict(DILOCO, 3_500_000_000, 2, network.costs(), no_work("float32"))],
    )
    said = report.text(found)
    assert "2 × H100" in said
    assert "berlin – paris 50 ms, 40 ms 100 Mbit/s 2 Gbit/s" in " ".join(said.split())
    assert "each site sends 160 Mbit/s to the others" in said  # two ranks of 80
    assert "DiLoCo float32, dense 28 GB 1,400 s" in " ".join(said.split())
    assert report.verdict([]).startswith("ready")
    assert report.verdict(["x", "y"]) == "2 findings:\n1. x\n2. y"


@pytest.mark.parametrize("count", ["", "B", "7x", "0", "-1M", "nan", "infB"])
def test_a_wrong_number_of_parameters_is_a_mistake(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([f"--parameters={count}"])
    assert end.value.code == 2
    assert "7B, 350M or 1000000" in capsys.readouterr().err


def test_who_is_not_told_who_the_sites_are_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOCO_SITES", "LOCO_SITE", "LOCO_AT", "LOCO_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    assert main([]) == 2
    assert "set LOCO_SITES" in capsys.readouterr().err
    monkeypatch.setenv("LOCO_LIGHTHOUSE", "http://10.0.0.1:29510")
    assert main([]) == 2
    assert "leave LOCO_LIGHTHOUSE out" in capsys.readouterr().err
