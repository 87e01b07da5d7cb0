"""What the operations take: how a wrong parameter is named, which of two names counts, and the description of both."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from proxy.apps.operations import description, schema
from proxy.apps.operations.schema import ALIASES
from proxy.errors import ClientFault

OFFLOADS = (schema.OffloadParameters, schema.CompactParameters, schema.CompressParameters)
Json = dict[str, Any]
HISTORY = [{"role": "user", "content": "Hi."}]
BODY = {"messages": HISTORY, "store_dir": "/s"}


def taken(kind: type[msgspec.Struct], body: Any) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return schema.taken(schema.body(raw)[0], kind)


def refused(kind: type[msgspec.Struct], body: Any) -> str:
    with pytest.raises(ClientFault) as error:
        taken(kind, body)
    return error.value.message


WRONG: list[tuple[str, list[Any]]] = [
    ("max_total_tokens", ["many", -1, 1.5]),
    ("max_tool_message_tokens", [[], -5]),
    ("group_token_threshold", ["0", -1]),
    ("keep_recent_count", [-1, {}]),
    ("keep_recent", ["5"]),
    ("compact_ratio_threshold", ["high", -0.1]),
    ("preview_char_length", [-1]),
    ("compress_system_message", ["yes", 1]),
    ("chat_id", [7]),
    ("model", [["m"]]),
    ("store_dir", [3, "", "..", "a/../../x", "a\x00b", "\ud800", "x" * 100_000]),
    ("messages", [3, "x", {"role": "user"}, True, []]),
]


@pytest.mark.parametrize(("name", "values"), WRONG)
@pytest.mark.parametrize("kind", OFFLOADS)
def test_a_wrong_parameter_of_an_offload_is_named(kind: Any, name: str, values: list[Any]) -> None:
    for value in values:
        assert f"$.{name}" in refused(kind, {**BODY, name: value})


@pytest.mark.parametrize("name", ["context_manage_mode", "working_summary_mode"])
def test_an_unknown_mode_is_named(name: str) -> None:
    for mode in ("", "Auto", "off", "summarise", 3, ["auto"]):
        assert f"$.{name}" in refused(schema.OffloadParameters, {**BODY, name: mode})


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        *[(kind, {"store_dir": "/s"}, "messages") for kind in OFFLOADS],
        *[(kind, {"messages": HISTORY}, "store_dir") for kind in OFFLOADS],
        (schema.Search, {}, "pattern"),
        *[(schema.Search, {"pattern": value}, "$.pattern") for value in (3, "")],
        (schema.Search, {"pattern": "x", "path": 3}, "$.path"),
        (schema.Search, {"pattern": "x", "glob": []}, "$.glob"),
        *[(schema.Search, {"pattern": "x", "limit": value}, "$.limit") for value in ("5", -1, 1.5)],
        (schema.Find, {"pattern": "x", "file_path": 3}, "$.file_path"),
        (schema.Find, {"pattern": "x", "file_path": "x", "limit": -1}, "$.limit"),
        (schema.ReadFile, {}, "absolute_path"),
        (schema.ReadFile, {"absolute_path": 3}, "$.absolute_path"),
        (schema.ReadFile, {"file_path": ["x"]}, "$.file_path"),
        *[(schema.ReadFile, {"absolute_path": "x", "offset": value}, "$.offset") for value in (-1, "0")],
        *[(schema.ReadFile, {"absolute_path": "x", "limit": value}, "$.limit") for value in (-1, True)],
        *[
            (schema.ReadFile, {"absolute_path": "x", "characters": value}, "$.characters")
            for value in (1, 1 << 25, "9")
        ],
        *[(schema.ReadFile, {"absolute_path": "x", "column": value}, "$.column") for value in (-1, "0")],
        *[(schema.Search, {"pattern": "x", "session": value}, "$.session") for value in ("*", "", "a\n", "../x")],
        (schema.Search, {"pattern": "x", "archive": 1}, "$.archive"),
        (schema.RecallSessions, {"limit": 100_000}, "$.limit"),
        (schema.CompressMessages, {"messages": "x"}, "$.messages"),
    ],
)
def test_a_missing_or_wrong_parameter_is_named(kind: Any, body: Any, place: str) -> None:
    assert place in refused(kind, body)


@pytest.mark.parametrize(
    ("kind", "name", "cure"),
    [
        (schema.OffloadParameters, "max_total_token", "did you mean `max_total_tokens`?"),
        (schema.OffloadParameters, "contextmode", "did you mean `context_manage_mode`?"),
        (schema.OffloadParameters, "keep_recents", "did you mean `keep_recent`?"),
        (schema.CompactParameters, "MaxToolMessageTokens", "did you mean `max_tool_message_tokens`?"),
        (schema.Search, "patern", "did you mean `pattern`?"),
        (schema.Search, "zzz", "expected one of archive, glob, limit, path, pattern, session"),
        (schema.Find, "regex", "expected one of file_path, limit, pattern"),
        (schema.ReadFile, "absolutepath", "did you mean `absolute_path`?"),
        (schema.ReadFile, "ofset", "did you mean `offset`?"),
        (schema.ReadFile, "\ud800" * 3, "expected one of absolute_path, characters, column, file_path, limit, offset"),
        (schema.ReadFile, "limit" * 1_000_000, "is not a parameter"),
    ],
)
def test_a_parameter_that_no_operation_has_is_named_with_what_was_meant(kind: Any, name: str, cure: str) -> None:
    said = refused(kind, {**BODY, "pattern": "x", "absolute_path": "x", "file_path": "x", name: 1})
    assert cure in said and len(said) < 400


def test_a_parameter_of_another_operation_is_ignored() -> None:
    """Callers pass one set of parameters to several operations."""
    everything = dict.fromkeys(schema.PARAMETERS, 0)
    more = {"archive": True, "session": None}
    assert (
        taken(schema.Search, {**everything, "pattern": "x", "path": None, "glob": None, "limit": 1, **more}).limit == 1
    )


def test_gateways_may_send_anything_beside_the_messages() -> None:
    assert taken(schema.CompressMessages, {"messages": HISTORY, "model": "m", "config": {"x": 1}}).model == "m"


@pytest.mark.parametrize("content", [{}, {"status": "ok", "pages": [1, {"\ud800": None}]}])
@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_tools_result_may_be_an_object(role: str, content: Json) -> None:
    assert taken(schema.OffloadParameters, {**BODY, "messages": [{"role": role, "content": content}]})


@pytest.mark.parametrize("name", ["absolute_path", "file_path"])
def test_a_file_can_be_named_by_a_match_in_it(name: str) -> None:
    match = {"path": "/s/a.txt", "line": 3, "column": 0, "text": "x"}
    assert taken(schema.ReadFile, {name: match}).file == "/s/a.txt"
    for wrong in ({}, {"path": 3}, {"path": "../x"}, {"path": None}):
        assert f"$.{name}" in refused(schema.ReadFile, {name: wrong})


NULLED: list[tuple[Any, Json]] = [
    *((kind, BODY) for kind in OFFLOADS),
    (schema.Search, {"pattern": "x"}),
    (schema.Find, {"pattern": "x", "file_path": "x"}),
    (schema.ReadFile, {"absolute_path": "x"}),
    (schema.RecallSessions, {}),
]


@pytest.mark.parametrize(("kind", "body"), NULLED)
def test_null_is_as_if_it_were_left_out(kind: Any, body: Json) -> None:
    """Models give every parameter of a tool, and many clients write every member of a struct."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    nulls = dict.fromkeys([*names, *(alias for alias, name in ALIASES.items() if name in names)])
    assert taken(kind, nulls | body) == taken(kind, body)
    for name in body:
        assert "missing" in refused(kind, {**nulls, **body, name: None})


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": 5, "content": "x"}, ".role"),
        ({"content": "x"}, ""),
        ({"role": "wizard", "content": "x"}, ".role"),
        ({"role": "user", "content": 7}, ".content"),
        *(({"role": role, "content": {"text": "x"}}, ".content") for role in ("user", "assistant", "system")),
        ({"role": "tool", "content": 7}, ".content"),
        ({"role": "user", "content": ["x"]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text"),
        ({"role": "assistant", "tool_calls": "x"}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, ".tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": 3, "function": {}}]}, ".tool_calls[0]"),
        ({"role": "tool", "tool_call_id": 9, "content": "x"}, ".tool_call_id"),
        ("Go on.", ""),
        (None, ""),
        ([], ""),
    ],
)
def test_a_wrong_message_is_named(message: Any, place: str) -> None:
    body = {**BODY, "messages": [*HISTORY, message, *HISTORY]}
    assert f"$.messages[1]{place}" in refused(schema.OffloadParameters, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{",
        b"{}x",
        b'{"messages": [',
        b"\xff\xfe",
        b"\x00" * 100,
        b"messages=x&store_dir=y",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b', "store_dir": "/s"}',
        b'{"messages": [], "store_dir": "/s", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"messages": NaN, "store_dir": "/s"}',
        b'{"messages": [{"role": "user"}], "store_dir": "/s", "compact_ratio_threshold": "1e400"}',
        b'{"pattern": "x\\uZZZZ", "absolute_path": "\\uD800"}',
    ],
    ids=range(17),
)
def test_bodies_that_are_none_are_refused(body: bytes) -> None:
    for kind in (schema.OffloadParameters, schema.Search, schema.ReadFile):
        assert refused(kind, body)


