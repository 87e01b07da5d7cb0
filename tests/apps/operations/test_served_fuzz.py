"""Fuzzes with JSON of right and wrong shape: no 500, no traceback, nothing outside the store,
nothing lost, and nothing that /openapi.json does not describe."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import httpx
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from jsonschema import Draft202012Validator

from proxy.apps.operations import PATHS, description
from tests.apps.operations.served import (
    MODEL,
    STORE,
    Caller,
    assistant,
    page,
    step,
    strays,
    user,
)

Json = dict[str, Any]

TEXT = page("result", 1_000)
HISTORY = [user(), *step("c", TEXT), user("And?")]


FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck))

# -- JSON of any shape -----------------------------------------------------------------------------

scalars = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-(2**70), 2**70),
    some.floats(allow_nan=False, allow_infinity=False),
    some.text(max_size=20),
    some.sampled_from(
        [
            "../../x",
            "/etc/passwd",
            "\x00",
            STORE,
            "(a+)+$",
            "*",
            "a" * 300,
            "auto",
            "tool",
            "\ud800",
        ]
    ),
)
anything = some.recursive(
    scalars,
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)

# -- what the operations take ----------------------------------------------------------------------

ODD_PATHS = (
    *("..", "/../etc/passwd", "a/../../x", "~/../../x", "x/..\\..\\y", "/etc/passwd"),
    *("a\x00b", "a\nb", "\ud800", "x" * 100_000, "a/" * 5_000 + "b", "", " "),
)
"""Paths that climb, or that no file system takes."""

texts = some.sampled_from([TEXT, "words " * 200, "brief", ""]) | some.text(max_size=30)
parts = some.lists(
    some.fixed_dictionaries({"type": some.just("text"), "text": texts}, optional={"x": anything})
)
contents = texts | parts
ids = some.sampled_from(["a", "b", "../../x", "\x00", "é"])


def messages_of(*roles: str) -> some.SearchStrategy[Json]:
    """Make messages with a text or parts, and perhaps an unknown field."""
    return some.fixed_dictionaries(
        {"role": some.sampled_from(roles), "content": contents}, optional={"x": anything}
    )


said = messages_of("user", "assistant")
orphans = some.fixed_dictionaries(
    {"role": some.just("tool"), "tool_call_id": ids, "content": contents}
)
steps = some.builds(
    lambda one, results: step(one, *results), ids, some.lists(contents, min_size=1, max_size=3)
)
turns = steps | steps | some.lists(said, min_size=1, max_size=2) | some.lists(orphans, max_size=1)
leading = some.lists(messages_of("system", "developer"), max_size=2)
histories = some.builds(
    lambda first, made: [*first, *chain.from_iterable(made)], leading, some.lists(turns, max_size=6)
)
offloads = some.fixed_dictionaries(
    {
        "messages": histories,
        "store_dir": some.sampled_from([STORE, "./cache_file/", "~/x", "a/../b", *ODD_PATHS]),
        "max_total_tokens": some.sampled_from([0, 300, 2_000, 2**64]),
        "max_tool_message_tokens": some.sampled_from([0, 100, 2_000]),
        "model": some.just(MODEL),
    },
    optional={
        "context_manage_mode": some.sampled_from(["compact", "compress", "auto"]),
        "compact_ratio_threshold": some.floats(0, 1),
        "group_token_threshold": some.none() | some.integers(0, 3_000),
        "keep_recent_count": some.none() | some.integers(0, 8) | some.just(2**64),
        "chat_id": some.none() | some.sampled_from(["one", "../../x", "", "\x00"]),
        "preview_char_length": some.integers(0, 3_000) | some.just(10**30),
    },
)
SPACED: Json = {
    "messages": step("a", TEXT) * 2,
    "store_dir": " ",
    "max_total_tokens": 0,
    "max_tool_message_tokens": 2_000,
    "model": MODEL,
}
"""What becomes a group in a directory whose name is a space."""
questions = some.fixed_dictionaries(
    {"pattern": some.text(max_size=12) | some.sampled_from(["result", "(a+)+$", "[", "."])},
    optional={
        "path": some.sampled_from([STORE, "/", "x", *ODD_PATHS]),
        "glob": some.text(max_size=6) | some.sampled_from(["*.txt", "[!", "**/*"]),
        "limit": some.none() | some.integers(-3, 2**65),
    },
)
spans = some.fixed_dictionaries(
    {},
    optional={
        "offset": some.integers(-3, 2**65),
        "limit": some.none() | some.integers(-3, 2**65),
        "column": some.integers(-3, 2**65),
        "characters": some.none() | some.integers(900, 2_000),
    },
)
reads = some.builds(
    lambda span, path: {**span, "absolute_path": path},
    spans,
    some.sampled_from([f"{STORE}/none.txt", {"path": f"{STORE}/none.txt"}, *ODD_PATHS]),
)
sessions = some.none() | some.sampled_from(["0", "f" * 16, "F", "*", ""])
RIGHT = {
    "/context_offload": offloads,
    "/context_compact": offloads,
    "/context_compress": offloads,
    "/grep": questions
    | some.builds(lambda asked, session: {**asked, "session": session}, questions, sessions),
    "/read_file": reads,
    "/recall_sessions": some.fixed_dictionaries(
        {}, optional={"session": sessions, "limit": some.integers(0, 201)}
    ),
    "/v1/compress": some.fixed_dictionaries(
        {"messages": histories}, optional={"model": some.just(MODEL)}
    ),
}
PARAMETERS = [
    "messages", "context_manage_mode", "working_summary_mode", "compact_ratio_threshold", "max_total_tokens",
    "all_token_threshold", "max_tool_message_tokens", "group_token_threshold", "keep_recent_count", "keep_recent",
    "store_dir", "storage_path", "chat_id", "preview_char_length", "compress_system_message", "model", "pattern",
    "path", "glob", "limit", "file_path", "absolute_path", "offset", "column", "characters", "archive", "session",
]  # fmt: skip
values = anything | some.lists(said | orphans | anything, max_size=3)
spoils = some.dictionaries(some.sampled_from(PARAMETERS), values, max_size=2)


def requests(path: str) -> some.SearchStrategy[tuple[str, Any]]:
    """Make a valid request, one with a fault, members of any kind, or any JSON at all."""
    spoiled = some.builds(lambda body, changes: {**body, **changes}, RIGHT[path], spoils)
    return some.tuples(some.just(path), RIGHT[path] | spoiled | spoils | anything)


NONE = (b"", b"[]", b"\xff\xfe", b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"{")
"""Bodies that are no JSON object."""

FIRST: list[tuple[str, Any]] = [
    *((path, body) for path in RIGHT for body in NONE),
    *(
        (path, {"messages": HISTORY, "store_dir": STORE, "model": MODEL, **wrong})
        for path in ("/context_offload", "/context_compact", "/context_compress")
        for wrong in (
            {"keep_recent": "5"},
            {"store_dir": "../x"},
            {"messages": [*HISTORY, None]},
            {"keep": 1},
        )
    ),
]
"""What every run tries."""

# -- what is said of them --------------------------------------------------------------------------

DOCUMENT = json.loads(description())


def described(schema: Json) -> Draft202012Validator:
    """Return what checks values against a schema of the document."""
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def schema_of(content: Json) -> Draft202012Validator:
    return described(content["content"]["application/json"]["schema"])


TAKES = {path: schema_of(item["post"]["requestBody"]) for path, item in DOCUMENT["paths"].items()}
GIVES = {
    path: {int(status): schema_of(reply) for status, reply in item["post"]["responses"].items()}
    for path, item in DOCUMENT["paths"].items()
}


def test_every_operation_is_described(caller: Caller) -> None:
    response = httpx.get(f"{caller.proxy.root}/openapi.json", trust_env=False)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json() == DOCUMENT and DOCUMENT["openapi"] == "3.1.0"
    assert set(RIGHT) == set(TAKES) == {path.decode() for path in PATHS}
    for schema in DOCUMENT["components"]["schemas"].values():
        described(schema)


def test_random_bodies_are_answered_as_described(caller: Caller) -> None:
    def answered(asked: tuple[str, Any]) -> int:
        path, body = asked
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = caller.http.post(path, content=content)
        assert response.status_code in (200, 400, 404), response.text
        reply = response.json()
        GIVES[path][response.status_code].validate(reply)
        if response.status_code == 200:
            TAKES[path].validate(body)
        sent = body.get("messages") if isinstance(body, dict) else None
        if path.startswith("/context_") and response.status_code != 200 and isinstance(sent, list):
            assert reply["messages"] == sent
        return response.status_code

    @settings(FUZZ, max_examples=2 * settings.default.max_examples)
    @given(some.sampled_from(sorted(RIGHT)).flatmap(requests))
    def fuzz(asked: tuple[str, Any]) -> None:
        answered(asked)

    assert {answered(one) for one in FIRST} == {400}
    fuzz()
    assert strays(caller.proxy) == []


def test_random_conversations_lose_nothing(caller: Caller) -> None:
    """All of any history is still in the reply or its references, also after a second offload."""

    @FUZZ
    @given(offloads)
    @example(SPACED)
    def fuzz(body: Any) -> None:
        history = messages = body["messages"]
        for _ in range(2):
            reply = caller.post("/context_offload", {**body, "messages": messages})
            assert reply.status in (200, 400), reply.answer
            assert reply.status == 200 or reply.messages == messages
            assert reply.groups or reply.metadata.get("tokens_after", 0) <= reply.metadata.get(
                "tokens_before", 0
            )
            messages = reply.messages
            assert spoken(caller.restored(messages)) == spoken(history)

    fuzz()
    assert strays(caller.proxy) == []


def spoken(history: list[Json]) -> list[Json]:
    """Return the history without what `Caller.restored` does not restore."""
    return [message for message in history if message["role"] not in ("system", "developer")]


def test_random_file_requests_are_answered(caller: Caller) -> None:
    [path] = caller.compact(HISTORY).files

    @FUZZ
    @given(questions, some.sampled_from([path, path, "/etc/passwd", "x"]), spans)
    def fuzz(question: Json, file: str, span: Json) -> None:
        below = caller.post("/grep", question)
        inside = caller.post("/grep", {**question, "file_path": file})
        assert below.status in (200, 400, 404) and inside.status in (200, 400, 404)
        assert all(match["path"].endswith(path) for match in below.metadata.get("matches", []))
        assert {match["path"] for match in inside.metadata.get("matches", [])} <= {path}
        reply = caller.read(path, **span)
        assert reply.status in (200, 400)
        # without the line that says how to go on
        text = reply.answer.rpartition("\n[lines ")[0] or reply.answer
        assert reply.status == 400 or text in TEXT

    fuzz()


def test_the_proxy_is_healthy_after_the_fuzzing(caller: Caller) -> None:
    assert httpx.get(f"{caller.proxy.root}/health", trust_env=False).json() == {"status": "healthy"}
    assert caller.compact([user(), *step("c", TEXT), assistant()]).files
