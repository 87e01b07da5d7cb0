"""The words of our own that a reader has to learn: few, each with one meaning, and none that means many things."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
STRUCK = frozenset(
    ["said", "told", "kept", "came", "whole", "seen", "who", "how", "own", "takes", "head"]
)
"""Each of them stood for several things."""

POLICY_KEYS = frozenset({("Offload", "said")})
"""Words of the policy files, which stay."""


def names(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the fields, methods and functions that a file defines: owner, name and line."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.Module):
            owner = node.name if isinstance(node, ast.ClassDef) else ""
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield owner, part.name, part.lineno
                elif (
                    owner and isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                ):
                    yield owner, part.target.id, part.lineno
                elif owner and isinstance(part, ast.Assign):
                    for target in part.targets:
                        if isinstance(target, ast.Name):
                            yield owner, target.id, part.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "self", node.attr, node.lineno


def test_no_struck_word_names_a_field_a_method_or_a_function() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {owner}.{name}"
        for path in sorted((ROOT / "proxy").rglob("*.py"))
        for owner, name, line in names(path)
        if name.strip("_") in STRUCK and (owner, name) not in POLICY_KEYS
    ]
    assert not found, "\n".join(found)


def test_the_table_of_words_is_short_and_each_has_one_row() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("\n## Words\n")[1].split("\n## ")[0]
    words = re.findall(r"^\| ([a-z][a-z ]*) \|", table, re.MULTILINE)
    assert len(words) == len(set(words))
    assert 60 <= len(words) <= 80


def test_each_word_of_the_table_is_used_in_the_code() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    code = "\n".join(path.read_text().lower() for path in (ROOT / "proxy").rglob("*.py"))
    code = code.replace("_", " ")
    words = re.findall(r"^\| ([a-z][a-z ]*) \|", table, re.MULTILINE)
    missing = [word for word in words if not re.search(rf"\b{word}(s|ed)?\b", code)]
    assert not missing
