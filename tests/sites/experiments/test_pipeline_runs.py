"""`python -m experiments.pipeline` as a person runs it: with parts that are killed, and with Ctrl-C."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import gone
from selection import COMMANDS

from experiments.processes.namespaces import why_not
from experiments.processes.orphans import through

pytest.importorskip("ray", reason="needs ray")
pytest.importorskip("torchft", reason="needs torchft")

REPOSITORY = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "experiments.pipeline", "preset=smoke", "lr=1e-4", "sync_every=4", "lease=4"]
PATIENCE = 300.0  # seconds: Ray and five processes that import torch start on a busy machine


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(REPOSITORY / "configs")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [*COMMAND, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(process: int) -> list[int]:
    """Oldest first."""
    try:
        own = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for child in map(int, own) for one in (child, *descendants(child))]


def actors(command: subprocess.Popen[str], kind: str) -> list[int]:
    found = []
    for process in descendants(command.pid):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words.startswith(f"ray::{kind}".encode()):
            found.append(process)
    return found


def wait_for_versions(
    command: subprocess.Popen[str], folder: Path, count: int, *, where: str = "runs/pipeline/weights"
) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob(f"{where}/*/versions/*"))) < count:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(command: subprocess.Popen[str], folder: Path) -> tuple[dict[str, Any], str]:
    """What a run that went well has found, and what it said meanwhile."""
    said, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 0, errors
    assert "s a step, pass@1" in said
    found = json.loads((folder / "runs/pipeline/pipeline.json").read_text())
    assert len(set(found["digests"])) == 1
    assert len(found["digests"]) == 2 * found["config"]["ranks_per_site"]
    assert found["evaluations"][-1]["step"] == found["config"]["steps"]
    newest = 0 if found["config"]["overlap"] is None else -1  # a site may be a version ahead of another
    assert {int(versions) for versions in found["staleness"]} <= {newest, 0, 1, 2}
    assert (folder / "runs/pipeline/pipeline.png").stat().st_size > 10_000
    return found, errors


@pytest.mark.check(COMMANDS)
def test_a_run_goes_on_without_a_worker_without_a_site_and_without_its_controller(tmp_path: Path) -> None:
    older = tmp_path / "runs/pipeline/weights/older"  # of an earlier run
    older.mkdir(parents=True)
    command = started(tmp_path, "steps=1600", "max_staleness=2")  # long enough for the site to be back
    wait_for_versions(command, tmp_path, 4)
    os.kill(actors(command, "Worker")[0], signal.SIGKILL)
    wait_for_versions(command, tmp_path, 12)
    os.kill(actors(command, "Trainer")[0], signal.SIGKILL)  # that publishes
    wait_for_versions(command, tmp_path, 20)
    os.kill(actors(command, "Controller")[0], signal.SIGKILL)
    found, _ = ended(command, tmp_path)
    versions = {event["version"] for event in found["events"] if event["what"] == "writing"}
    assert max(versions) == 401
    assert not older.exists()
    rounds = [event for event in found["events"] if event["what"] == "exchanging"]
    # That it is back, it may have told the controller that was killed.
    assert {event["part"] for event in rounds if event["step"] == 1600} == {"site 0", "site 1"}


@pytest.mark.check(COMMANDS)
def test_a_run_goes_on_when_its_store_is_gone_for_a_while(tmp_path: Path) -> None:
    """Without staleness: as long as the store is gone, all wait."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "served").mkdir()
    serve = [sys.executable, "-m", "loco", "sync", "serve", str(tmp_path / "served"), "--writable"]
    serve += ["--port", str(port)]

    def server() -> subprocess.Popen[bytes]:
        return subprocess.Popen(through(serve), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    store = server()
    try:
        command = started(tmp_path, "steps=160", "max_staleness=0", f"weights=http://127.0.0.1:{port}")
        wait_for_versions(command, tmp_path, 4, where="served")
        store.kill()
        store.wait()
        time.sleep(5)
        store = server()
        found, errors = ended(command, tmp_path)
    finally:
        store.kill()
        store.wait()
    assert "can't be published yet" in errors or "no newer weights for now" in errors
    assert set(found["staleness"]) == {"0"}
    # Beside them lies what the server was writing when it was killed.
    assert len(list((tmp_path / "served").glob("*/versions/[0-9]*"))) == 41


@pytest.mark.check(COMMANDS)
def test_ctrl_c_ends_all_parts_and_says_so_once(tmp_path: Path) -> None:
    command = started(tmp_path, "steps=4000")
    wait_for_versions(command, tmp_path, 3)
    everybody = descendants(command.pid)
    assert len(everybody) > 6
    os.kill(command.pid, signal.SIGINT)
    _, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 130
    assert errors.count("interrupted: all parts were stopped, and no results were written") == 1
    assert "Traceback" not in errors
    assert gone(everybody)


def rounds_saved(folder: Path) -> int:
    """That both sites have saved."""
    found = [
        max((int(one.name.removeprefix("round-")) for one in site.glob("round-????????")), default=0)
        for site in folder.glob("runs/pipeline/checkpoints/site *")
    ]
    return min(found) if len(found) == 2 else 0


# With one worker in turns, what is sampled depends on the seed alone.
FIXED = ["max_staleness=0", "workers=1", "in_flight=false", "elastic=false", "save_every=1", "lr=1e-4"]


SHARDED = ["shard=true", "ranks_per_site=2", "checkpoint_activations=true", "micro_batch=2"]


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize(
    ("more", "steps", "kills"),
    [([], 480, (8, 40, 70)), (SHARDED, 80, (6,))],
    ids=["whole", "sharded"],
)
def test_a_run_that_is_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, more: list[str], steps: int, kills: tuple[int, ...]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    settings = [f"steps={steps}", *FIXED, *more]
    whole, _ = ended(started(tmp_path / "a", *settings), tmp_path / "a")
    folder, chance = tmp_path / "b", random.Random(3)
    for k, last in enumerate(kills):
        command = started(folder, *settings, *(["resume=true"] if k else []))
        deadline = time.monotonic() + PATIENCE
        while rounds_saved(folder) < last and time.monotonic() < deadline:
            time.sleep(0.02)
        assert command.poll() is None, command.communicate()
        time.sleep(chance.random())
        at_work = [one for kind in ("Trainer", "Worker") for one in actors(command, kind)]
        assert len(at_work) == (5 if more else 3)
        command.send_signal(signal.SIGINT if k == 1 else signal.SIGKILL)
        _, errors = command.communicate(timeout=PATIENCE)
        assert ("resume=true goes on from the checkpoints of round" in errors) == (k == 1)
        assert gone(at_work)  # Ray's own processes take a minute
    found, errors = ended(started(folder, *settings, "resume=true"), folder)
    assert f"site 0{' rank 0' if more else ''}: goes on after round" in errors
    assert found["digests"] == whole["digests"]
    assert found["evaluations"][-1]["scores"] == whole["evaluations"][-1]["scores"]


@pytest.mark.check(COMMANDS)
def test_rounds_one_behind_survive_a_lost_site_and_a_lost_run(tmp_path: Path) -> None:
    late = ["overlap=1", "save_every=2", "max_staleness=2"]
    command = started(tmp_path, "steps=4000", *late)
    wait_for_versions(command, tmp_path, 6)
    os.kill(actors(command, "Trainer")[1], signal.SIGKILL)
    wait_for_versions(command, tmp_path, 40)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=PATIENCE)
    before = re.search(r"goes on from the checkpoints of round (\d+)", errors)
    assert before is not None
    steps = 4 * (int(before[1]) + 20)
    found, errors = ended(started(tmp_path, f"steps={steps}", *late, "resume=true"), tmp_path)
    assert "goes on after round" in errors
    assert max(event["version"] for event in found["events"] if event["what"] == "writing") == steps // 4 + 1


