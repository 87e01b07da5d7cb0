"""How large the code is, and what one request runs: `python -m bench.house`.

Code tokens are those of Python's `tokenize` without comments and docstrings. Formatted to 88
columns, a line has more of them where statements are packed. *Functions of a warm "hi"* are ours
that run in any thread.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import threading
import time
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from tests import fake_upstream
from tests.serving import Proxy, served

ROOT = Path(__file__).parents[1]
OURS = str(ROOT / "proxy") + "/"
QUIET = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SETTLED = 0.1
"""Seconds after a reply in which its records and its outcome are written."""
RUNS = 4
"""The one with the fewest functions counts: what runs by the clock is in few."""


@dataclass(frozen=True)
class Size:
    """How large some Python files are together."""

    tokens: int
    lines: int
    """Lines that have code tokens."""
    tuples: int
    """Assignments of one tuple to another."""


def size(texts: Iterable[str]) -> Size:
    """The size of these files."""
    tokens = 0
    lines = 0
    tuples = 0
    for text in texts:
        tree = list(ast.walk(ast.parse(text)))
        quiet = {line for node in tree for line in _text_lines(node)}
        found = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in QUIET
            and not (token.type == tokenize.STRING and token.start[0] in quiet)
        ]
        tokens += len(found)
        lines += len(set(found) - quiet)
        tuples += sum(map(_pairs, tree))
    return Size(tokens, lines, tuples)


def _text_lines(node: ast.AST) -> Iterable[int]:
    """The lines of a docstring."""
    value = node.value if isinstance(node, ast.Expr) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return range(value.lineno, (value.end_lineno or value.lineno) + 1)
    return ()


def _pairs(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def sources(*folders: str) -> list[str]:
    """The texts of our Python files below these folders: npm's packages bring some of their own."""
    return [
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts
    ]


def formatted(text: str) -> str:
    """The text as ruff formats it to 88 columns."""
    command = ["ruff", "format", "--isolated", "--line-length", "88", "-"]
    made = subprocess.run(
        [sys.executable, "-m", *command], input=text, capture_output=True, text=True, check=True
    )
    return made.stdout


def words() -> int:
    """The rows of the table of own words; 0 without one."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = re.search(r"^## Words$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return len(re.findall(r"^\| [a-z]", section[1], re.MULTILINE)) - 1 if section else 0


def imported(path: str) -> int:
    """How many names of ours a file imports."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return sum(
        len(node.names)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("proxy")
    )


def policy_keys() -> int:
    """The entries of the schema's tables."""
    schema = json.loads((ROOT / "policies/schema.json").read_text(encoding="utf-8"))
    return sum(len(table.get("properties", ())) for table in schema["$defs"].values())


class Calls:
    """Notes our functions that are called in threads that start after it."""

    def __init__(self) -> None:
        self.functions = set[CodeType]()
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # comprehensions and lambdas belong to the function that has them
        if event == "call" and code.co_filename.startswith(OURS) and code.co_name[0] != "<":
            self.functions.add(code)


def greeting() -> tuple[int, int]:
    """How many functions a warm "hi" runs until its reply has arrived, and until its outcome is
    recorded."""
    calls = Calls()
    try:
        with fake_upstream.StrictUpstream() as up:
            up.respond(lambda _: fake_upstream.text("Hello."))
            with served({"default": {"upstream": {"base_url": up.url}}}) as one:
                runs = [_greeted(one, calls) for _ in range(1 + RUNS)]
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return min(replied for replied, _ in runs), min(recorded for _, recorded in runs)


def _greeted(one: Proxy, calls: Calls) -> tuple[int, int]:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    calls.functions.clear()
    one.post("/v1/chat/completions", body).raise_for_status()
    replied = len(calls.functions)
    time.sleep(SETTLED)
    return replied, len(calls.functions)


def rows() -> Iterator[tuple[str, str]]:
    """What is counted, and the count."""
    whole = sources("proxy")
    yield "code tokens of `proxy/`", f"{size(whole).tokens:,}"
    apps = size(sources("proxy/apps")).tokens
    yield "of these, the core (without `proxy/apps`)", f"{size(whole).tokens - apps:,}"
    narrow = size(map(formatted, whole))
    yield "tokens a code line, formatted to 88 columns", f"{narrow.tokens / narrow.lines:.1f}"
    yield "tuple assignments per 1,000 code lines", f"{1000 * narrow.tuples / narrow.lines:.1f}"
    if words():
        yield "own words", str(words())
    replied, recorded = greeting()
    yield 'functions of a warm "hi"; with what runs after the reply', f"{replied}; {recorded}"
    yield "names that `server/app.py` imports of ours", str(imported("proxy/server/app.py"))
    yield "policy keys (entries of the schema's tables)", str(policy_keys())
    yield "code tokens of `tests/` and `bench/`", f"{size(sources('tests', 'bench')).tokens:,}"


def main() -> int:
    for name, count in rows():
        print(f"| {name} | {count} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
