"""The pause of a running engine is measured: a short run."""

from pathlib import Path

import pytest
from plain_engine import keep_weights_plain

from experiments.bench import sync
from experiments.bench.measuring import read
from experiments.bench.sync.engine import APPLY, COPY, FETCH, PAUSE, SWAP, TOKEN


def test_the_pause_is_measured_beside_a_copy_and_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_plain(monkeypatch)  # as the benchmark does, which does not undo it
    sync.main(["--quick", "--out", str(tmp_path), "--only", "engine"])
    rows = {row["work"]: row for row in read(tmp_path / "sync_engine.csv")}
    assert rows.keys() >= {COPY, SWAP, APPLY, PAUSE, FETCH, TOKEN}
    assert rows[TOKEN]["tokens"] == 1.0
    assert rows[COPY]["share_of_copy"] == pytest.approx(1.0)  # a quotient of two that were rounded
    assert 0 < rows[APPLY]["least"] < rows[PAUSE]["least"]
    assert all(0 < rows[name]["share_of_copy"] < 2 for name in (SWAP, APPLY, PAUSE))
