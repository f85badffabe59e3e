"""The sentences of loco's errors and warnings, as its source has them, and those of the page that lists them.

In a sentence "…" stands for what varies.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pages import ROOT

_LOGS = {"warning": 0, "warn": 0, "warn_once_per_machine": 1, "_say": 1}  # and which argument is the text
_PLACEHOLDER = re.compile(r"%[-+.\d]*[sdfgri]")
_PATTERN = re.compile(r"\[[^\]]*\][+*?]?|[.]?[*+?]|\\[dwSsW]|[|]")  # of a regular expression: what varies


@dataclass(frozen=True)
class Sentence:
    """text: e.g. "keep must be >= 2, got …". kind: the error's class, or "warning"."""

    text: str
    kind: str
    module: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.kind}: {self.text}"


def sentences(paths: Iterable[Path], composed: Mapping[str, Sequence[str]]) -> Iterator[Sentence]:
    """All that is given to an error's class or logged as a warning, and has at least two words of its own.

    Args:
        composed: by module, the functions that return sentences, or parts of them, for errors made elsewhere.
    """
    for path in paths:
        module = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text())
        constants = _assigned(tree.body)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        seen = set[tuple[int, str]]()
        for scope in (*functions, tree):  # innermost last: a call is seen with the names of each scope
            names = constants | (_assigned(ast.walk(scope)) if scope is not tree else {})
            for line, kind, text in _told(scope, names, module, composed):
                text = " ".join(text.split())
                if len(words(text)) >= 2 and (line, text) not in seen:
                    seen.add((line, text))
                    yield Sentence(text, kind, module, line)


def _told(
    scope: ast.AST, names: Mapping[str, list[str]], module: str, composed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[int, str, str]]:
    if isinstance(scope, ast.FunctionDef) and scope.name in composed.get(module, ()):
        for node in ast.walk(scope):
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for text in (text for value in values for text in _texts(value, names)):
                    yield node.lineno, "composed", text
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called.endswith("Error"):
            arguments, kind = node.args[:1], called
        elif called in _LOGS:
            arguments, kind = node.args[_LOGS[called] :][:1], "warning"
        else:
            continue
        for text in (text for argument in arguments for text in _texts(argument, names)):
            yield node.lineno, kind, _PLACEHOLDER.sub("…", text) if kind == "warning" else text


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, list[str]]:
    """Texts by the names that hold them."""
    found: dict[str, list[str]] = {}
    assignments = [node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign)]
    for node in sorted(assignments, key=lambda node: node.lineno):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            found.setdefault(target.id, []).extend(_texts(node.value, {}))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            more = _texts(node.value, {})
            if more and found.get(node.target.id):
                found[node.target.id][-1] += more[0]
    return found


def _texts(node: ast.expr, names: Mapping[str, list[str]]) -> list[str]:
    """What a string can be; [] if it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = [[part.value] if isinstance(part, ast.Constant) else ["…"] for part in node.values]
        return ["".join(str(one[0]) for one in parts)]
    if isinstance(node, ast.Name):
        return names.get(node.id, [])
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, names), *_texts(node.orelse, names)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _texts(node.left, names) or ["…"], _texts(node.right, names) or ["…"]
        return [one + other for one in left for other in right]
    return []


def words(text: str) -> list[str]:
    """Of what does not vary, without punctuation; "…" between two parts."""
    found = re.findall(r"…|[\w'=<>-]+", text)
    return [word.lower() for word in found if word != "…"]


def runs(text: str) -> set[str]:
    """All runs of three words of a sentence; or its parts, if all of them are shorter."""
    parts = [words(part) for part in text.split("…")]
    length = min(3, max(map(len, parts)))
    return {" ".join(part[k : k + length]) for part in parts for k in range(len(part) - length + 1)}


def literals(path: Path) -> str:
    """The texts in a file, with "…" for what varies in them: strings, f-strings and regular expressions."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            found += _texts(node, {})
    texts = (
        _PATTERN.sub(" … ", text.replace("\\.", ".").replace("\\(", "(")).replace("\\", "") for text in found
    )
    return " … ".join(texts)


def pattern(row: str) -> re.Pattern[str]:
    """Of the sentences that a row of the page stands for: "…" may be anything, or nothing."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in row.split("…")]
    return re.compile(r"\s*.*\s*".join(parts))