@pytest.mark.check(COMMANDS)
def test_a_model_a_prompt_file_and_a_reward_of_ones_own_are_trained_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the optional package transformers")
    examples = REPOSITORY / "examples" / "own_model"
    subprocess.run([sys.executable, examples / "make.py", "own"], cwd=tmp_path, check=True)
    own = ["task=prompts", "model=hf", "path=own/model", "prompts.file=own/prompts.jsonl"]
    own += [f"prompts.reward={examples}/rewards.py:wanted", "prompts.held_out=6", "prompts.prompts=2"]
    own += ["prompts.group=4", "answer.max_tokens=16", "answer.temperature=1.2", "lr=2e-3", "save_every=2"]
    own += ["eval_every=32"]
    command = started(tmp_path, *own, "steps=4000")
    wait_for_versions(command, tmp_path, 10)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=PATIENCE)
    assert "resume=true goes on from the checkpoints of round" in errors
    command = started(tmp_path, *own, "steps=320", "resume=true", "answer.temperature=1")
    _, errors = command.communicate(timeout=PATIENCE)
    assert "configured otherwise (answer.temperature: 1.2 then, 1.0 now)" in errors
    command = started(tmp_path, *own, "steps=320", "resume=true")
    said, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 0, errors
    found = json.loads((tmp_path / "runs/pipeline/pipeline.json").read_text())
    assert f"reward {found['evaluations'][-1]['score']:.4f}" in said
    assert len(set(found["digests"])) == 1
    assert found["reward"] > 0.1  # 0.05 by chance
    assert all(isinstance(one["score"], float) for one in found["evaluations"])
    assert "<h1" in (tmp_path / "runs/pipeline/report.html").read_text()


