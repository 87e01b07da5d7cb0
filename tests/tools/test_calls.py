"""Whole calls as models write them, in the words of other agents' tools, and the results that they
have to reach."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from proxy import regex
from proxy.plan import preview
from proxy.plan.preview import Label
from proxy.tools.answer import Material, answer, meaning
from proxy.tools.definitions import Tool, parsed
from proxy.tools.find import Index
from tests import transcripts

STORE = "/context_store"
LOG, CODE, TODO = (
    f"{STORE}/{name}"
    for name in ("billing.log.2e7dc01b.txt", "settings.py.00000001.txt", "n.02.txt")
)
FILES = {
    LOG: "".join(f"{number} ERROR late\n" for number in range(200)),
    CODE: "".join(f"K{number} = {number}\n" for number in range(200)),
    TODO: "nothing",
}
CALLS = {
    LOG: ("read_log", '{"path": "/var/log/billing.log"}'),
    CODE: ("view", '{"path": "app/settings.py"}'),
    TODO: ("todo", "{}"),
}
INDEX = Index(FILES, {path: preview.of_call(*call, len) for path, call in CALLS.items()}, STORE)


def told(tool: Tool, arguments: Any, budget: int = 100_000) -> str:
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return answer(parsed(tool, raw), Material(FILES, INDEX, budget, len, regex.compile)).text


READS: list[tuple[Any, str, int]] = [
    # Claude Code, opencode
    ({"file_path": "/var/log/billing.log", "offset": 20, "limit": 50}, LOG, 20),
    ({"filePath": "app/settings.py", "offset": 20}, CODE, 20),
    # Gemini and Qwen Code
    ({"absolute_path": "/workspace/app/settings.py", "offset": 10, "limit": 40}, CODE, 10),
    # editors: OpenHands, SWE-agent, Anthropic's text editor
    ({"command": "view", "path": "/repo/app/settings.py", "view_range": [11, 60]}, CODE, 10),
    ({"command": "view", "path": "app/settings.py", "view_range": [11, -1]}, CODE, 10),
    ({"path": "app/settings.py", "view_range": None}, CODE, 0),
    # Cursor, Windsurf, Copilot, Roo Code
    (
        {
            "target_file": "app/settings.py",
            "start_line_one_indexed": 11,
            "end_line_one_indexed_inclusive": 60,
            "should_read_entire_file": False,
            "explanation": "look",
        },
        CODE,
        10,
    ),
    ({"AbsolutePath": "file:///w/app/settings.py", "StartLine": 11, "EndLine": 60}, CODE, 10),
    ({"filePath": "C:\\w\\app\\settings.py", "startLine": 11, "endLine": 60}, CODE, 10),
    ({"path": "app/settings.py", "start_line": "11", "end_line": "60"}, CODE, 10),
    ({"files": [{"path": "app/settings.py"}]}, CODE, 0),
    ({"paths": ["app/settings.py"]}, CODE, 0),
    # MCP's file system
    ({"path": "app/settings.py", "head": 40}, CODE, 0),
    # what weak models make of it
    ({"filename": "billing.log"}, LOG, 0),
    ({"file": f"{STORE}/var/log/billing.log"}, LOG, 0),
    ({"path": ["/var/log/billing.log"]}, LOG, 0),
    ({"path": {"path": "/var/log/billing.log"}}, LOG, 0),
    ({"url": "http://localhost/var/log/billing.log"}, LOG, 0),
    ({"path": "/var/log/billing.log:41"}, LOG, 40),
    ({"path": "app/settings.py#L41-L90"}, CODE, 40),
    ({"path": "app/settings.py:9000"}, CODE, 0),
    ({"path": "/var/log/billing.log", "limit": -1}, LOG, 0),
    ({"path": "/var/log/billing.log", "limit": 0, "offset": None}, LOG, 0),
    ({"path": "/var/log/billing.log", "pattern": "ERROR"}, LOG, 0),
    ({"path": "/var/log/billing.log", "encoding": "utf-8", "lines": 100}, LOG, 0),
    ({"arguments": {"path": "/var/log/billing.log"}}, LOG, 0),
    ({"PATH": "/var/log/billing.log"}, LOG, 0),
    (json.dumps(json.dumps({"path": "/var/log/billing.log"})), LOG, 0),
    (json.dumps("/var/log/billing.log"), LOG, 0),
]


@pytest.mark.parametrize(("arguments", "path", "line"), READS)
def test_a_call_in_another_tools_words_reads_the_result(
    arguments: Any, path: str, line: int
) -> None:
    shown = [one for one in told("read_file", arguments).splitlines() if not one.startswith("[")]
    assert shown[0] == FILES[path].splitlines()[line]
    assert len(shown) >= 30


SEARCHES: list[tuple[Any, str]] = [
    (
        {
            "pattern": "K17 ",
            "path": "app",
            "output_mode": "content",
            "-n": True,
            "-i": True,
            "-C": 3,
        },
        CODE,
    ),
    ({"pattern": "K17 ", "glob": "*.py", "head_limit": 20}, CODE),
    ({"pattern": "K17 ", "include": "*.py", "path": "/workspace"}, CODE),
    ({"regex": "K17 ", "path": ".", "file_pattern": "*.py"}, CODE),
    (
        {
            "query": "K17 ",
            "include_pattern": "**/*.py",
            "case_sensitive": False,
            "explanation": "look",
        },
        CODE,
    ),
    ({"query": "K17 ", "isRegexp": False, "includePattern": "app/*", "maxResults": 20}, CODE),
    ({"search_term": "^17 ERROR", "file": "billing.log"}, LOG),
    ({"search_query": "^17 ERROR", "dir": "/var/log"}, LOG),
    ({"pattern": "^17 ERROR", "paths": ["/var/log/billing.log", "app/settings.py"]}, LOG),
    ({"pattern": "^17 ERROR", "files": [{"path": "/var/log/billing.log"}]}, LOG),
    ({"keyword": "^17 ERROR", "filename": "'/var/log/billing.log'"}, LOG),
    ({"pattern": "^17 ERROR", "path": "result of read_log /var/log/billing.log"}, LOG),
    ({"pattern": "^17 ERROR", "limit": -1}, LOG),
    (json.dumps("^17 ERROR"), LOG),
]


@pytest.mark.parametrize(("arguments", "path"), SEARCHES)
def test_a_search_in_another_tools_words_finds_the_line(arguments: Any, path: str) -> None:
    found = re.findall(
        r"^File: (\S+)[^\n]*\n(?:\d+- .*\n)*17: (?:K17|17 ERROR)", told("grep", arguments), re.M
    )
    assert found == [path.removeprefix(f"{STORE}/")]


def test_what_is_ignored_is_named() -> None:
    note = (
        '[ignored: "-C", "multiline"; grep takes one JSON object with pattern, path, glob, limit]\n'
    )
    given = {"pattern": "K17 ", "path": "app"}
    assert told("grep", {**given, "-C": 3, "multiline": True}) == note + told("grep", given)
    many = {f"x{number}": 1 for number in range(9)}
    assert told("read_file", {"path": LOG, **many}).startswith(
        '[ignored: "x0", "x1", "x2", "x3", "x4", …; read_file'
    )
    assert len(told("read_file", {"path": LOG, **many}, 400)) <= 400
    assert told("read_file", {"path": "nowhere", "x": 1}).startswith(
        '[ignored: "x"; read_file takes'
    )


def test_calls_mean_the_same_however_they_name_the_file() -> None:
    def meant(tool: Tool, **arguments: Any) -> Any:
        return meaning(parsed(tool, json.dumps(arguments)), INDEX)

    assert meant("read_file", path=LOG, limit=1) == meant(
        "read_file", limit=1, filePath="/var/log/billing.log"
    )
    assert meant("grep", pattern="x") == meant("grep", pattern="x", path=STORE, glob=None)
    different = [
        meant("read_file", path=LOG),
        meant("read_file", path=LOG, offset=3),
        meant("read_file", path=CODE),
    ]
    different += [
        meant("grep", pattern="x", path=LOG),
        meant("grep", pattern="x", path="no"),
        meant("grep", path=7),
    ]
    assert len(set(different)) == 6


# -- recorded calls --------------------------------------------------------------------------------


def spellings(
    tool: str, arguments: Any, path: str, label: Label, call: str
) -> Iterator[tuple[str, str]]:
    """Yield the ways in which a model may name the result of a call."""
    name = path.rpartition("/")[2]
    yield "our name", path
    yield "our name", name
    yield "our name", path.removesuffix(".txt")
    yield "our name", f"/tmp/{name}:12"
    yield "our words", f"{path} ({label.origin})"
    yield "our words", f"(detailed result is stored in {path}; complete, {label.origin})"
    yield "our words", label.about
    yield "its id", call
    for value in arguments.values() if isinstance(arguments, dict) else ():
        if not isinstance(value, str) or not value.strip() or len(value) > preview.SAID_CHARS:
            continue
        last = re.split(r"[?#]", value)[0].rstrip("/").rpartition("/")[2]
        if re.fullmatch(r"[\w./~@+:-]*/[\w./~@+?=#&-]+|[\w@+-]+\.\w{1,5}", value) and re.search(
            r"\w", last
        ):
            yield from (
                ("its path", form.format(value))
                for form in ("{}", "'{}'", "`{}`", "./{}", f"{STORE}/{{}}")
            )
            yield from (
                ("its path", form.format(value))
                for form in ("{}:12", "{}:3-40", "{}#L12", "file://{}")
            )
            yield from (
                ("its path", said)
                for said in (value.upper(), value.replace("/", "\\"), value.lstrip("/"))
            )
            yield from (
                ("its last component", form.format(last))
                for form in ("{}", f"{STORE}/{{}}", "/w/{}", "{}.txt")
            )
            yield from (
                ("as a call", form.format(tool, value))
                for form in ("{} {}", '{}(path="{}")', "{}: {}")
            )
        elif " " in value and "\n" not in value:
            yield from (
                ("its text", form.format(value)) for form in ("{}", "'{}'", f"{STORE}/{{}}")
            )
            yield "its text", value.replace(" ", "_")
            yield "as a call", f"{tool} {value}"


@transcripts.needed
@pytest.mark.sweep
def test_recorded_calls_are_found_by_at_least_95_percent_of_their_names() -> None:
    made, found = Counter[str](), Counter[str]()
    for run in transcripts.load():
        calls = {
            call["id"]: call["function"]
            for message in run.messages
            for call in message.get("tool_calls") or ()
        }
        known: dict[str, tuple[str, str, Label, str]] = {}
        for message in run.messages:
            call = message.get("tool_call_id", "")
            if call in calls and len(str(message["content"])) > 800:
                tool, arguments = calls[call]["name"], calls[call]["arguments"]
                label = preview.of_call(tool, arguments, len)
                path = f"{STORE}/{preview.file_name(label, f'{len(known):08x}')}"
                label = msgspec.structs.replace(label, call_strings=(*label.call_strings, call))
                known[path] = (tool, arguments, label, call)
        index = Index(known, {path: label for path, (_, _, label, _) in known.items()}, STORE)
        for path, (tool, arguments, label, call) in known.items():
            for way, name in spellings(tool, json.loads(arguments or "{}"), path, label, call):
                made[way] += 1
                found[way] += path in index.find(name)
    assert len(made) == 7 and made.total() > 10_000
    assert all(found[way] >= 0.95 * number for way, number in made.items()), (found, made)
    print(
        {way: f"{found[way]} of {number}" for way, number in made.items()},
        f"{found.total() / made.total():.1%}",
    )