def test_the_newer_name_counts_and_both_must_be_valid() -> None:
    both = {**BODY, "storage_path": "/older", "keep_recent_count": 1, "keep_recent": 100}
    given = taken(schema.OffloadParameters, both)
    assert (given.store_dir, given.keep_recent_count) == ("/s", 1)
    for wrong in ("keep_recent_count", "keep_recent"):
        assert f"$.{wrong}`" in refused(schema.OffloadParameters, {**both, wrong: {}})


# -- the description ---------------------------------------------------------------------------------------------------

SCHEMAS = json.loads(description())["components"]["schemas"]


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_older_names_have_the_schema_of_the_name(alias: str, name: str) -> None:
    [found] = [found for kind in ("Offload", "ReadFile") if name in (found := SCHEMAS[kind]["properties"])]
    assert found[alias] == found[name] | {"deprecated": True, "description": f"older name of `{name}`"}


def test_either_name_of_a_required_parameter_is_enough() -> None:
    assert SCHEMAS["Offload"]["required"] == ["messages"]
    assert SCHEMAS["Offload"]["anyOf"] == [{"required": ["store_dir"]}, {"required": ["storage_path"]}]
    assert SCHEMAS["Find"]["required"] == ["pattern", "file_path"], "a name of its own there"


def test_operations_with_a_fixed_mode_have_no_mode_parameter() -> None:
    assert not {"context_manage_mode", "working_summary_mode"} & set(SCHEMAS["Compact"]["properties"])
