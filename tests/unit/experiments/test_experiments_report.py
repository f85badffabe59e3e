"""From measurements to what a person sees: the arithmetic a reader relies on, and the files."""

import csv
import dataclasses
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from selection import PAGES

from experiments import report
from experiments.errors import ExperimentError
from experiments.report import read_document, write_document
from experiments.reporting.page import READING
from experiments.reporting.plots import LOOK, draw_all, pareto, score_by_bytes, score_by_step
from experiments.reporting.results import Evaluation, Result, Round, store
from experiments.reporting.summary import Comparison, Row
from experiments.reporting.table import as_text, columns_of
from experiments.settings.config import CompareConfig, TrainConfig
from experiments.settings.merging import load
from experiments.settings.plan import Run
from experiments.settings.rounds import resolved

FP32_PAYLOAD = 3000.0  # of 1000 parameters: one of four sites sums a quarter itself


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels take time, and nobody looks at these plots."""
    monkeypatch.setitem(LOOK, "figure.dpi", 40)


@pytest.fixture
def unplotted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw_all", lambda comparison, folder: [])


def made(
    label: str,
    final: float,
    *,
    method: str = "pulseloco",
    seed: int = 0,
    first: float = 0.4,
    sampled: float | None = None,
    sent: float = 1e6,
    payload: float = 200.0,
    metric: str = "pass@1",
    rounds: int = 4,
    **config: Any,
) -> Result:
    """A run of 32 steps in which only a few figures matter."""
    dense = method == "diloco"
    steps = config.get("steps", 32)
    has_rounds = method not in ("ddp", "single")
    scores = [first + (final - first) * part / 4 for part in range(5)]
    second = first if sampled is None else sampled
    return Result(
        label=label,
        config=Run(label, resolved(TrainConfig(method=method, seed=seed, nproc=4))).stored()
        | {"steps": steps}
        | config,
        metric=metric,
        higher_is_better=metric == "pass@1",
        ranks=4,
        sites=4,
        parameters=1000,
        evaluations=tuple(
            Evaluation(
                step=steps * part // 4,
                scores={metric: score}
                | ({"sampled": 0.3 + (second - 0.3) * part / 4} if metric == "pass@1" else {}),
                sent_bytes=0.0 if method == "single" else sent * part / 4,
            )
            for part, score in enumerate(scores)
        ),
        rewards=tuple(round(0.3 + 0.01 * number, 4) for number in range(rounds))
        if metric == "pass@1"
        else (),
        rounds=tuple(
            Round(
                round=number,
                step=8 * number,
                density=1.0 if dense else number / 100,
                residual_norm=0.0 if dense else number / 10,
                payload_bytes=FP32_PAYLOAD if dense else payload,
                sent_bytes=sent / rounds,
                exchange="dense" if dense else "gather",
                union_density=None if method != "pulseloco" else number / 50,
                visible=None if method != "pulseloco" else 0.02,
                age=None if method != "pulseloco" else float(number),
            )
            for number in range(1, rounds + 1)
        )
        if has_rounds
        else (),
        one_step_density=0.01,
        sent_bytes=0.0 if method == "single" else sent,
        received_bytes=0.0 if method == "single" else sent,
        bytes_source="kernel" if method == "ddp" else "counted",
        accounted_bytes=0.0 if method == "single" else sent,
        kernel_sent_bytes=sent * 1.01,
        exchange_seconds=1.5,
        round_seconds=36.0,
        step_seconds=0.5,
        rollout_seconds=10.0,
        seconds=60.0,
        machine={"date": "2026-01-02", "cpu": "A <fast> CPU", "torch": "2.11", "commit": "abc", "load": 1.0},
    )


def several(seeds: int) -> list[Result]:
    """DDP, three DiLoCos and three PULSELoCos, as a comparison has them."""
    found = []
    for seed in range(seeds):
        shift = 0.01 * seed * seed
        found += [
            made("DDP", 0.5 + shift, method="ddp", sent=80e6, seed=seed, sampled=0.36),
            made(
                "DiLoCo plain",
                0.45,
                method="diloco",
                outer_lr=1.0,
                outer_momentum=0.0,
                seed=seed,
                sampled=0.35,
                sent=10e6,
            ),
            made("DiLoCo BF16", 0.6, method="diloco", wire="bfloat16", seed=seed, sampled=0.4, sent=5e6),
            made("DiLoCo", 0.6 + shift, method="diloco", sent=10e6, seed=seed, sampled=0.4),
            made("PULSE & <b>", 0.55 + shift, sent=2e6, seed=seed, sampled=0.38),
            made("Gain 7", 0.6 + 2 * shift, gate_gain=7.0, sent=4e6, payload=800.0, seed=seed, sampled=0.39),
            made("Sparse", 0.5, method="sparseloco", sent=2e6, payload=100.0, seed=seed, sampled=0.36),
        ]
    return found


def of_text(seeds: int = 1) -> list[Result]:
    return [
        one
        for seed in range(seeds)
        for one in (
            made("DiLoCo", 1.6, method="diloco", first=2.0, metric="loss", seed=seed, task="text"),
            made("PULSELoCo", 1.7 + 0.01 * seed, first=2.0, metric="loss", seed=seed, task="text"),
        )
    ]


def row_of(results: Sequence[Result], label: str) -> Row:
    return next(row for row in Comparison.of(results).rows if row.label == label)


def cell(results: Sequence[Result], label: str, title: str) -> str:
    """What a reader sees."""
    comparison = Comparison.of(results)
    column = next(column for column in columns_of(comparison) if column.title == title)
    return column.text(row_of(results, label))


def reported(*, entries: int, norm: float, sent: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("payload_bytes", "sent_bytes"), sent)
    about = {"round": 3, "step": 8, "exchange": "owner", "outer_lr": 7.0, "numel": 100}
    return about | sizes | {"entries": entries, "residual_norm": norm}


def test_projected_hours_are_compute_plus_rollouts_plus_rounds_plus_bytes_over_the_rate() -> None:
    # 32 steps of 0.5 s, 10 s of rollouts, 36 s in rounds, 80 MB at 100 Mbit/s = 6.4 s.
    run = made("DDP", 0.5, method="ddp", sent=80e6)
    assert run.projected_hours(1e8, step_seconds=0.5) == pytest.approx((16 + 10 + 36 + 6.4) / 3600)
    assert row_of([run], "DDP").hours["100 Mbit/s"] == pytest.approx((16 + 10 + 36 + 6.4) / 3600)


def test_a_steady_figure_is_the_mean_of_the_second_half_of_the_rounds() -> None:
    row = row_of(several(1), "Gain 7")
    assert row.density == pytest.approx(0.035)
    assert row.union_density == pytest.approx(0.07)
    assert row.age == pytest.approx(3.5)
    assert row_of(several(1), "DDP").density is None


def test_a_round_joins_sites_by_mean_and_residuals_of_one_site_by_squares() -> None:
    reports = [reported(entries=10, norm=3.0, sent=100), reported(entries=20, norm=4.0, sent=300)]
    of_two_sites = Round.joined(reports, sites=2)
    assert (of_two_sites.density, of_two_sites.sent_bytes) == (0.15, 200.0)
    assert of_two_sites.residual_norm == pytest.approx((25 / 2) ** 0.5)
    assert Round.joined(reports, sites=1).residual_norm == pytest.approx(5.0)


def test_the_reference_is_the_first_fp32_diloco_with_momentum() -> None:
    assert [group.label for group in Comparison.of(several(1)).groups][1] == "DiLoCo plain"
    assert row_of(several(1), "Gain 7").reference == "DiLoCo"


def test_without_momentum_the_first_diloco_is_the_reference() -> None:
    assert row_of(several(1)[:3], "DDP").reference == "DiLoCo plain"


def test_a_label_is_compared_with_the_diloco_of_its_learning_rate_where_there_is_one() -> None:
    results = [
        made("DiLoCo", 0.6, method="diloco"),
        made("DiLoCo slow", 0.5, method="diloco", lr=5e-7),
        made("PULSE slow", 0.45, lr=5e-7),
        made("PULSE fast", 0.5, lr=1e-5),
    ]
    assert row_of(results, "PULSE slow").reference == "DiLoCo slow"
    assert row_of(results, "PULSE slow").share is not None
    assert row_of(results, "PULSE fast").reference == "DiLoCo"
    assert cell(results, "PULSE slow", "reference") == "DiLoCo slow"
    assert row_of(results, "PULSE slow").differs_in == ()
    assert cell(results, "PULSE fast", "differs in") == "lr"


def test_ratios_are_the_references_bytes_over_the_labels() -> None:
    row = row_of(several(1), "PULSE & <b>")
    assert row.below_ddp == pytest.approx(40)
    assert row.below_diloco == pytest.approx(5)
    assert row.below_fp32 == pytest.approx(20)  # payloads, not all that is sent
    dense = row_of(several(1), "DiLoCo")
    assert dense.below_fp32 == pytest.approx(1)  # with the quarter that stays where it is


def test_a_payload_is_whole_whatever_the_exchange() -> None:
    """What a site keeps for itself, where sites sum slices, counts as the rest does."""
    result = several(1)[-1]
    gathered = dataclasses.replace(result.rounds[-1], payload_bytes=300.0, exchange="gather")
    owned = dataclasses.replace(gathered, payload_bytes=225.0, exchange="owner")
    for one in (gathered, owned):
        assert dataclasses.replace(result, rounds=(one,)).payload_per_parameter == pytest.approx(0.3)


def test_shares_of_the_gain_by_both_scores() -> None:
    row = row_of(several(1), "PULSE & <b>")
    assert row.share is not None
    assert row.share_second is not None
    assert row.share.mean == pytest.approx(0.15 / 0.2)
    assert row.share_second.mean == pytest.approx(0.08 / 0.1)


def test_seeds_are_summarised_by_label_and_paired() -> None:
    # Gain 7 − DiLoCo is 0.00, 0.01, 0.04 for the three seeds: mean 0.016667, standard deviation 0.020817.
    row = row_of(several(3), "Gain 7")
    assert row.seeds == (0, 1, 2)
    assert row.minus is not None
    assert row.minus.mean == pytest.approx(0.05 / 3)
    assert row.minus.half == pytest.approx(4.30265 * 0.0208167 / 3**0.5, rel=1e-4)
    assert row.interval_of == "seeds"


def test_with_one_seed_the_interval_is_the_held_out_sets_and_said_to_be() -> None:
    row = row_of(several(1), "DiLoCo")
    assert row.interval_of == "held-out"
    assert row.final.half == pytest.approx(1.96 * (0.6 * 0.4 / 2048) ** 0.5, rel=2e-3)
    assert row.minus is None
    assert "does not say how far another seed would end up" in READING


def test_a_loss_gains_by_falling_and_has_no_interval_of_one_seed() -> None:
    row = row_of(of_text(), "PULSELoCo")
    assert row.gain.mean == pytest.approx(0.3)
    assert row.minus is not None
    assert row.minus.mean == pytest.approx(0.1)
    assert row.share is not None
    assert row.share.mean == pytest.approx(0.75)
    assert (row.final.half, row.interval_of, row.share_second) == (None, None, None)
    titles = ("loss", "− reference", "gain kept")
    assert [cell(of_text(), "PULSELoCo", title) for title in titles] == ["1.7000", "+0.1000", "75%"]


@pytest.mark.check(PAGES)
@pytest.mark.parametrize(
    "results",
    [
        # 0.4 to 0.41 of 2,048 problems, which leave ± 0.021; sampled answers gained next to nothing.
        [made("DiLoCo", 0.41, method="diloco", sampled=0.3 + 1e-9), made("PULSE", 0.43, sampled=0.31)],
        # Three of 20 problems.
        [
            made(label, 0.55, method=method, sampled=0.35, arithmetic={"held_out": 20})
            for label, method in (("DiLoCo", "diloco"), ("PULSE", "pulseloco"))
        ],
        [
            made("DiLoCo", 1.9999, method="diloco", first=2.0, metric="loss"),
            made("PULSE", 1.9, first=2.0, metric="loss"),
        ],
    ],
    ids=["a reference that hardly gains", "few problems", "a loss"],
)
def test_of_a_gain_that_is_noise_no_share_is_kept(tmp_path: Path, results: list[Result]) -> None:
    comparison = Comparison.of(results)
    assert all(row.share is None and row.share_second is None for row in comparison.rows)
    assert "gain kept" not in as_text(comparison, width=300)
    assert "frontier" not in {plot.path.stem for plot in draw_all(comparison, tmp_path)}


def test_a_gain_beyond_either_interval_is_one() -> None:
    """Two seeds that differ leave a wide interval over seeds, and the held-out set a narrow one."""
    apart = [made("DiLoCo", final, method="diloco", seed=k) for k, final in enumerate((0.6, 0.7))]
    assert Comparison.of(apart).rows[0].gain.half == pytest.approx(12.7062 * 0.05)
    alike = [made("DiLoCo", 0.405, method="diloco", seed=k) for k in range(3)]
    for results in (apart, alike):
        assert row_of(results, "DiLoCo").share is not None


def test_a_gap_is_shown_with_what_seeds_differ_by() -> None:
    # 0.05 below, the same for each seed.
    assert cell(several(3), "PULSE & <b>", "− reference") == "-5.0 ± 0.0"


def test_byte_counts_are_checked_with_the_kernels() -> None:
    assert cell(several(1), "DDP", "kernel's count") == "+1.00%"
    assert cell(several(1), "DiLoCo", "kernel's count") == "+1.00%"
    # With several ranks per site the kernel sees what travels inside the sites, too.
    uncounted = [dataclasses.replace(result, kernel_sent_bytes=None) for result in several(1)]
    inside = [dataclasses.replace(result, sites=2) for result in several(1)]
    for results in (uncounted, inside):
        assert all(row.kernel_beyond is None for row in Comparison.of(results).rows)


def test_a_narrow_terminal_gets_fewer_columns_and_every_label() -> None:
    comparison = Comparison.of(several(3))
    wide, narrow = as_text(comparison, width=200), as_text(comparison, width=70)
    assert len(narrow.splitlines()[1]) <= 70 < len(wide.splitlines()[1])
    for group in comparison.groups:
        assert f"\n{group.label}" in narrow


def test_different_scores_are_refused() -> None:
    with pytest.raises(ExperimentError, match="some runs measure loss and some pass@1"):
        Comparison.of([*several(1), *of_text()])
    with pytest.raises(ExperimentError, match="no finished runs"):
        Comparison.of([])


def test_pareto_keeps_what_nothing_beats() -> None:
    points = [(1.0, 1.0), (5.0, 0.9), (5.0, 0.95), (2.0, 0.95), (20.0, 0.7), (19.0, 0.7)]
    assert pareto(points) == [0, 2, 4]


def test_the_legend_is_in_the_order_of_the_lines_ends() -> None:
    figure = score_by_step(Comparison.of([made("low", 0.5), made("high", 0.9), made("middle", 0.7)]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["high", "middle", "low"]
    plt.close(figure)


def test_results_json_holds_every_run_in_full(tmp_path: Path) -> None:
    results = several(2)
    write_document(Comparison.of(results), tmp_path / "results.json")
    read = read_document(tmp_path / "results.json")
    assert sorted(read, key=lambda r: (r.label, r.seed)) == sorted(results, key=lambda r: (r.label, r.seed))
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["reference"] == "DiLoCo"
    assert document["machine"]["cpu"] == "A <fast> CPU"


def test_results_json_of_sixty_runs_stays_small(tmp_path: Path) -> None:
    results = [made(f"label {n % 12}", 1 / 3, seed=n // 12, rounds=30) for n in range(60)]
    write_document(Comparison.of(results), tmp_path / "results.json")
    assert (tmp_path / "results.json").stat().st_size < 240_000


@pytest.mark.usefixtures("unplotted")
def test_results_csv_has_a_row_for_each_label_with_all_digits(tmp_path: Path) -> None:
    report.write_all(tmp_path, load(CompareConfig, []), several(3))
    with (tmp_path / "results.csv").open() as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    comparison = Comparison.of(several(3))
    assert list(rows) == [row.label for row in comparison.rows]
    for row in comparison.rows:
        assert float(rows[row.label]["final"]) == row.final.mean
        assert float(rows[row.label]["final_half"]) == row.final.half
        assert rows[row.label]["seeds"] == "0 1 2"
    assert float(rows["PULSE & <b>"]["below_fp32"]) == pytest.approx(20)
    assert rows["DDP"]["below_fp32"] == ""
    assert load(CompareConfig, [f"preset={tmp_path / 'config.yaml'}"]) == load(CompareConfig, [])


class Outside(HTMLParser):
    """What a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "object", "a"):
            self.found.append(tag)
        self.found += [
            f"{name}={value}"
            for name, value in attrs
            if name in ("src", "href", "srcset") and not str(value).startswith("data:image/png;base64,")
        ]


