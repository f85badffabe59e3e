"""What SECURITY.md promises: nothing that comes from a peer, a file or a configuration is executed."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from selection import COMMANDS, MESSAGES
from sites import error_of, run_ranks

from experiments.training.gathering import from_all

ROOT = Path(__file__).parents[2]
# An unpickler with a list of what it knows.
ALLOWED = {"loco/checkpoints/dcp_format.py": {"load"}}
UNPICKLES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
UNPICKLES |= {"recv_object_list", "send_object_list"}


def calls(path: Path) -> Iterator[tuple[str, str, ast.Call]]:
    """(module or object, function, call) of everything that a file calls."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield "", node.func.id, node


def option(call: ast.Call, name: str) -> Any:
    return next((ast.literal_eval(k.value) for k in call.keywords if k.arg == name), None)


def dangers(path: Path) -> list[str]:
    found = []
    for owner, name, call in calls(path):
        bad = (
            (owner == "" and name in ("eval", "exec", "compile", "__import__"))
            or name in UNPICKLES
            or (owner in ("pickle", "marshal", "shelve", "dill") and name in ("load", "loads", "open"))
            or (owner == "torch" and name == "load" and option(call, "weights_only") is not True)
            or (owner in ("np", "numpy") and name == "load" and option(call, "allow_pickle") is not False)
            or (owner == "yaml" and name in ("load", "load_all", "unsafe_load", "full_load"))
            or (name.endswith("Unpickler") and name not in ("_MetadataUnpickler",))
            or option(call, "shell") is True
            or option(call, "trust_remote_code") is True
        )
        if bad:
            found.append(f"{owner}.{name}")
    return found


def test_nothing_that_is_read_can_be_executed() -> None:
    files = [p for package in ("loco", "kernels", "experiments") for p in (ROOT / package).rglob("*.py")]
    assert len(files) > 60
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        found = [one for one in dangers(path) if one.split(".")[-1] not in ALLOWED.get(name, set())]
        assert not found, f"{name}: {found}"


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(blob)",
        "dist.all_gather_object(a, b)",
        "np.load(path)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "yaml.load(text, Loader=x)",
    ],
)
def test_the_search_finds_what_it_searches_for(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(line)
    assert dangers(tmp_path / "bad.py")


class Trap:
    """What an attacker would send: unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def trapped(rank: int, path: Path) -> tuple[tuple[str, str], list[Any]]:
    plain = from_all({"rank": rank, "values": [1.5, None, "x"] * (1 + rank)})
    return error_of(lambda: from_all(Trap(path) if rank else 0)), plain


@pytest.mark.check(MESSAGES)
def test_a_peers_pickle_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "it ran"
    for (kind, text), plain in run_ranks(2, trapped, path):
        assert kind == "UnpicklingError"
        assert "Weights only load failed" in text
        assert plain == [{"rank": rank, "values": [1.5, None, "x"] * (1 + rank)} for rank in (0, 1)]
    assert not path.exists()


def test_a_configuration_is_data(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"a: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'it ran'}]\n")
    with pytest.raises(Exception, match="could not determine a constructor for the tag"):
        OmegaConf.load(path)
    assert not (tmp_path / "it ran").exists()


@pytest.mark.check(COMMANDS)
def test_nobody_joins_a_pipelines_cluster_without_its_token(tmp_path: Path) -> None:
    """The cluster of one machine: Ray would run whatever a process that joins it sends."""
    stranger = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
    run = f"""
        import os, subprocess, sys
        import ray
        from experiments.pipeline.cluster import started
        from experiments.pipeline.config import PipelineConfig

        with started(PipelineConfig(), 1):
            at = ray.get_runtime_context().gcs_address
            others = {{k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}}
            tried = subprocess.run([sys.executable, "-c", {stranger!r}, at], env=others, capture_output=True)
            mine = subprocess.run([sys.executable, "-c", {stranger!r}, at], capture_output=True)
        print(tried.returncode, b"token is missing or incorrect" in tried.stderr, mine.returncode)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(run)],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "True", "0"]
    assert not (tmp_path / ".ray").exists()  # where Ray leaves a token that it has made, for all to read
