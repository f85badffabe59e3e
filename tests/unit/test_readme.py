"""The README's training loop runs as written, before and after its changed lines."""

import os
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def loops() -> tuple[str, str]:
    """The diff's two sides."""
    lines = README.split("```diff\n")[1].split("```")[0].splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def run(command: list[str], program: str, folder: Path) -> str:
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_runs_and_two_lines_differ_beside_data_and_a_print(tmp_path: Path) -> None:
    before, after = loops()
    changed = set(after.splitlines()) - set(before.splitlines())
    seeded = "torch.manual_seed(torch.distributed.get_rank())"
    shown = ("if torch.distributed.get_rank() == 0:", "    print(optimizer.last_report)")
    assert len({line for line in changed if not line.startswith((seeded, *shown))}) == 2
    assert len(changed) == 5
    run([], before, tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(torchrun, after, tmp_path)
    assert printed.count("round 8: sent ") == 1  # 64 steps, one round in eight; one rank of the two says it
