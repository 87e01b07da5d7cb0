"""What the operations take: how a wrong parameter is named, which of two names counts, and the
description of both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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


# -- wrong parameters: the only table of them ------------------------------------------------------

Kind = type[msgspec.Struct]
RIGHT: dict[Kind, Json] = {
    **dict.fromkeys(OFFLOADS, BODY),
    schema.Search: {"pattern": "x"},
    schema.Find: {"pattern": "x", "file_path": "x"},
    schema.ReadFile: {"absolute_path": "x"},
    schema.RecallSessions: {},
    schema.CompressMessages: {"messages": HISTORY},
}
OFFLOAD, SEARCH, FIND, READ = (
    (schema.OffloadParameters,),
    (schema.Search,),
    (schema.Find,),
    (schema.ReadFile,),
)
PATHS = (3, "", "..", "/../etc/passwd", "a/../../x", "a\x00b", "a\nb", "\ud800", "x" * 100_000)
SEARCHED = (3, "..", "a/../../x", "a\x00b", "\ud800", "x" * 100_000)


def wrong(kinds: Sequence[Kind], name: str, *values: Any) -> list[tuple[Kind, Json, str]]:
    """Rows in which this parameter has one of these values, and is named."""
    return [(kind, {name: value}, f"$.{name}") for kind in kinds for value in values]


def missing(kinds: Sequence[Kind], name: str) -> list[tuple[Kind, Json, str]]:
    """Rows in which it is left out, and named."""
    return [(kind, {name: None}, f"missing required field `{name}`") for kind in kinds]


def message(place: str, *messages: Any) -> list[tuple[Kind, Json, str]]:
    """Rows in which a history's second message is one of these, and its place is named."""
    return [
        (kind, {"messages": [*HISTORY, one, *HISTORY]}, f"$.messages[1]{place}")
        for kind in (schema.OffloadParameters, schema.CompressMessages)
        for one in messages
    ]


def unknown(kinds: Sequence[Kind], name: str, cure: str) -> list[tuple[Kind, Json, str]]:
    """Rows with a parameter that no operation has, and what was meant."""
    return [(kind, {name: 1}, cure) for kind in kinds]


