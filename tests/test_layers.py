"""Who may import whom, each outside thing has one home, and no API is named outside of its
dialect."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SERVING = "import proxy.cli, proxy.settings, proxy.server.runner, proxy.apps.parts"
"""The imports of `offload-proxy serve`."""

LAYERS = [
    {"errors", "rawjson", "sse", "policy", "plan", "tools"},
    {"dialects"},
    {"lru", "regex", "release", "settings", "terminal", "threads", "tokens"}
    | {"policies", "stores", "telemetry", "upstream"},
    {"requests"},
    {"server"},
    {"apps"},
    {"cli", "__main__"},
]
"""Each imports only from the lines above it, and from its own where that makes no circle. So the
core, which ends with `server`, knows no app."""

HOMES = {
    "httpx": {"upstream", "apps"},
    "mcp": {"apps"},
    "aiohttp": {"upstream"},
    "yaml": {"policies"},
    "tiktoken": {"tokens"},
    "re2": {"regex"},
    "redis": {"stores"},
    "obstore": {"stores"},
    "prometheus_client": {"telemetry"},
    "opentelemetry": {"telemetry"},
    "uvicorn": {"server", "apps"},
    "openai": {"apps"},
}

PURE = {"errors", "rawjson", "sse", "policy", "plan", "tools", "dialects"}
"""These wait for nothing, read nothing and say the same every time."""

IMPURE = {"asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "secrets", "socket", "subprocess",
          "tempfile", "threading", "time", "uuid"}  # fmt: skip
"""What of the standard library waits, reads, writes, or says something else the next time."""


FIELDS = {
    "chat": re.compile(
        r"\b(tool_calls|tool_call_id|finish_reason|choices|max_completion_tokens|reasoning_content)\b"
    ),
    "responses": re.compile(
        r"\b(function_call_output|output_index|sequence_number|previous_response_id|max_output_tokens|encrypted_content"
        r"|output_text|item_reference|compaction_trigger|output_item)\b"
    ),
    "messages": re.compile(
        r"\b(tool_use_id|tool_result|input_schema|stop_reason|stop_sequence|content_block\w*|message_(start|delta|stop)"
        r"|redacted_thinking|disable_parallel_tool_use)\b"
    ),
}
"""Dialect → names that only its API uses."""

SHARED = re.compile(r"\b(delta|context_management|stream_options)\b")
"""Names that several APIs use, and nothing else."""

SPEAK_CHAT = ("proxy.apps.operations", "proxy.apps.demo")
"""The interface of the operations is made of chat messages, and the demo plays a chat client and
its upstream."""

READ_OTHERS = {
    "proxy/apps/replay/sessions.py",
    "proxy/apps/replay/formats.py",
    "proxy/apps/replay/recordings.py",
}
"""They read what other tools recorded of all APIs, in those tools' words."""

