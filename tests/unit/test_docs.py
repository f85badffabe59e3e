"""The documentation says what is so: its links lead somewhere, and its tables list what the code has."""

import csv
import inspect
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, anchors, code, named, page, table

import loco
from loco.coordination.authentication import LEAST_KEY_BYTES
from loco.presets import economies
from loco.round.hooks import Phase
from loco.surface import RoundSurface
from loco.wire.codecs import CODECS
from loco.wire.records import RECORD_BYTES, VERSION, Kind, Status

TOPICS = (
    *("algorithm", "architecture", "benchmarks", "checkpoints", "elastic", "errors", "failures", "frontier"),
    *("integrations", "internals", "optimizer", "outer_step", "overlap", "own_model", "pipeline"),
    *("questions", "reproduce", "results", "sharded", "sites", "sync", "sync-format", "wire"),
)
METRICS = re.findall(r'"(loco/\w+)":', inspect.getsource(RoundSurface.metrics))


def test_the_readme_has_250_lines_at_most_and_every_topic_a_page() -> None:
    assert len(page("README.md").splitlines()) <= 250
    assert sorted(path.stem for path in (ROOT / "docs").glob("*.md")) == sorted(TOPICS)
    for topic in TOPICS:
        assert f"(docs/{topic}.md)" in page("README.md")


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        at = (path.parent / file).resolve() if file else path
        assert at.exists(), target
        assert not anchor or anchor in anchors(at.read_text()), target


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_file_and_module_that_is_named_is_there(path: Path) -> None:
    text = path.read_text()
    for module in re.findall(r"-m (experiments(?:\.\w+)*)", text):
        assert find_spec(module), module
    for preset in re.findall(r"preset=(\w+)", text):
        assert (ROOT / "configs" / f"{preset}.yaml").exists(), preset
    for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", page("Makefile"), re.MULTILINE), target
    for name in re.findall(
        r"(?<![\w/.])((?:tests|loco|kernels|experiments|docs|configs)/[\w/.-]*\w/?)", text
    ):
        assert name in METRICS or (ROOT / name).exists(), name


def test_the_table_of_metrics_has_all_of_them() -> None:
    rows = table(page("docs/integrations.md"), "| tag |")
    assert [row[0] for row in rows] == METRICS


def parameters_of(function: Callable[..., Any]) -> dict[str, str]:
    own = inspect.signature(function).parameters.values()
    return {p.name: repr(p.default).replace("'", '"') for p in own if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("name", "call", "of"),
    [
        ("README.md", "loco.PulseLoCo(inner, …)", loco.PulseLoCo),
        ("docs/sites.md", "`loco.Topology(…)`;", loco.Topology),
    ],
)
def test_the_settings_are_all_in_the_tables_with_their_defaults(name: str, call: str, of: type) -> None:
    text = page(name)
    rows = table(text[text.index(call) :], "| argument | default | |")
    assert {row[0]: row[1] for row in rows} == parameters_of(of.__init__)


def test_the_page_of_what_to_decide_has_the_symbols_of_the_algorithm() -> None:
    told = {row[0]: row[1] for row in table(page("docs/optimizer.md"), "| argument | symbol |")}
    rows = table(page("docs/algorithm.md"), "| paper | argument |")
    assert told == {row[1]: row[0] for row in rows if row[0]}
    decided = {"sync_every", *loco.PAPER, *economies(0.25)}
    assert decided == told.keys()


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def stored(folder: str, label: str) -> tuple[list[dict[str, Any]], float, dict[str, str]]:
    """The runs of a label, what a site sends in a round and of a parameter, and the label's row."""
    found = json.loads((ROOT / folder / "results.json").read_text())
    runs = [run for run in found["runs"] if run["label"] == label]
    with (ROOT / folder / "results.csv").open() as file:
        (row,) = (one for one in csv.DictReader(file) if one["label"] == label)
    rounds = found["config"]["steps"] / found["config"]["sync_every"]
    return runs, float(row["sent_bytes"]) / rounds / runs[0]["parameters"], row


def scores_of(runs: list[dict[str, Any]]) -> list[str]:
    ends = [run["evaluations"][-1][1] for run in runs]
    return [f"{sum(end[score] for end in ends) / len(ends):.1%}" for score in ("pass@1", "sampled")]