WRONG: list[tuple[Kind, Json, str]] = [
    *missing(OFFLOADS, "messages"),
    *missing(OFFLOADS, "store_dir"),
    *wrong(OFFLOADS, "messages", 3, "x", {"role": "user"}, True, []),
    *wrong(OFFLOADS, "store_dir", *PATHS),
    *wrong(OFFLOADS, "storage_path", *PATHS),
    *wrong(OFFLOADS, "max_total_tokens", "many", -1, 1.5),
    *wrong(OFFLOADS, "all_token_threshold", "many", -1, 1.5),
    *wrong(OFFLOADS, "max_tool_message_tokens", [], -5),
    *wrong(OFFLOADS, "group_token_threshold", "0", -1),
    *wrong(OFFLOADS, "keep_recent_count", -1, {}),
    *wrong(OFFLOADS, "keep_recent", "5"),
    *wrong(OFFLOADS, "compact_ratio_threshold", "high", -0.1),
    *wrong(OFFLOADS, "preview_char_length", -1),
    *wrong(OFFLOADS, "compress_system_message", "yes", 1),
    *wrong(OFFLOADS, "chat_id", 7),
    *wrong(OFFLOADS, "model", ["m"], "", "m" * 1_001),
    *wrong(OFFLOAD, "context_manage_mode", "", "Auto", "off", "summarise", 3, ["auto"]),
    *wrong(OFFLOAD, "working_summary_mode", "", "Auto", 3),
    *unknown(OFFLOAD, "max_total_token", "did you mean `max_total_tokens`?"),
    *unknown(OFFLOAD, "contextmode", "did you mean `context_manage_mode`?"),
    *unknown(OFFLOADS, "keep_recents", "did you mean `keep_recent`?"),
    *unknown(OFFLOADS, "MaxToolMessageTokens", "did you mean `max_tool_message_tokens`?"),
    *message(".role", {"role": 5, "content": "x"}, {"role": "wizard", "content": "x"}),
    *message(
        ".content",
        *({"role": role, "content": {"text": "x"}} for role in ("user", "assistant", "system")),
    ),
    *message(".content", {"role": "user", "content": 7}, {"role": "tool", "content": 7}),
    *message(".content[0]", {"role": "user", "content": ["x"]}),
    *message(".content[0].text", {"role": "user", "content": [{"type": "text", "text": 1}]}),
    *message(".tool_calls", {"role": "assistant", "tool_calls": "x"}),
    *message(
        ".tool_calls[0]",
        *({"role": "assistant", "tool_calls": [one]} for one in (3, {"id": 3, "function": {}})),
    ),
    *message(".tool_call_id", {"role": "tool", "tool_call_id": 9, "content": "x"}),
    *message("", {"content": "x"}, "Go on.", None, []),
    *missing((*SEARCH, *FIND), "pattern"),
    *wrong((*SEARCH, *FIND), "pattern", 3, "", "x" * 1_001),
    *wrong(SEARCH, "path", "", *SEARCHED),
    *wrong(SEARCH, "glob", [], "", 3),
    *wrong((*SEARCH, *FIND), "limit", "5", -1, 0, 1.5, True),
    *wrong(SEARCH, "session", "*", "", "a\n", "../x"),
    *wrong(SEARCH, "archive", 1, "yes"),
    *unknown(SEARCH, "patern", "did you mean `pattern`?"),
    *unknown(SEARCH, "zzz", "expected one of archive, glob, limit, path, pattern, session"),
    *missing(FIND, "file_path"),
    *wrong(FIND, "file_path", "", *SEARCHED),
    *unknown(FIND, "regex", "expected one of file_path, limit, pattern"),
    *missing(READ, "absolute_path"),
    *wrong(READ, "absolute_path", "", *SEARCHED, {}, {"path": 3}, {"path": "../x"}, {"path": None}),
    *wrong(READ, "file_path", "", *SEARCHED, ["x"], {}, {"path": "../x"}),
    *wrong(READ, "offset", -1, "0"),
    *wrong(READ, "limit", -1, True),
    *wrong(READ, "column", -1, "0"),
    *wrong(READ, "characters", 1, 1 << 25, "9"),
    *unknown(READ, "absolutepath", "did you mean `absolute_path`?"),
    *unknown(READ, "ofset", "did you mean `offset`?"),
    *unknown(
        READ,
        "\ud800" * 3,
        "expected one of absolute_path, characters, column, file_path, limit, offset",
    ),
    *unknown(READ, "limit" * 1_000_000, "is not a parameter"),
    *wrong((schema.RecallSessions,), "limit", 0, 201, "5"),
    *wrong((schema.RecallSessions,), "session", "*", "F", 3),
    *missing((schema.CompressMessages,), "messages"),
    *wrong((schema.CompressMessages,), "messages", "x", []),
    *wrong((schema.CompressMessages,), "model", 3, "m" * 1_001),
]
"""What is sent in place of what is right, and what the answer names."""


