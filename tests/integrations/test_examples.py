"""The examples run as their first lines say: one process for each site, joined by LOCO_* variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sites import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "integrations").glob("with_*.py"))


# torchtitan's wants a tokenizer and a data set that are downloaded: test_torchtitan.py gives it others.
@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path.stem != "with_torchtitan"], ids=lambda path: path.stem
)
def test_two_sites_run_the_example(example: Path, tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    sites = []
    for name in ("berlin", "paris"):
        variables = {"LOCO_SITES": "2", "LOCO_AT": at, "LOCO_SITE": name, "OMP_NUM_THREADS": "1"}
        variables |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
        sites.append(
            subprocess.Popen(
                [sys.executable, str(example)],
                env=os.environ | variables,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for site in sites:
            out, err = site.communicate(timeout=180)
            assert site.returncode == 0, err
            assert "round 4: sent" in out or "round 2: sent" in out, out
    finally:
        for site in sites:
            site.kill()


def test_an_example_has_forty_lines_at_most() -> None:
    assert len(EXAMPLES) >= 7
    assert {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES if _is_long(path)} == {}


def _is_long(path: Path) -> bool:
    return len(path.read_text().splitlines()) > 40