def test_the_page_is_well_formed_whole_and_names_every_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write_all(tmp_path, load(CompareConfig, []), several(2))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    outside = Outside()
    outside.feed(text)
    assert outside.found == []
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    document = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    cells = {cell.text for cell in document.iter("td")}
    assert {result.label for result in several(1)} <= cells  # unescaped by the parser
    assert "A <fast> CPU" in cells
    assert {"gate_gain", "outer_momentum"} <= {cell.text for cell in document.iter("th")}
    assert len(list(document.iter("img"))) == len(list(tmp_path.glob("*.png"))) == 4
    assert f"preset={tmp_path}/config.yaml" in text
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("PULSE & <b>"))
    assert "80% ± 0%" in line
    assert f"{tmp_path}/report.html" in out


KEPT = Path(__file__).parents[3] / "experiments/results/rl"
# Pixels: a digit of the tables' font takes 7.2, a cell's padding 13.4, the padding of the page 40.
DIGIT, CELL, WINDOW = 7.2, 13.4, 800 - 40


@pytest.mark.check(PAGES)
@pytest.mark.parametrize("folder", sorted(path.name for path in KEPT.iterdir()))
def test_no_table_of_results_is_wider_than_a_small_window(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever can't wrap: cells but the first of a row, and the words of a title."""
    monkeypatch.setattr(report, "draw_all", lambda comparison, folder: [])
    report.rebuild([KEPT / folder], tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    document = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    tables = [table for table in document.iter("table") if table.get("class") != "settings"]
    assert tables
    for table in tables:
        titles = [(cell.text or "").split() for cell in table.iter("th")]
        rows = [[cell.text or "" for cell in row] for row in table.iter("tr")][1:]
        columns = zip(*rows, strict=True)
        words = [max(map(len, title)) for title in titles]
        cells = [max(map(len, column)) for column in columns]
        cells[0] = max(len(word) for row in rows for word in row[0].split())
        assert sum(DIGIT * max(pair) + CELL for pair in zip(words, cells, strict=True)) <= WINDOW


@pytest.mark.check(PAGES)
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_plots_are_drawn_for_any_number_of_labels_and_seeds(tmp_path: Path, count: int, seeds: int) -> None:
    results = []
    for seed in range(seeds):
        labels = several(seeds)[7 * seed : 7 * seed + 7]
        more = [made(f"Margin {n}", 0.5 + n / 100, gate_margin=n / 10, seed=seed) for n in range(1, 6)]
        results += [*labels, *more][:count]
    names = {plot.path.stem for plot in draw_all(Comparison.of(results), tmp_path)}
    expected = {"score_by_step", "score_by_bytes"}
    expected |= {"frontier"} if count > 1 else set()
    expected |= {"gate"} if count > 3 else set()
    assert names == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_one_point_can_be_seen() -> None:
    one = made("PULSELoCo", 0.5)
    for points, marker in ((1, "o"), (30, "")):
        evaluations = (one.evaluations[0], *(one.evaluations[-1:] * points))
        figure = score_by_bytes(Comparison.of([dataclasses.replace(one, evaluations=evaluations)]))
        assert figure is not None
        assert figure.axes[0].lines[0].get_marker() == marker
        plt.close(figure)


@pytest.mark.parametrize(
    ("density", "said"), [(0.0023, "0.23%"), (0.016, "1.6%"), (0.11, "11%"), (1.0, "100%"), (0.0, "0%")]
)
def test_the_gates_share_is_said_with_enough_digits(density: float, said: str) -> None:
    one = made("PULSELoCo", 0.5)
    rounds = tuple(dataclasses.replace(r, density=density) for r in one.rounds)
    assert cell([dataclasses.replace(one, rounds=rounds)], "PULSELoCo", "density") == said


@pytest.mark.check(PAGES)
def test_a_plot_that_has_nothing_to_show_is_not_left_from_before(tmp_path: Path) -> None:
    draw_all(Comparison.of([made("PULSELoCo", 0.5)]), tmp_path)
    assert (tmp_path / "gate.png").exists()
    draw_all(Comparison.of([made("DDP", 0.5, method="ddp")]), tmp_path)
    assert not (tmp_path / "gate.png").exists()


@pytest.mark.check(PAGES)
@pytest.mark.parametrize(
    "results",
    [
        [made("one trainer", 0.5, method="single")],
        [made("DDP", 0.5, method="ddp")],
        [made("PULSELoCo", 0.5), made("Gain 7", 0.6, gate_gain=7.0)],
        [made("DiLoCo", 0.3, method="diloco"), made("PULSELoCo", 0.5)],  # a reference that gained nothing
        [made("DDP", 0.5, method="ddp"), made("PULSELoCo", 0.5, seed=1)],
        [made("DiLoCo", 0.5, method="diloco", rounds=1), made("PULSELoCo", 0.4, rounds=1)],
        of_text(3),
    ],
    ids=["single", "DDP", "no DiLoCo", "no gain", "other seeds", "one round", "text"],
)
def test_whatever_is_missing_the_rest_is_shown(
    tmp_path: Path, results: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    report.write_all(tmp_path, load(TrainConfig, []), results)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    out = capsys.readouterr().out
    for result in results:
        assert result.label in out
        assert result.label in text
    assert "None" not in out
    assert "nan" not in out


def keep(results: Sequence[Result], folder: Path) -> None:
    for number, result in enumerate(results):
        store(result, folder / "runs" / f"{number}.json")


@pytest.mark.usefixtures("unplotted")
def test_stored_runs_are_shown_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(several(1), tmp_path / "a")
    (tmp_path / "a" / "runs" / "old.json").write_text('{"label": "of another version"}')
    assert report.main([str(tmp_path / "a")]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^PULSE & <b> .* 80% ", printed.out, re.MULTILINE)
    assert "old.json is not a run of this version: left out" in printed.err
    assert (tmp_path / "a" / "report.html").is_file()
    # Of a folder that is kept with the code, results.json is enough.
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "a" / "results.json").rename(kept / "results.json")
    assert report.main([str(kept)]) == 0
    assert re.search(r"^PULSE & <b> .* 80% ", capsys.readouterr().out, re.MULTILINE)


def test_only_planned_runs_count_where_there_is_a_plan(tmp_path: Path) -> None:
    config = load(CompareConfig, ["runs.New.method=pulseloco", "runs.Old.method=diloco", "steps=32"])
    planned = Run("", resolved(load(TrainConfig, ["steps=32", "nproc=4"]))).stored()
    for label, changes in {"Old": {"method": "diloco"}, "New": {}, "Gone": {}}.items():
        result = dataclasses.replace(made(label, 0.5), config=planned | changes)
        store(result, tmp_path / "runs" / f"{label.lower()}.seed0.json")
    assert [result.label for result in report.stored_in(tmp_path, config)] == ["New", "Old"]
    assert [result.label for result in report.stored_in(tmp_path, None)] == ["Old", "Gone", "New"]


@pytest.mark.usefixtures("unplotted")
def test_several_folders_are_shown_as_one_comparison(tmp_path: Path) -> None:
    keep([made("DiLoCo", 0.6, method="diloco"), made("PULSE", 0.5)], tmp_path / "a")
    keep(
        [
            made("DiLoCo", 0.9, method="diloco"),  # a seed that the first folder has: that one counts
            made("DiLoCo", 0.62, method="diloco", seed=1),
            made("PULSE", 0.55, gate_gain=7.0),  # another setting by the same name
        ],
        tmp_path / "b",
    )
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b"), f"out={tmp_path / 'both'}"]) == 0
    with (tmp_path / "both" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["seeds"]) for row in rows] == [
        ("DiLoCo", "0 1"),
        ("PULSE", "0"),
        ("PULSE (b)", "0"),
    ]
    assert float(rows[0]["final"]) == pytest.approx(0.61)


def test_mistakes_are_answered_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert report.main([str(tmp_path)]) == 1
    assert "holds no finished runs" in capsys.readouterr().err
    assert report.main([str(tmp_path), str(tmp_path)]) == 1
    assert "add out=" in capsys.readouterr().err
