"""The house: imports point one way, files are short, and a name is imported when it is first used."""

import ast
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from pages import code, page
from selection import COMMANDS

ROOT = Path(__file__).parents[2]
# What each package may import of the others; `kernels` is imported as `loco.kernels`.
ALLOWED = {
    "kernels": {"kernels"},
    "loco": {"loco", "loco.kernels"},
    "experiments": {"loco", "loco.kernels", "experiments"},
}


# The rooms of `loco`, from the bottom up: each may import those before it.
FLOORS = (
    *("errors", "logs", "config", "presets", "report", "version"),
    *("sync", "coordination", "net", "wire", "members", "exchange", "parameters", "inner", "setup_warnings"),
    *("round", "checkpoints"),
    *("surface", "optimizer", "attached"),
    *("integrations",),
    *("commands", "__main__"),
)


def names_imported(path: Path, *, for_types: bool = True) -> list[str]:
    """The full names of what a file imports.

    Args:
        for_types: also under `if TYPE_CHECKING`.
    """
    package = path.parent.relative_to(ROOT).parts
    names: list[str] = []
    tree = ast.parse(path.read_text())
    if not for_types:
        tree.body = [node for node in tree.body if ast.unparse(node).split(":")[0] != "if TYPE_CHECKING"]
    for node in ast.walk(tree):
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


def imports_among(modules: dict[str, Path]) -> dict[str, set[str]]:
    """By module, which of the others it imports: anywhere in its file, in functions and for types, too."""
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        found[module] = set()
        for name in names_imported(path):
            if name.startswith("loco.kernels"):
                continue
            while name and name not in modules:
                name = name.rpartition(".")[0]  # the module that holds this name
            found[module] |= {name} - {"", module}
    return found


def circles_of(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules each of which imports all others of its group, directly or through others."""

    def reached_from(start: str) -> set[str]:
        reached, left = set[str](), [start]
        while left:
            fresh = imports[left.pop()] - reached
            reached |= fresh
            left += fresh
        return reached

    reached = {module: reached_from(module) for module in imports}
    return {
        frozenset(other for other in there if module in reached[other])
        for module, there in reached.items()
        if module in there
    }


def test_no_modules_import_each_other() -> None:
    modules = {}
    for path in [path for package in ("loco", "experiments") for path in (ROOT / package).rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[:2] != ("loco", "kernels"):
            modules[".".join(parts).removesuffix(".__init__")] = path
    assert circles_of(imports_among(modules)) == set()


def test_circles_are_found_directly_and_through_other_modules() -> None:
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}) == {
        frozenset("abc"),
        frozenset("ef"),
    }


def wing_of(module: str) -> str:
    """As the drawing of docs/architecture.md calls it; "": it is left out of it."""
    first, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    if first != "loco" or room == "kernels":
        return first if first == "experiments" else "kernels" if "kernels" in (first, room) else ""
    if room in FLOORS[FLOORS.index("surface") : FLOORS.index("integrations")]:
        return "surface"
    if room in ("errors", "logs", "config", "presets", "report", "version", "setup_warnings", "__main__"):
        return ""
    return room if room in FLOORS else "public" if room != "__version__" else ""


def test_the_drawing_of_the_wings_has_the_imports_that_are_there_and_no_others() -> None:
    ((_, drawing),) = code(page("docs/architecture.md"), "mermaid")
    chains = [line.split(" --> ") for line in drawing.replace('"', " ").splitlines() if "-->" in line]
    drawn = {(a.strip(), b.strip()) for chain in chains for a, b in pairwise(chain)}
    there = set()
    for package in ("kernels", "loco", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            if package == "kernels" or "kernels" not in path.parts:
                own = wing_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
                there |= {(own, wing_of(name)) for name in names_imported(path) if own}
    there = {(a, b) for a, b in there if b and a != b}
    assert drawn <= there, drawn - there
    reached = set(drawn)
    while more := {(a, d) for a, b in reached for c, d in drawn if b == c} - reached:
        reached |= more
    assert there <= reached, there - reached


@pytest.mark.parametrize("package", ["kernels", "loco", "experiments"])
def test_a_file_is_short_and_a_folder_holds_a_dozen(package: str) -> None:
    folders = Counter[Path]()
    for path in (ROOT / package).rglob("*.py"):
        if package == "kernels" or "kernels" not in path.parts:
            folders[path.parent] += 1
        if package != "kernels":
            assert len(path.read_text().splitlines()) <= 350, path
    assert folders
    assert [folder for folder, files in folders.items() if files > 12] == []


def test_weights_are_published_without_a_round_or_a_process_group() -> None:
    """`loco.sync` stands on the kernels, so that an inference worker loads nothing of rounds and members."""
    for path in (ROOT / "loco/sync").rglob("*.py"):
        for name in names_imported(path):
            if name.startswith("loco."):
                assert name.split(".")[1] in ("kernels", "errors", "logs", "sync"), f"{path} imports {name}"


def test_the_project_reads_nothing_beside_itself() -> None:
    for package in ("kernels", "loco", "experiments", "examples", "tests", "configs"):
        for path in (ROOT / package).rglob("*.*"):
            if path.suffix not in (".py", ".c", ".h", ".yaml"):
                continue
            assert "../" + "shared" not in path.read_text(), path


@pytest.mark.check(COMMANDS)
def test_every_public_name_is_found_when_it_is_first_used() -> None:
    program = "import loco; print([name for name in loco.__all__ if getattr(loco, name) is None])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


@pytest.mark.check(COMMANDS)
def test_weights_are_received_without_the_rounds_modules() -> None:
    program = "import sys, loco.sync; print(*(name for name in sys.modules if name.startswith('loco.')))"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    rooms = {name.split(".")[1] for name in loaded}
    assert "sync" in rooms
    assert not rooms & {"round", "members", "checkpoints", "net", "exchange", "parameters", "optimizer"}
