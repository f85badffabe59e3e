"""docs/errors.md has every sentence that a user can meet from `import loco` to the end of the first round,
and each is reached by a test that knows its words."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import ROOT, page
from selection import PAGES
from sentences import Sentence, literals, pattern, runs, sentences, words

# Modules whose sentences need no row, and why. A row may still be of one.
EXCLUDED = {
    "loco/wire": "what is wrong with a message: a WireError, see docs/failures.md",
    "loco/exchange/codec_choice.py": "as above",
    "loco/exchange/enclosed.py": "as above",
    "loco/exchange/tuning.py": "as above: of later rounds",
    "loco/sync": "weights for inference workers: docs/sync.md",
    "loco/commands": "`python -m loco`, which says what is wrong with its own arguments",
    "loco/integrations": "what each framework's integration refuses: docs/integrations.md",
    "loco/checkpoints/dcp_format.py": "why one file can't be read: quoted by CheckpointErrors",
    "loco/checkpoints/formats.py": "as above",
    "loco/checkpoints/plain_data.py": "as above",
    "loco/checkpoints/rank_manifest.py": "as above",
    "loco/parameters/placements.py": "as above",
    "loco/checkpoints/reshard.py": "a resume under another sharding: docs/checkpoints.md",
    "loco/checkpoints/resharded_load.py": "as above",
    "loco/checkpoints/resize.py": "a resume with another number of sites: docs/checkpoints.md",
    "loco/coordination/heartbeats.py": "why a request failed: quoted by TransportErrors",
    "loco/coordination/pulse": "as above",
    "loco/net/connection.py": "as above",
    "loco/net/introductions.py": "as above",
    "loco/net/mesh.py": "as above",
    "loco/net/tcp.py": "as above",
    "loco/members/elastic/first_rank.py": "sites that come back later in a run: docs/elastic.md",
    "loco/members/elastic/lighthouse.py": "as above",
    "loco/members/elastic/quorum_membership.py": "as above",
    "loco/round/joining/recovery.py": "as above",
}
# Classes of errors that only damaged or forged messages raise.
HOSTILE = ("WireError", "AuthenticationError")
# Functions that return sentences, for errors that are made elsewhere.
COMPOSED = {
    "loco/coordination/liveness.py": ("describe",),
    "loco/coordination/rendezvous.py": ("_late",),
    "loco/coordination/site_directory.py": ("_difference", "_missing", "_obstacle"),
    "loco/inner/own_masters.py": ("problem",),
    "loco/net/transport.py": ("not_here",),
    "loco/setup_warnings.py": ("_why_unmoved",),
    "loco/wire/refusal.py": ("overflow_text",),
}


class Row(NamedTuple):
    sentences: list[str]
    when: str
    remedy: str
    tests: list[str]


@cache
def rows() -> list[Row]:
    found: list[Row] = []
    for line in page("docs/errors.md").splitlines():
        if not line.startswith("| ") or line.startswith(("| what it says", "|---")):
            continue
        said, when, remedy, tests = line.strip("|").split(" | ")
        found.append(Row(re.findall(r"`` (.*?) ``", said), when, remedy, re.findall(r"`(test_\w+)`", tests)))
    return found


@cache
def told() -> list[Sentence]:
    paths = [path for path in sorted((ROOT / "loco").rglob("*.py")) if "kernels" not in path.parts]
    return list(sentences([*paths, ROOT / "kernels" / "homes.py"], COMPOSED))


def needs_row(sentence: Sentence) -> bool:
    if sentence.kind in HOSTILE or len(words(sentence.text)) < 3:  # a prefix to another sentence
        return False
    return not any(sentence.module.startswith(excluded) for excluded in EXCLUDED)


def test_every_sentence_that_can_be_met_at_the_start_has_a_row() -> None:
    patterns = [pattern(said) for row in rows() for said in row.sentences]
    missing = [one for one in told() if needs_row(one) and not any(p.fullmatch(one.text) for p in patterns)]
    assert not missing, "\n".join(map(str, missing))


def test_every_row_is_of_sentences_that_the_code_has_and_says_what_to_do() -> None:
    texts = [one.text for one in told()]
    for row in rows():
        assert row.sentences
        assert len(words(row.remedy)) >= 2, row
        for said in row.sentences:
            assert len(words(said)) >= 2, said
            assert any(pattern(said).fullmatch(text) for text in texts), said


def test_every_row_says_what_is_raised_or_that_it_is_a_warning() -> None:
    for row in rows():
        kinds = {
            one.kind for one in told() for said in row.sentences if pattern(said).fullmatch(one.text)
        } - {"composed", "RuntimeError", "OSError"}  # which others quote
        named = set(re.findall(r"\w+", row.when))
        assert kinds <= named, f"{row.sentences}: {kinds}"


@cache
def asserted(path: Path) -> str:
    """Of a file of tests: the words of all its texts."""
    return " ".join([" ", *(f"{' '.join(words(part))} …" for part in literals(path).split("…")), " "])


@cache
def file_of(test: str) -> Path | None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE):
            return path
    return None


@pytest.mark.check(PAGES)
def test_every_sentence_of_a_row_is_known_to_one_of_its_tests() -> None:
    """By words of it that no other row has: three in a row, in a text or a pattern of the test's file."""
    by_row = [set[str]().union(*map(runs, row.sentences)) for row in rows()]
    counts = Counter(run for own in by_row for run in own)
    unknown: list[str] = []
    for row in rows():
        files = [file_of(test) for test in row.tests]
        assert files, row.sentences
        assert None not in files, row.tests
        for said in row.sentences:
            full = [one.text for one in told() if pattern(said).fullmatch(one.text)]
            own = {run for text in full for run in runs(text)}
            distinct = {run for run in own | runs(said) if counts[run] <= 1}
            if not any(f" {run} " in asserted(path) for path in files if path for run in distinct):
                unknown.append(f"{said}: {row.tests}")
    assert not unknown, "\n".join(unknown)


def test_modules_that_are_left_out_are_there() -> None:
    for module in EXCLUDED:
        assert (ROOT / module).exists(), module
