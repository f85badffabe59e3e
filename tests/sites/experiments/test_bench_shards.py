"""The benchmark of sharded sites compares what is equal: it holds one θ in all its arrangements."""

from pathlib import Path

import pytest
from selection import BASELINES

from experiments.bench import shards
from experiments.bench.measuring import read


@pytest.mark.check(BASELINES)
def test_two_ranks_share_what_one_rank_holds_and_sends(tmp_path: Path) -> None:
    shards.main(["--layers", "2", "--width", "64", "--repeats", "1", "--out", str(tmp_path)])
    whole, ddp, fsdp2 = read(tmp_path / "shards.csv")
    assert [row["arrangement"] for row in (whole, ddp, fsdp2)] == ["whole", "ddp", "fsdp2"]
    assert whole["state_bytes"] == 12 * whole["numel"]
    assert ddp["state_bytes"] == fsdp2["state_bytes"] == 6 * whole["numel"]
    assert 0 < fsdp2["sent_bytes"] < whole["sent_bytes"]
    assert whole["site_bytes"] == 0
    assert fsdp2["site_bytes"] < 1024 < ddp["site_bytes"]
