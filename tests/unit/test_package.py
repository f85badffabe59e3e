"""The house: imports point one way, and what is installed is `loco` and `loco.kernels`, nothing else."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each package may import of the others; `kernels` is imported as `loco.kernels`.
ALLOWED = {
    "kernels": {"kernels"},
    "loco": {"loco", "loco.kernels"},
    "experiments": {"loco", "loco.kernels", "experiments"},
}


# The rooms of `loco`, from the bottom up: each may import those before it.
FLOORS = (
    *("errors", "config", "presets", "report"),
    *("coordination", "net", "wire", "members", "exchange", "round"),
    *("wrapper", "optimizer", "checkpoints"),
)


def names_imported(path: Path) -> list[str]:
    """The full names of what a file imports."""
    package = path.parent.relative_to(ROOT).parts
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(package), f"{path} reaches above its package"
            start = [*package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def imported(path: Path) -> set[str]:
    """The packages of this project that a file imports."""
    found = set()
    for name in names_imported(path):
        parts = name.split(".")
        if parts[:2] == ["loco", "kernels"]:
            found.add("loco.kernels")
        elif parts[0] in ("loco", "kernels", "experiments", "tests"):
            found.add(parts[0])
    return found


@pytest.mark.parametrize("package", list(ALLOWED))
def test_imports_point_downward(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert imported(path) <= ALLOWED[package], path


def test_every_room_of_loco_imports_only_those_below_it() -> None:
    files = [path for path in (ROOT / "loco").rglob("*.py") if "kernels" not in path.parts]
    seen = set()
    for path in files:
        room = path.relative_to(ROOT / "loco").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        seen.add(room)
        for name in names_imported(path):
            target = name.split(".")[1:2] if name.startswith("loco.") else []
            if target and target[0] in FLOORS:
                assert FLOORS.index(target[0]) <= FLOORS.index(room), f"{path} imports {name}"
    assert seen == set(FLOORS)


def test_the_project_reads_nothing_beside_itself() -> None:
    for package in ("kernels", "loco", "experiments", "tests", "configs"):
        for path in (ROOT / package).rglob("*.*"):
            if path.suffix not in (".py", ".c", ".h", ".yaml"):
                continue
            assert "../" + "shared" not in path.read_text(), path


def test_a_built_wheel_installs_kernels_inside_loco(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "loco", "kernels"):
        # Copied, so that the build leaves nothing behind here.
        subprocess.run(["cp", "-a", str(ROOT / name), str(source)], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*build, "-w", str(tmp_path), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("loco-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"loco"}
    sources = (p for p in (ROOT / "kernels").rglob("*") if p.suffix in (".py", ".c", ".h"))
    assert sorted(n for n in names if n.startswith("loco/kernels/")) == sorted(
        f"loco/kernels/{path.relative_to(ROOT / 'kernels')}" for path in sources
    )
    assert "loco/py.typed" in names
    metadata = (next((tmp_path / "site").glob("*.dist-info")) / "METADATA").read_text()
    for line in ("Requires-Python: >=3.11", "License-Expression: Apache-2.0", "Requires-Dist: torch>=2.11"):
        assert line in metadata

    # The wheel alone, from an empty folder, without this checkout on the path.
    program = (
        "import sys, loco, loco.kernels, torch\n"
        "assert loco.kernels.digest(torch.zeros(1)) == 0\n"
        "assert loco.__file__.startswith(sys.argv[1]), loco.__file__\n"
        "assert loco.kernels.__file__.startswith(sys.argv[1])\n"
        "try:\n    import kernels\n"
        "except ImportError:\n    print('no top-level kernels')\n"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    site = str(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", program, site],
        cwd=empty,
        env={"PYTHONPATH": site, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "no top-level kernels", done.stderr
