"""The example runs as it says, with one voice; and without a launcher one sentence says what to do."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from selection import COMMANDS, SHARDINGS
from sites import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    paths = {"PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=own | paths | environment, capture_output=True, text=True, timeout=180
    )


def torchrun(nproc: int, script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
    return run(*launcher, str(script), **environment)


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize("sites", [2, 4])
def test_the_example_trains_several_sites_and_one_rank_prints(sites: int) -> None:
    done = torchrun(sites, EXAMPLE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 40", "step 80", "step 120", "step 160"]
    first, last = (float(line.split("loss ")[1].split(";")[0]) for line in (lines[0], lines[-1]))
    assert last < 0.75 * first
    assert "round 20: sent" in lines[-1]


@pytest.mark.check(COMMANDS)
def test_without_the_marked_lines_it_is_a_loop_for_one_process(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines(keepends=True)
    plain = [line for line in lines if "# loco" not in line]
    assert len(lines) - len(plain) == 7
    (tmp_path / "plain.py").write_text("".join(plain))
    done = run(str(tmp_path / "plain.py"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.check(COMMANDS)
def test_without_a_launcher_the_error_says_how_to_launch() -> None:
    """And not torch's `environment variable RANK expected`, which knows nothing of sites."""
    done = run(str(EXAMPLE))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: nobody says who the sites are: give this one a name")
    assert "(torchrun --nproc-per-node 4 train.py; RANK is not set, so no launcher" in last


@pytest.mark.check(COMMANDS)
def test_what_the_machine_lacks_is_said_by_one_of_its_ranks(tmp_path: Path) -> None:
    done = torchrun(2, EXAMPLE, CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    # Once for the kernels, and once for heartbeats, which then need the interpreter lock.
    assert done.stderr.count("no C compiler (no-such-compiler) was found") == 2
    assert done.stderr.count("holds Python's interpreter lock for longer than dead_after") == 1


@pytest.mark.check(SHARDINGS)
@pytest.mark.parametrize(("name", "ranks"), [("with_fsdp2", 2), ("with_hsdp", 4)])
def test_the_sharded_examples_run_with_a_torchrun_for_each_site(name: str, ranks: int) -> None:
    script = EXAMPLE.with_name(f"{name}.py")
    assert len(script.read_text().splitlines()) <= 40
    shared = {"LOCO_SITES": "2", "LOCO_AT": f"127.0.0.1:{free_port()}", "CUDA_VISIBLE_DEVICES": ""}
    with ThreadPoolExecutor() as pool:
        sites = [
            pool.submit(torchrun, ranks, script, LOCO_SITE=site, **shared) for site in ("berlin", "paris")
        ]
    for site in sites:
        done = site.result()
        assert done.returncode == 0, done.stderr
        # By what is in it, not by line: torchrun's ranks write a line and its end in two calls, to one pipe.
        assert sorted(re.findall(r"rank (\d): round 4", done.stdout)) == [str(rank) for rank in range(ranks)]
