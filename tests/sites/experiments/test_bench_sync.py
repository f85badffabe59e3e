"""The benchmark of `loco.sync`: its arithmetic, and a short run of each part."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selection import COMMANDS

from experiments import weight_formats
from experiments.bench import sync
from experiments.bench.measuring import read
from experiments.bench.processes.namespaces import GBIT, why_not
from experiments.bench.simulation.simulator import GOODPUT
from experiments.bench.sync import engine
from experiments.bench.sync.projection import check
from experiments.bench.sync.simulator import OBJECTS, OWN, RELAYS, SERVER, Costs, Setting, stages
from experiments.bench.sync.sizes import ENTROPY, OURS
from experiments.bench.sync.speed import scattered_bytes
from experiments.bench.sync.traces import Model, as_bfloat16, flat, noise_versions
from loco.kernels import Changes

COSTS = Costs(find_pack=1e-9, unpack=1e-9, swap=1e-10, entry_bytes=0.75)


def test_a_scatter_moves_the_cache_lines_that_it_touches() -> None:
    positions = torch.tensor([0, 31, 32, 1000])  # 32 BF16 weights lie in a line
    changes = Changes(positions, torch.zeros(4, dtype=torch.int16))
    assert scattered_bytes(changes) == 3 * 128 + 4 * (8 + 4)


def test_a_model_repeats_its_tile() -> None:
    old, new = (flat(version) for version in noise_versions(2048, 1e-6, count=2))
    model = Model(5000, [old, new], torch.float32)
    model.show(1)
    assert torch.equal(model.whole[2048:4096].bfloat16(), as_bfloat16(new))
    assert torch.equal(torch.cat(model.pieces), model.whole)


def test_one_link_carries_what_all_subscribers_read() -> None:
    at = Setting(rate=GBIT, store=SERVER)
    by_server = stages(COSTS, at)
    by_relays = stages(COSTS, replace(at, store=RELAYS))
    assert by_server["egress_s"] == pytest.approx(100 * by_server["upload_s"])
    assert by_relays["egress_s"] + by_relays["relays_s"] == pytest.approx(by_server["egress_s"] / 5)
    by_objects = stages(COSTS, replace(at, store=OBJECTS))
    assert by_objects["egress_s"] == 0
    assert by_objects["download_s"] == pytest.approx(256 * by_objects["upload_s"])
    assert by_objects["unpack_s"] == pytest.approx(1e12 * 1e-9 / 128)


def test_a_patch_over_a_link_is_predicted_from_its_rate_and_one_core_at_each_end() -> None:
    row = {"rate_mbit": 8, "numel": 1_000_000_000, "density": 0.01, "what": "patch", "p50": 5.0}
    (seen,) = check(COSTS, [row, row | {"what": "anchor"}])
    link = 1e9 * 0.01 * 0.75 / (1e6 * GOODPUT)
    assert seen["predicted_s"] == pytest.approx(1.0 + 1.0 + 0.1 + 0.003 + link)
    assert seen["time_ratio"] == pytest.approx(seen["predicted_s"] / 5.0)
    at = Setting(rate=GBIT, store=OWN)
    assert stages(COSTS, at) == stages(COSTS, replace(at, store=SERVER)) | {"upload_s": 0.0}


def test_formats_that_need_what_is_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_formats.importlib.util, "find_spec", lambda name: None)
    assert list(weight_formats.usable_formats()) == ["int32 + BF16"]


def test_a_pause_is_said_in_tokens_and_a_scatter_by_the_bytes_that_it_must_move() -> None:
    took = {engine.COPY: [1.0, 2.0, 4.0], engine.APPLY: [3.0, 1.0, 1.0], engine.TOKEN: [0.5, 0.5, 9.0]}
    copy, scatter, token = engine.shares(took, numel=100, scattered=100.0)
    assert copy["copy_bytes_per_s"] == 200.0
    assert (copy["share_of_copy"], scatter["share_of_copy"]) == (1.0, 0.5)
    assert (scatter["tokens"], token["tokens"], token["share_of_copy"]) == (2.0, 1.0, None)


def test_without_vllm_the_engine_is_left_out_and_how_to_run_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    sync.main(["--out", str(tmp_path), "--only", "engine"])
    assert ".venv-vllm/bin/python -m experiments.bench sync --only engine" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.check(COMMANDS)
def test_each_part_adds_rows_and_a_plot(tmp_path: Path) -> None:
    # tests/vllm_engine has a run of "engine".
    parts = [p for p in sync.PARTS if p != "engine" and (p != "links" or why_not() is None)]
    sync.main(["--quick", "--out", str(tmp_path), "--only", *parts])
    for part in parts:
        assert read(tmp_path / f"sync_{part}.csv")
        assert (tmp_path / f"sync_{part}.png").exists()
    sizes = [row for row in read(tmp_path / "sync_sizes.csv") if row["apart"] == 8]
    each = {row["by"]: row["bytes_per_entry"] for row in sizes}
    assert each[ENTROPY] < each[OURS] < each["int32 + BF16"] / 6
