"""The README's training loop runs as written, before and after its changed lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from selection import COMMANDS
from sites import free_port

README = (Path(__file__).parents[2] / "README.md").read_text()


def loops() -> tuple[str, str]:
    """The diff's two sides."""
    lines = README.split("```diff\n")[1].split("```")[0].splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


@pytest.mark.check(COMMANDS)
def test_the_loop_runs_and_two_lines_differ_beside_data_and_a_print(tmp_path: Path) -> None:
    before, after = loops()
    changed = set(after.splitlines()) - set(before.splitlines())
    seeded, shown = "torch.manual_seed(optimizer.topology.site)", "print(optimizer.last_report)"
    assert len({line for line in changed if not line.startswith((seeded, shown))}) == 2
    assert len(changed) == 4
    (tmp_path / "train.py").write_text(after)
    exec(before, {})
    shell = README.split("```sh\n")[2].split("```")[0]
    assert shell.count("python train.py") == 2
    shell = shell.replace(". .venv/bin/activate", "true").replace("python", sys.executable)
    shell = shell.replace("10.0.0.1:29510", f"127.0.0.1:{free_port()}")
    first = shell.replace("train.py ", "train.py &", 1)  # the other site's machine goes on at the same time
    done = subprocess.run(
        ["bash", "-c", first + "wait"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.count("round 8: sent ") == 2, (
        done.stderr
    )  # 64 steps, one round in eight; both sites say it
