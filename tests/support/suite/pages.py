"""The pages of the documentation, for tests that hold them against what is so."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(text: str, language: str) -> list[tuple[str, str]]:
    """What a page says of each block of code, in a comment before it, and the block."""
    found = re.finditer(rf"(?:<!-- (.*?) -->\n)?```{language}\n(.*?)```", text, re.DOTALL)
    return [(block[1] or "", block[2]) for block in found]


def sides(diff: str) -> tuple[str, str]:
    """What a diff is applied to, and what comes of it."""
    lines = diff.splitlines()
    before, after = ([line[1:] for line in lines if not line.startswith(other)] for other in "+-")
    return "\n".join(before), "\n".join(after)


def table(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins so, row by row, without their backticks."""
    rows = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split(" | ")] for row in rows]


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
