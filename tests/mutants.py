"""Break one thing of a package at a time and see whether its own tests notice.

    python -m tests.mutants server --seed 1 --count 15

A mutant negates a condition, shifts a bound, swaps a constant, drops a call, an assignment or an
await, or returns nothing. The package's own tests, `tests/server` and `tests/test_server.py` where
they are there, run on a copy of the tree. Prints a line for each mutant: whether it was killed, its
place, and the line before and after. The same seed makes the same mutants of the same source.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent.parent

SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}

TIMES = count(1_000_000_000)
"""Each version of a file gets a time of its own, so that no bytecode of another is taken for it."""


@dataclass(frozen=True)
class Mutant:
    """`new` stands in place of lines `first` to `last` of `file`."""

    file: Path
    first: int
    last: int
    new: str

    def source(self) -> str:
        """The whole file with the change."""
        lines = (HERE / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[self.first - 1 : self.last] = [self.new]
        return "".join(lines)

    def __str__(self) -> str:
        lines = (HERE / self.file).read_text(encoding="utf-8").splitlines()
        old = " ".join(line.strip() for line in lines[self.first - 1 : self.last])
        return f"{self.file}:{self.first}\n    - {old}\n    + {' '.join(self.new.split())}"


def of_values(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Every change within one expression: its kind, what is replaced, and by what."""
    match node:
        case ast.Compare(left, [op, *ops], others) if type(op) in SWAPPED:
            yield "compare", node, ast.Compare(left, [SWAPPED[type(op)](), *ops], others)
        case ast.BoolOp(op, values):
            yield "boolean", node, ast.BoolOp(SWAPPED[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            if not any(isinstance(side, ast.Constant | ast.JoinedStr) for side in (left, right)):
                yield "arithmetic", node, ast.BinOp(left, SWAPPED[type(op)](), right)
        case ast.Constant(bool() as value):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(int() as value):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Constant(str() as value) if value:
            yield "text", node, ast.Constant("")


def of_statements(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """The same for a statement as a whole, and for conditions."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield "negate", node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension(ifs=[test, *_]):
            yield "negate", test, ast.UnaryOp(ast.Not(), test)
        case ast.Expr(ast.Call() | ast.Await()):
            yield "call", node, ast.Pass()
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "assign", node, ast.Pass()
        case ast.Continue() | ast.Break() | ast.Raise() | ast.Delete():
            yield "jump", node, ast.Pass()
        case ast.Return(value) if value and not isinstance(value, ast.Constant):
            yield "return", node, ast.Return(ast.Constant(None))


def running(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is below it, without what runs no code of ours: types, documentation, and
    decorators."""
    yield node
    unread: set[int] = set()
    for name in ("annotation", "returns", "decorator_list"):
        found = getattr(node, name, None) or []
        unread.update(map(id, found if isinstance(found, list) else [found]))
    for child in ast.iter_child_nodes(node):
        documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not documents and id(child) not in unread and not isinstance(child, ast.JoinedStr):
            yield from running(child)


def mutants(file: Path) -> Iterator[tuple[str, Mutant]]:
    """Every mutant of one file (a path from the project's folder), with its kind."""
    text = (HERE / file).read_text(encoding="utf-8")
    lines = text.encode().splitlines(keepends=True)
    for node in running(ast.parse(text)):
        for kind, old, new in (*of_values(node), *of_statements(node)):
            before = lines[old.lineno - 1][: old.col_offset]
            after = lines[old.end_lineno - 1][old.end_col_offset :]
            written = ast.unparse(new)
            if isinstance(new, ast.expr):
                written = f"({written})"  # it may stand within others
            changed = (before + written.encode() + after).decode()
            yield kind, Mutant(file, old.lineno, old.end_lineno, changed)


def chosen(package: str, seed: int, number: int) -> list[Mutant]:
    """`number` mutants of `package` (a path within proxy/), as many of each kind as there are."""
    whole = Path("proxy", package)
    files = sorted((HERE / whole).rglob("*.py")) or [HERE / whole.with_suffix(".py")]
    kinds = defaultdict(list)
    for file in files:
        for kind, mutant in mutants(file.relative_to(HERE)):
            kinds[kind].append(mutant)
    dice = random.Random(seed)
    for found in kinds.values():
        dice.shuffle(found)
    picked: list[Mutant] = []
    while len(picked) < number and any(kinds.values()):
        picked += [found.pop() for found in kinds.values() if found]
    dice.shuffle(picked)
    return picked[:number]


OUTSIDE = {"server": ["tests/acceptance/test_bounds.py", "tests/acceptance/test_slow_clients.py"]}
"""Tests of a package that speak to a whole proxy."""


def tests_of(package: str) -> list[str]:
    """The paths of a package's own tests."""
    names = (f"tests/{package}", f"tests/test_{package}.py")
    return [name for name in names if (HERE / name).exists()] + OUTSIDE.get(package, [])


def copied(folder: Path) -> None:
    """Put the project as it stands, without what git ignores, into `folder`."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=HERE, text=True
    )
    for name in listed.split("\0"):
        if (HERE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, folder / name)


def write(file: Path, text: str) -> None:
    """Write a version of a file."""
    file.write_text(text, encoding="utf-8")
    moment = next(TIMES)
    os.utime(file, (moment, moment))


def passes(tests: list[str], folder: Path, limit: float) -> bool:
    """Whether all tests pass in `folder`, within `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # The same examples of properties for every mutant, as in CI.
    environment = os.environ | {"PYTHONPATH": str(folder), "CI": "true"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile everything
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def main() -> None:
    """Print the fate of each mutant, and how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.mutants")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("package", help="a path within proxy/: server, apps/dashboard, policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds; longer is killed, too")
    parser.add_argument("--tests", nargs="+", help="other tests than the package's own")
    chose = parser.parse_args()
    tests = chose.tests or tests_of(chose.package)
    picked = chosen(chose.package, chose.seed, chose.count)
    with tempfile.TemporaryDirectory() as held, ThreadPoolExecutor(chose.jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(chose.jobs):
            folder = Path(held, str(number), "tree")
            copied(folder)
            folders.put(folder)
        if not passes(tests, folder, chose.limit):
            sys.exit(f"{' '.join(tests)} fail without any mutant, or take longer than --limit")

        def lives(mutant: Mutant) -> bool:
            folder = folders.get()
            file = folder / mutant.file
            original = file.read_text(encoding="utf-8")
            write(file, mutant.source())
            try:
                return passes(tests, folder, chose.limit)
            finally:
                write(file, original)
                folders.put(folder)

        lived = 0
        for mutant, living in zip(picked, pool.map(lives, picked), strict=True):
            lived += living
            print("LIVES " if living else "killed", mutant, flush=True)
    print(f"{chose.package}: {len(picked) - lived} of {len(picked)} killed")


if __name__ == "__main__":
    main()