@pytest.mark.parametrize(("kind", "given", "named"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_parameter_is_named(kind: Kind, given: Json, named: str) -> None:
    said = refused(kind, {**RIGHT[kind], **given})
    assert named in said
    assert len(said) < 400


HUGE: list[tuple[Kind, str]] = [
    *[
        (kind, name)
        for kind in OFFLOADS
        for name in ("max_total_tokens", "keep_recent_count", "preview_char_length")
    ],
    *[
        (schema.OffloadParameters, name)
        for name in ("max_tool_message_tokens", "group_token_threshold")
    ],
    *[(kind, "limit") for kind in (schema.Search, schema.Find, schema.ReadFile)],
    *[(schema.ReadFile, name) for name in ("offset", "column")],
]


@pytest.mark.parametrize(("kind", "name"), HUGE)
def test_a_number_may_be_huge(kind: Kind, name: str) -> None:
    for number in (2**63 - 1, 2**64, 10**30):
        assert getattr(taken(kind, {**RIGHT[kind], name: number}), name) == number


def test_a_parameter_of_another_operation_is_ignored() -> None:
    """Callers pass one set of parameters to several operations."""
    everything = dict.fromkeys(schema.PARAMETERS, 0)
    more = {"archive": True, "session": None}
    assert (
        taken(
            schema.Search,
            {**everything, "pattern": "x", "path": None, "glob": None, "limit": 1, **more},
        ).limit
        == 1
    )


def test_gateways_may_send_anything_beside_the_messages() -> None:
    assert (
        taken(
            schema.CompressMessages, {"messages": HISTORY, "model": "m", "config": {"x": 1}}
        ).model
        == "m"
    )


@pytest.mark.parametrize("content", [{}, {"status": "ok", "pages": [1, {"\ud800": None}]}])
@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_tools_result_may_be_an_object(role: str, content: Json) -> None:
    assert taken(
        schema.OffloadParameters, {**BODY, "messages": [{"role": role, "content": content}]}
    )


@pytest.mark.parametrize("name", ["absolute_path", "file_path"])
def test_a_file_can_be_named_by_a_match_in_it(name: str) -> None:
    match = {"path": "/s/a.txt", "line": 3, "column": 0, "text": "x"}
    assert taken(schema.ReadFile, {name: match}).file == "/s/a.txt"


@pytest.mark.parametrize(("kind", "body"), RIGHT.items())
def test_null_is_as_if_it_were_left_out(kind: Any, body: Json) -> None:
    """Models give every parameter of a tool, and many clients write every member of a struct."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    nulls = dict.fromkeys([*names, *(alias for alias, name in ALIASES.items() if name in names)])
    assert taken(kind, nulls | body) == taken(kind, body)
    for name in body:
        assert "missing" in refused(kind, {**nulls, **body, name: None})


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
        b'{"messages": [], "store_dir": "/s", "x": '
        + b'{"a":' * 100_000
        + b"1"
        + b"}" * 100_000
        + b"}",
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


# -- the description -------------------------------------------------------------------------------

SCHEMAS = json.loads(description())["components"]["schemas"]


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_older_names_have_the_schema_of_the_name(alias: str, name: str) -> None:
    [found] = [
        found for kind in ("Offload", "ReadFile") if name in (found := SCHEMAS[kind]["properties"])
    ]
    assert found[alias] == found[name] | {
        "deprecated": True,
        "description": f"older name of `{name}`",
    }


def test_either_name_of_a_required_parameter_is_enough() -> None:
    assert SCHEMAS["Offload"]["required"] == ["messages"]
    assert SCHEMAS["Offload"]["anyOf"] == [
        {"required": ["store_dir"]},
        {"required": ["storage_path"]},
    ]
    assert SCHEMAS["Find"]["required"] == ["pattern", "file_path"], "a name of its own there"


def texts(found: Any) -> Iterator[Json]:
    """Yield the schemas of texts in this one, without those that it refers to."""
    if isinstance(found, list):
        for one in found:
            yield from texts(one)
    elif isinstance(found, dict):
        if found.get("type") == "string":
            yield found
        for one in found.values():
            yield from texts(one)


@pytest.mark.parametrize("kind", [*RIGHT, schema.Match])
def test_every_text_beside_the_messages_is_bounded(kind: Kind) -> None:
    """The model's name is looked at for each text that is counted."""
    properties = SCHEMAS[kind.__name__.removesuffix("Parameters")]["properties"]
    bounded = {
        name: [one.keys() & {"maxLength", "pattern"} for one in texts(found)]
        for name, found in properties.items()
    }
    assert all(map(all, bounded.values())), bounded


def test_operations_with_a_fixed_mode_have_no_mode_parameter() -> None:
    assert not {"context_manage_mode", "working_summary_mode"} & set(
        SCHEMAS["Compact"]["properties"]
    )
