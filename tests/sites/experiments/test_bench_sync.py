"""The benchmark of `loco.sync`: its arithmetic, and a short run of each part."""

from pathlib import Path

import pytest
import torch
from selection import COMMANDS

from experiments.bench import sync
from experiments.bench.measuring import read
from loco.kernels import Changes


def test_a_scatter_moves_the_cache_lines_that_it_touches() -> None:
    positions = torch.tensor([0, 31, 32, 1000])  # 32 BF16 weights lie in a line
    changes = Changes(positions, torch.zeros(4, dtype=torch.int16))
    assert sync.scattered_bytes(changes) == 3 * 128 + 4 * (8 + 4)


def test_a_model_repeats_its_tile() -> None:
    old, new = sync.noise_versions(2048, count=2)
    assert 0 < int((old != new).sum()) < 200
    model = sync.Model(5000, [old, new], torch.float32)
    model.show(1)
    assert torch.equal(model.whole[2048:4096].bfloat16(), new)
    assert torch.equal(torch.cat(model.pieces), model.whole)


@pytest.mark.check(COMMANDS)
def test_each_part_adds_rows_and_a_plot(tmp_path: Path) -> None:
    sync.main(["--quick", "--out", str(tmp_path)])
    for part in sync.PARTS:
        assert read(tmp_path / f"sync_{part}.csv")
        assert (tmp_path / f"sync_{part}.png").exists()
    speed = {(row["source"], row["work"]): row for row in read(tmp_path / "sync_speed.csv")}
    pack = speed["bfloat16", "pack"]
    assert 0.009 < pack["density"] < 0.011
    assert 0.7 < pack["bytes_per_change"] < 1.0
    assert speed["bfloat16", "copy"]["share_of_copy"] == 1.0
    memory = read(tmp_path / "sync_memory.csv")
    assert [row["what"] for row in memory] == ["anchor", *["patch"] * 7, sync.TRIMMED, "patch"]
    assert all(0 < row["peak_per_weight"] < 8 for row in memory)
