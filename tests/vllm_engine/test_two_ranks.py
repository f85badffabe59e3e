"""Two ranks, each with its own part of the weights, change together."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import plain_engine
import pytest
from adapters import SLOTS, AdapterTrainer
from models import KINDS
from safetensors.torch import load_file
from trained import publish

SCRIPT = Path(__file__).with_name("two_ranks.py")
LAYOUTS = {
    "tensor": {"tensor_parallel_size": 2},
    "tensor, with an adapter": {"tensor_parallel_size": 2, **SLOTS},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "stages": {"pipeline_parallel_size": 2},
}
CELLS = [("tensor, with an adapter", "qwen3"), ("experts", "deepseek_v3"), ("stages", "llama")]
if "LOCO_TEST_ALL_LAYOUTS" in os.environ:  # of all models, which takes twenty minutes
    EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
    CELLS = [(layout, kind) for layout in ("tensor", "stages") for kind in KINDS]
    CELLS += [("experts", kind) for kind in EXPERTS]


def run(folder: Path, layout: str, checkpoint: str, *versions: int, fails: str = "") -> list[dict[str, Any]]:
    more = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    more["LOCO_TEST_FAILS"] = fails
    more["PYTHONPATH"] = plain_engine.plugins(folder / f"plugins of {checkpoint} {len(versions)}")
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(LAYOUTS[layout]), checkpoint]
    command += map(str, versions)
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank wants a core of its own")
@pytest.mark.parametrize(("layout", "kind"), CELLS)
def test_both_ranks_change_to_the_same_version_or_neither_does(
    layout: str, kind: str, tmp_path: Path
) -> None:
    """The weights, and an adapter whose versions are 10 more."""
    publish(kind, tmp_path, 4)
    has_adapter = "enable_lora" in LAYOUTS[layout]
    if has_adapter:
        trained = AdapterTrainer(tmp_path, load_file(tmp_path / "1/model.safetensors"), first=11)
        for _ in range(3):
            trained.step()
    # Where a rank can't write the weights, both have changed the adapter, and the other one the weights, too.
    old, first, second, missing, last = run(tmp_path, layout, "1", 2, 3, 9, 4, fails="2 1, 3 0")
    assert "version 2 fails here" in first["error"]
    assert "failed on another rank" in second["error"]
    assert f"has no version {19 if has_adapter else 9}" in missing["error"]
    assert first | {"error": ""} == second | {"error": ""} == missing | {"error": ""} == old
    (fresh,) = run(tmp_path, layout, "4")
    assert last == fresh
    assert last["ranks"] != old["ranks"]
    generated = [str(one) for one in (*old["generated"], *fresh["generated"])]
    assert len(set(generated)) == len(generated)
    assert len(fresh["ranks"]) == 2
    assert fresh["ranks"][0] != fresh["ranks"][1]
