"""What the operations take: either name of a parameter, and errors that name the place as the caller spelled it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import asdict

from proxy.errors import ClientFault
from proxy.operations import schema
from proxy.operations.names import KEY_BYTES
from proxy.operations.schema import Find, OffloadParameters, ReadFile, Search

MESSAGES = [{"role": "user", "content": "x"}]


def taken(kind: Any, given: dict[str, Any]) -> Any:
    return schema.taken(schema.body(json.dumps(given).encode()), kind)


def refused(kind: Any, given: dict[str, Any]) -> str:
    with pytest.raises(ClientFault) as fault:
        taken(kind, given)
    return fault.value.message


@pytest.mark.parametrize(
    ("kind", "given", "field", "value"),
    [
        (OffloadParameters, {"working_summary_mode": "compact"}, "context_manage_mode", "compact"),
        (OffloadParameters, {"all_token_threshold": 7}, "max_total_tokens", 7),
        (OffloadParameters, {"keep_recent": 3}, "keep_recent_count", 3),
        (OffloadParameters, {"storage_path": "./old"}, "store_dir", "./dir"),
        (OffloadParameters, {"file_path": 7, "unknown": {}}, "store_dir", "./dir"),
        (OffloadParameters, {"keep_recent": 3, "keep_recent_count": 4}, "keep_recent_count", 4),
        (ReadFile, {"file_path": "f"}, "absolute_path", "f"),
        (Find, {"file_path": "f", "pattern": "x"}, "file_path", "f"),
    ],
)
def test_older_parameter_names_are_accepted(kind: Any, given: dict[str, Any], field: str, value: Any) -> None:
    needed = {"messages": MESSAGES, "store_dir": "./dir"} if kind is OffloadParameters else {}
    assert asdict(taken(kind, {**needed, **given}))[field] == value


def test_an_older_name_satisfies_a_required_parameter() -> None:
    assert taken(OffloadParameters, {"messages": MESSAGES, "storage_path": "~/x"}).store_dir == "~/x"


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (OffloadParameters, {"keep_recent": "3"}, "Expected `int | null`, got `str` - at `$.keep_recent`"),
        (
            OffloadParameters,
            {"max_total_tokens": -1, "all_token_threshold": 1},
            "Expected `int` >= 0 - at `$.max_total_tokens",
        ),
        (OffloadParameters, {"storage_path": 7}, "Expected `str`, got `int` - at `$.storage_path`"),
        (
            OffloadParameters,
            {"storage_path": ".."},
            "`$.storage_path` is not a valid path: '..' leads out of your files",
        ),
        (
            OffloadParameters,
            {"store_dir": "a\0b"},
            "`$.store_dir` is not a valid path: 'a\\x00b' has a control character in it",
        ),
        (OffloadParameters, {"store_dir": "x" * 140}, f"bytes when stored, of {KEY_BYTES}"),
        (Search, {"path": "x" * 251}, "`$.path` is not a valid path"),
        (Find, {"file_path": "x" * 255}, "`$.file_path` is not a valid path"),
        (ReadFile, {"file_path": "x" * 255}, "`$.file_path` is not a valid path"),
        (ReadFile, {"absolute_path": ""}, "at `$.absolute_path`"),
        (Search, {"pattern": "\ud800" * 1_001}, "at `$.pattern`"),
    ],
)
def test_an_error_names_the_place_by_the_callers_word(kind: Any, given: dict[str, Any], said: str) -> None:
    offload = {"messages": MESSAGES} | ({} if "storage_path" in given else {"store_dir": "./dir"})
    needed = offload if kind is OffloadParameters else {"pattern": "x"}
    assert said in refused(kind, {**needed, **given})


def test_the_longest_accepted_paths() -> None:
    assert taken(Search, {"pattern": "x", "path": "x" * 250})
    assert taken(ReadFile, {"absolute_path": "x" * 254})


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"content": [{"text": 1}]}, "$.messages[0].content[0].text"),
        ({"tool_calls": [{"id": 1}]}, "$.messages[0].tool_calls[0].id"),
        ({"tool_calls": [{"function": {"name": 1}}]}, "$.messages[0].tool_calls[0].function.name"),
    ],
)
def test_invalid_members_of_a_message_are_named(message: dict[str, Any], place: str) -> None:
    assert place in refused(OffloadParameters, {"messages": [{"role": "user", **message}], "store_dir": "x"})


def test_half_a_surrogate_pair_is_accepted_in_texts() -> None:
    assert taken(Find, {"pattern": "\ud83d", "file_path": "f"}).pattern == "\ud83d"


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (b"{}", []),
        (b'{"messages": 3}', []),
        (b'{"messages": [ 1.0, {"a":1} ], "x": 1e400}', [b"1.0", b'{"a":1}']),
    ],
)
def test_messages_are_read_with_their_bytes(raw: bytes, messages: list[bytes]) -> None:
    assert [bytes(each) for each in schema.body(raw).messages] == messages


@pytest.mark.parametrize(
    ("raw", "said"), [(b"\xff{}", "can't decode byte 0xff in position 0"), (b"[]", "not a JSON object")]
)
def test_invalid_bodies_are_refused(raw: bytes, said: str) -> None:
    with pytest.raises(ClientFault, match=said):
        schema.body(raw)