@pytest.mark.check(COMMANDS)
def test_an_environment_replies_and_the_model_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the optional package transformers")
    examples = REPOSITORY / "examples" / "own_model"
    subprocess.run([sys.executable, examples / "make.py", "own"], cwd=tmp_path, check=True)
    own = [
        "task=prompts",
        "model=hf",
        "path=own/model",
        "prompts.file=own/prompts.jsonl",
        "prompts.held_out=6",
    ]
    own += [f"prompts.environment={examples}/rewards.py:Tries", "prompts.prompts=2", "prompts.group=2"]
    own += ["answer.max_tokens=8", "steps=24", "eval_every=24"]
    command = started(tmp_path, *own)
    said, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 0, errors
    found = json.loads((tmp_path / "runs/pipeline/pipeline.json").read_text())
    assert [one["step"] for one in found["evaluations"]] == [0, 24]
    counts = found["counts"]
    assert counts["groups"] >= 24 * 2 * 2
    # Two turns of 8 tokens at most, and nearly always two: what was given is not counted.
    assert 8 < counts["tokens"] / counts["groups"] / 2 <= 16
    assert found["reward"] > 0
    assert f"reward {found['evaluations'][-1]['score']:.4f}" in said


@pytest.mark.check(COMMANDS)
def test_where_sites_stay_the_same_one_that_is_lost_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    command = started(tmp_path, "steps=4000", "timeout_s=20", "elastic=false")
    wait_for_versions(command, tmp_path, 3)
    os.kill(actors(command, "Trainer")[-1], signal.SIGKILL)
    _, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 1
    assert "Traceback" not in errors
    assert any(line.startswith("error: ") for line in errors.splitlines()), errors


@pytest.mark.check(COMMANDS)
def test_when_all_sites_are_lost_at_once_the_run_ends_with_a_sentence(tmp_path: Path) -> None:
    command = started(tmp_path, "steps=4000")
    wait_for_versions(command, tmp_path, 4)
    for process in actors(command, "Trainer"):
        os.kill(process, signal.SIGKILL)
    _, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 1
    assert "Traceback" not in errors
    assert "error: ExperimentError: all sites were lost at once" in errors, errors


@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.check(COMMANDS)
def test_slow_links_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    command = [sys.executable, "-m", "experiments.pipeline", "links", "mbit=100", "preset=smoke", "name=slow"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != "warm_start"] == ["slow"]
    found = json.loads((tmp_path / "runs/slow/links.json").read_text())
    late, waiting = "PULSELoCo a round behind, patches", "PULSELoCo, patches"
    assert list(found) == [late, waiting, "DiLoCo in FP32, all weights", "DDP, all weights"]
    for name, one in found.items():
        assert f"| {name} | {one['seconds_per_step']:.3f} |" in done.stdout
        assert set(one["links"]) == {"site0", "site1", "worker0", "worker1"}
        # What a site sends to a store on its own machine is on no link.
        across = one["counts"]["round bytes"] + one["counts"]["patch bytes"] + one["counts"]["sample bytes"]
        assert across < sum(link["sent_bytes"] for link in one["links"].values())
    rounds = [one["counts"]["round bytes"] for one in found.values()]
    assert rounds[2] > 20 * max(rounds[:2])
    assert rounds[3] > 7.9 * rounds[2]  # in each of a round's eight steps
    assert all(found["DDP, all weights"]["shares"][f"site {k}"]["all-reduce"] > 0 for k in (0, 1))