CONTRACTS = {
    "proxy/telemetry/metrics.py": {"tool_calls"},
    "proxy/dialects/refusals.py": {"choices"},
    "proxy/dialects/grammars.py": {"tool_calls", "tool_call_id"},
}
"""File → names in it that belong to others: a metric of ours happens to have one, refusals and
models write others."""


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {dotted(path): path for path in sorted((ROOT / "proxy").rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


@cache
def imported() -> dict[str, set[str]]:
    """Module → names that it imports."""
    return {name: set(imports(tree)) for name, tree in trees().items()}


@cache
def graph() -> dict[str, set[str]]:
    """Module → names below `proxy` that it imports."""
    return {
        name: {one for one in ones if one.startswith("proxy.")} for name, ones in imported().items()
    }


def imports(tree: ast.Module) -> Iterator[str]:
    """Absolute names, with what is taken from a package behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(name: str) -> str:
    """`proxy.plan.planner` → `plan`."""
    return [*name.split("."), ""][1]


def test_imports_only_go_downwards() -> None:
    rank = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    for name in filter(part, FILES):
        assert part(name) in rank, f"{name} stands in no layer"
        above = {
            one for one in graph()[name] if part(one) in rank and rank[part(one)] > rank[part(name)]
        }
        assert not above, name


def test_the_application_names_few_things_of_ours() -> None:
    """It routes and admits. What it routes to comes from the process and its parts."""
    assert len(graph()["proxy.server.app"]) <= 30


def test_there_are_no_import_cycles() -> None:
    known = set(FILES)
    edges = {name: {_module(one, known) for one in ones} - {name} for name, ones in graph().items()}
    edges = {
        name: {one for one in ones if not name.startswith(one + ".")}
        for name, ones in edges.items()
    }
    while leaves := [name for name, ones in edges.items() if not ones & set(edges)]:
        for name in leaves:
            del edges[name]
    assert not edges


def _module(name: str, known: set[str]) -> str:
    return name if name in known else name.rpartition(".")[0]


def test_no_public_class_name_is_used_twice() -> None:
    classes = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


@pytest.mark.parametrize(("outside", "homes"), HOMES.items())
def test_each_outside_thing_has_one_home(outside: str, homes: set[str]) -> None:
    users = {
        part(name)
        for name, ones in imported().items()
        if any(one.split(".")[0] == outside for one in ones)
    }
    assert users <= homes


def test_the_core_is_pure() -> None:
    for name, tree in trees().items():
        if part(name) in PURE:
            pure = tuple(f"proxy.{one}" for one in PURE)
            outside = {one.split(".")[0] for one in imported()[name] if not one.startswith(pure)}
            assert outside <= sys.stdlib_module_names - IMPURE | {"msgspec"}, name
            assert not [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Await | ast.AsyncFunctionDef)
            ], name


def test_only_settings_reads_the_environment() -> None:
    """But for prometheus-client's own variable, which is all that library looks at."""
    readers = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("environ", "environb", "getenv", "getenvb")
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any("env" in name.name for name in node.names)
        )
    }
    assert readers - {"proxy.telemetry.metrics"} == {"proxy.settings"}


def test_only_its_dialect_names_the_fields_of_an_api() -> None:
    """In code, strings and comments."""
    for path in FILES.values():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if dotted(path).startswith(SPEAK_CHAT) or name in READ_OTHERS:
            continue
        found = {
            match[0]
            for dialect, fields in FIELDS.items()
            if not name.startswith(f"proxy/dialects/{dialect}/")
            for match in fields.finditer(text)
        }
        if not name.startswith("proxy/dialects/"):
            found |= set(SHARED.findall(text))
        assert found <= CONTRACTS.get(name, set()), name


def test_a_dialect_is_used_through_the_protocol() -> None:
    """Where one dialect in particular is meant, as for old records, only its object is imported:
    `chat.CHAT`."""
    for folder in (
        path.parent.name for path in (ROOT / "proxy" / "dialects").glob("*/__init__.py")
    ):
        package = f"proxy.dialects.{folder}"
        for name in FILES:
            inside = {
                one for one in graph()[name] if one == package or one.startswith(package + ".")
            }
            exempt = name.startswith((package, *SPEAK_CHAT))
            assert exempt or inside <= {f"{package}.{folder.upper()}"}, name


def test_what_dialects_share_knows_none_of_them() -> None:
    folders = {
        f"proxy.dialects.{path.parent.name}"
        for path in (ROOT / "proxy" / "dialects").glob("*/__init__.py")
    }
    shared = {name for name in FILES if name.rpartition(".")[0] == "proxy.dialects"} - folders
    for name in shared:
        assert not [one for one in graph()[name] if one.startswith(tuple(folders))], name


def test_serving_does_not_import_optional_packages() -> None:
    said = f"{SERVING}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True
    )
    spared = {
        "tiktoken",
        "numpy",
        "redis",
        "obstore",
        "httpx",
        "rich",
        "mcp",
        "openai",
        "opentelemetry",
        "proxy.apps.demo",
    }
    assert (spared | {"proxy.apps.demo"}).isdisjoint(done.stdout.split())
