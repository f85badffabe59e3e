"""From measurements to the table: the arithmetic a reader relies on."""

import csv
import json
from pathlib import Path

import pytest

from experiments.config import CompareConfig, load
from experiments.methods import Method
from experiments.plots import draw_all
from experiments.report import print_table, write
from experiments.results import Evaluation, Result, Round
from loco import SyncReport


def result(name: str, *, final: float, sent: float, momentum: float = 0.9) -> Result:
    rounds = () if name == "ddp" else tuple(round_of(n, density=n / 100) for n in range(1, 5))
    return Result(
        method=Method(name=name, outer_lr=0.7, outer_momentum=momentum),
        ranks=4,
        sites=4,
        parameters=1000,
        steps=32,
        evaluations=(
            Evaluation(step=0, loss=2.0, sent_bytes=0.0),
            Evaluation(step=32, loss=final, sent_bytes=sent),
        ),
        rounds=rounds,
        one_step_density=0.01,
        sent_bytes=sent,
        received_bytes=sent,
        bytes_source="kernel" if name == "ddp" else "counted",
        accounted_bytes=sent,
        kernel_sent_bytes=sent * 1.01,
        exchange_seconds=1.5,
        round_seconds=36.0,
        step_seconds=0.5,
    )


def round_of(number: int, *, density: float) -> Round:
    return Round(
        round=number,
        step=8 * number,
        density=density,
        residual_norm=0.1,
        payload_bytes=10.0,
        sent_bytes=30.0,
        received_bytes=30.0,
    )


RESULTS = [
    result("ddp", final=1.9, sent=80e6),
    result("diloco", final=1.8, sent=10e6),
    result("pulseloco", final=1.85, sent=2e6),
    result("diloco", final=1.95, sent=10e6, momentum=0.0),
    result("pulseloco", final=1.94, sent=1e6, momentum=0.0),
]


def report(*, entries: int, norm: float, sent: int) -> SyncReport:
    return SyncReport(
        round=3,
        numel=100,
        entries=entries,
        density=entries / 100,
        wire="tight",
        exchange="owner",
        payload_bytes=sent,
        sent_bytes=sent,
        received_bytes=sent,
        site_bytes=0,
        dense_bytes=600,
        residual_norm=norm,
        seconds={"encode": 0.0, "exchange": 0.0, "apply": 0.0},
    )


def test_projected_hours_are_compute_plus_rounds_plus_bytes_over_the_rate() -> None:
    # 32 steps of 0.5 s, 36 s in rounds, 80 MB at 100 Mbit/s = 6.4 s.
    assert RESULTS[0].projected_hours(1e8, step_seconds=0.5) == pytest.approx((16 + 36 + 6.4) / 3600)


def test_density_is_the_mean_of_the_second_half_of_the_rounds() -> None:
    assert RESULTS[1].density == pytest.approx(0.035)
    assert RESULTS[0].density is None


def test_a_round_joins_sites_by_mean_and_residuals_of_one_site_by_squares() -> None:
    reports = [
        report(entries=10, norm=3.0, sent=100),
        report(entries=20, norm=4.0, sent=300),
    ]
    of_two_sites = Round.joined(8, reports, sites=2)
    assert (of_two_sites.density, of_two_sites.sent_bytes) == (0.15, 200.0)
    assert of_two_sites.residual_norm == pytest.approx((25 / 2) ** 0.5)
    assert Round.joined(8, reports, sites=1).residual_norm == pytest.approx(5.0)


def test_the_table_compares_with_the_diloco_of_the_same_outer_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(RESULTS)
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("PULSELoCo ("))
    # final, gain, minus DiLoCo's, MB, below DDP, below DiLoCo, density
    assert row.split()[5:12] == ["1.8500", "0.1500", "+0.05000", "2.00", "40.0x", "5.0x", "3.5%"]
    assert "PULSELoCo's loss ends 0.05000 above DiLoCo's" in out
    assert "PULSELoCo's loss ends 0.01000 below DiLoCo's" in out
    assert "75.0% of its gain, for 20.0% of its bytes" in out
    assert "exceed the ring formula (DDP) by 1.00% and what loco counted by 1.00%" in out


def test_a_single_method_has_a_table_without_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(RESULTS[:1])
    assert capsys.readouterr().out.count(" -") >= 3


def test_files_hold_every_figure(tmp_path: Path) -> None:
    write(tmp_path, load(CompareConfig, []), RESULTS)
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [run["method"] for run in runs] == [row["method"] for row in rows]
    assert len(runs) == len(RESULTS)
    assert runs[2]["loss_minus_diloco"] == pytest.approx(0.05)
    assert float(rows[2]["ddp_bytes_ratio"]) == pytest.approx(40)
    assert [point["density"] for point in runs[2]["rounds"]] == [0.01, 0.02, 0.03, 0.04]
    assert load(CompareConfig, [f"config={tmp_path / 'config.yaml'}"]) == load(CompareConfig, [])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_plots_are_drawn_for_any_set_of_methods(tmp_path: Path, count: int) -> None:
    paths = draw_all(RESULTS[:count], tmp_path)
    names = {"loss_by_steps.png", "loss_by_bytes.png"} | ({"rounds.png"} if count > 2 else set())
    assert {path.name for path in paths} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