@pytest.mark.parametrize(
    ("place", "label", "seeds"),
    [
        (0, "DDP, tuned", 5),
        (1, "DiLoCo", 5),
        (2, "PULSELoCo", 5),
        (3, "PULSELoCo, saving 0.25", 3),
        (4, "PULSELoCo, saving 1", 1),
    ],
)
def test_the_bytes_of_a_larger_model_are_computed_from_the_stored_runs(
    place: int, label: str, seeds: int
) -> None:
    rows = table(page("docs/results.md"), "| method | runs | right answers, greedy |")
    assert len(rows) == 5
    row = rows[place]
    runs, each, told = stored(row[1], label)
    assert len(runs) == seeds
    sent = f"{float(told['sent_bytes']) / 1e6:,.2f}"
    assert row[2:] == [*scores_of(runs), sent, f"{each:.4g}", short(7 * each), short(7 * each * 8)]


README_ROWS = (
    "DiLoCo, as published",
    "DiLoCo α 28 μ 0",
    "DiLoCo α 112 μ 0",
    "SparseLoCo α 32",
    "SparseLoCo α 64",
    "PULSELoCo, saving 0.25",
    "PULSELoCo, saving 1",
)


def test_the_readmes_first_table_is_computed_from_the_stored_runs() -> None:
    rows = table(page("README.md"), "| GRPO, four sites, a round every 8 steps |")
    for label, row in zip(README_ROWS, rows, strict=True):
        runs, _, told = stored("experiments/results/rl/saving-palindromes", label)
        assert row[1:] == [f"{float(told['sent_bytes']) / 1e6:,.2f}", ", ".join(scores_of(runs))]


def test_every_error_is_in_the_table() -> None:
    listed = [row[0] for row in table(page("docs/failures.md"), "| error | what happened")]
    public = [getattr(loco, found) for found in loco.__all__ if found.endswith("Error")]
    assert sorted(listed) == sorted(e.__name__ for e in public if e is not loco.LocoError)


def test_the_fields_of_a_report_and_the_phases_of_a_round_are_all_described() -> None:
    text = page("docs/algorithm.md")
    listed = [name for row in table(text, "| field | meaning |") for name in row[0].split(", ")]
    assert listed == [field.name for field in fields(loco.SyncReport)]
    assert [row[0] for row in table(text, "| phase | what is known by then |")] == list(Phase)


def test_the_wire_page_is_of_this_version() -> None:
    text = page("docs/wire.md")
    opening = table(text, "| offset | bytes | opening |")
    said: dict[str, str] = {}
    for kind in ("announcement", "vote", "frame header"):
        rows = opening + table(text, f"| offset | bytes | {kind} |")
        ends = [int(offset) + int(size) for offset, size, _ in rows]
        assert [int(offset) for offset, *_ in rows] == [0, *ends[:-1]]
        assert ends[-1] == RECORD_BYTES
        said |= {cells[2].partition(":")[0].split(" ")[0]: cells[2] for cells in rows}
    assert f"Version {VERSION}." in text
    assert re.findall(r"\d+", said["version,"]) == [str(VERSION)]
    for what, numbers in (("codec", sorted(CODECS)), ("status", list(Status)), ("kind", list(Kind))):
        assert [int(n) for n in re.findall(r"(?<=[:,] )\d+(?= )", said[what])] == [int(n) for n in numbers]
    for number, codec in CODECS.items():
        assert f"{number} {codec.name}" in said["codec"]


def test_the_command_of_the_security_page_makes_a_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    ((_, command),) = code(page("SECURITY.md"), "sh")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "loco.key").stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / "loco.key").read_bytes()) >= LEAST_KEY_BYTES


def test_the_architecture_page_names_every_wing_and_draws_it() -> None:
    text = page("docs/architecture.md")
    wings = {f"loco/{path.name}/" for path in (ROOT / "loco").iterdir() if (path / "__init__.py").exists()}
    wings -= {"loco/kernels/"}  # a link
    listed = {row[0] for row in table(text, "| folder | holds |")}
    assert wings | {"kernels/", "experiments/", "examples/", "configs/", "tests/"} == listed
    ((_, drawing),) = code(text, "mermaid")
    assert all(wing in drawing for wing in wings)


def test_every_test_that_a_page_names_is_there() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    for path in PAGES:
        for name in re.findall(r"`(test_\w+)`", path.read_text()):
            assert f"def {name}(" in sources, f"{path.name}: {name}"


def test_every_thread_that_has_a_name_is_on_the_page_of_internals() -> None:
    named = re.compile(r'(?:name|thread_name_prefix)=f?"(loco[^"{]*)')
    names = {
        name.strip() for path in (ROOT / "loco").rglob("*.py") for name in named.findall(path.read_text())
    }
    assert len(names) > 5
    assert not [name for name in sorted(names) if f"`{name}" not in page("docs/internals.md")]
