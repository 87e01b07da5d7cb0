"""Who may import whom, read off the imports themselves; and each outside thing has its one home."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = [
    {"errors", "core"},
    {"dialects"},
    {"lru", "regex", "regular_files", "settings", "threads", "tokens", "policies", "stores", "telemetry", "upstream"},
    {"requests"},
    {"operations"},
    {"server"},
    {"demo", "cli", "__main__"},
]
"""Each imports only from the lines above it, and from its own where that makes no circle."""

HOMES = {
    "httpx": {"upstream"},
    "aiohttp": {"upstream"},
    "yaml": {"policies"},
    "tiktoken": {"tokens"},
    "re2": {"regex"},
    "redis": {"stores"},
    "obstore": {"stores"},
    "prometheus_client": {"telemetry"},
    "uvicorn": {"server", "demo"},
    "openai": {"demo"},
    "rich": {"demo"},
}

IMPURE = {"asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "secrets", "socket", "subprocess",
          "tempfile", "threading", "time", "uuid"}  # fmt: skip
"""What of the standard library waits, reads, writes, or says something else the next time."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    """Absolute names, with what is taken from a package behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(name: str) -> str:
    """`proxy.core.plan` → `core`."""
    return [*name.split("."), ""][1]


ALL = list(modules())
GRAPH = {name: {one for one in imports(tree) if one.startswith("proxy.")} for name, tree in ALL}


@pytest.mark.parametrize("name", [name for name in GRAPH if part(name)])
def test_imports_only_go_downwards(name: str) -> None:
    rank = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    assert part(name) in rank, f"{name} stands in no layer"
    above = {one for one in GRAPH[name] if part(one) in rank and rank[part(one)] > rank[part(name)]}
    assert not above


def test_there_are_no_import_cycles() -> None:
    known = set(GRAPH)
    edges = {name: {_module(one, known) for one in ones} - {name} for name, ones in GRAPH.items()}
    edges = {name: {one for one in ones if not name.startswith(one + ".")} for name, ones in edges.items()}
    while leaves := [name for name, ones in edges.items() if not ones & set(edges)]:
        for name in leaves:
            del edges[name]
    assert not edges


def _module(name: str, known: set[str]) -> str:
    return name if name in known else name.rpartition(".")[0]


@pytest.mark.parametrize(("outside", "homes"), HOMES.items())
def test_each_outside_thing_has_one_home(outside: str, homes: set[str]) -> None:
    users = {part(name) for name, tree in ALL if any(one.split(".")[0] == outside for one in imports(tree))}
    assert users <= homes


def test_core_and_dialects_are_pure() -> None:
    for name, tree in ALL:
        if part(name) in ("core", "dialects"):
            outside = {
                one.split(".")[0] for one in imports(tree) if not one.startswith(("proxy.core", "proxy.dialects"))
            }
            assert outside <= sys.stdlib_module_names - IMPURE | {"msgspec"}, name
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)], name


def test_only_settings_reads_the_environment() -> None:
    """But for prometheus-client's own variable, which is all that library looks at."""
    readers = {
        part(name)
        for name, tree in ALL
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "environ"
    }
    assert readers <= {"settings", "telemetry", "demo"}
