"""Bad requests: the envelope names place and fault, the status is 400 or 404, and the caller loses nothing."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.acceptance.operations import (
    ALL,
    MODEL,
    OFFLOADS,
    STORE,
    Caller,
    enveloped,
    operated,
    page,
    step,
    strays,
    user,
)
from tests.clock import wait_until
from tests.fake_upstream import hang

Json = dict[str, Any]

TEXT = page("result", 1_000)
HISTORY = [user(), *step("c", TEXT), user("And?")]


# -- wrong types, each named with its place ----------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OFFLOADS)
@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"max_total_tokens": "many"}, "$.max_total_tokens"),
        ({"max_total_tokens": -1}, "$.max_total_tokens"),
        ({"max_total_tokens": 1.5}, "$.max_total_tokens"),
        ({"max_tool_message_tokens": []}, "$.max_tool_message_tokens"),
        ({"max_tool_message_tokens": -5}, "$.max_tool_message_tokens"),
        ({"group_token_threshold": "0"}, "$.group_token_threshold"),
        ({"group_token_threshold": -1}, "$.group_token_threshold"),
        ({"keep_recent_count": -1}, "$.keep_recent_count"),
        ({"keep_recent_count": {}}, "$.keep_recent_count"),
        ({"keep_recent": "5"}, "$.keep_recent"),
        ({"compact_ratio_threshold": "high"}, "$.compact_ratio_threshold"),
        ({"compact_ratio_threshold": -0.1}, "$.compact_ratio_threshold"),
        ({"preview_char_length": -1}, "$.preview_char_length"),
        ({"preview_char_length": None}, "$.preview_char_length"),
        ({"compress_system_message": "yes"}, "$.compress_system_message"),
        ({"compress_system_message": 1}, "$.compress_system_message"),
        ({"chat_id": 7}, "$.chat_id"),
        ({"model": ["m"]}, "$.model"),
        ({"store_dir": 3}, "$.store_dir"),
        ({"store_dir": None}, "$.store_dir"),
        *[({"messages": messages}, "$.messages") for messages in (None, 3, "x", {"role": "user"}, True, [])],
    ],
)
def test_a_wrong_parameter_is_named(caller: Caller, operation: str, given: Json, place: str) -> None:
    reply = caller.post(operation, {"messages": HISTORY, "store_dir": STORE, "model": MODEL, **given})
    assert (reply.status, reply.messages) == (400, HISTORY if "messages" not in given else [])
    assert place in reply.answer


@pytest.mark.parametrize("mode", ["", "Auto", "off", "summarise", 3, None, ["auto"]])
@pytest.mark.parametrize("name", ["context_manage_mode", "working_summary_mode"])
def test_an_unknown_mode(caller: Caller, name: str, mode: Any) -> None:
    reply = caller.offload(HISTORY, **{name: mode})
    assert (reply.status, reply.messages) == (400, HISTORY)
    assert f"$.{name}" in reply.answer


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        *[(path, {"store_dir": STORE}, "messages") for path in OFFLOADS],
        *[(path, {"messages": HISTORY}, "store_dir") for path in OFFLOADS],
        ("/grep", {}, "pattern"),
        ("/grep", {"pattern": 3}, "$.pattern"),
        ("/grep", {"pattern": None}, "$.pattern"),
        ("/grep", {"pattern": "x", "path": 3}, "$.path"),
        ("/grep", {"pattern": "x", "glob": []}, "$.glob"),
        ("/grep", {"pattern": "x", "limit": "5"}, "$.limit"),
        ("/grep", {"pattern": "x", "limit": -1}, "$.limit"),
        ("/grep", {"pattern": "x", "limit": 1.5}, "$.limit"),
        ("/grep", {"pattern": "x", "file_path": 3}, "$.file_path"),
        ("/grep", {"pattern": "x", "file_path": "x", "limit": -1}, "$.limit"),
        ("/read_file", {}, "absolute_path"),
        ("/read_file", {"absolute_path": 3}, "$.absolute_path"),
        ("/read_file", {"file_path": ["x"]}, "$.file_path"),
        ("/read_file", {"absolute_path": "x", "offset": -1}, "$.offset"),
        ("/read_file", {"absolute_path": "x", "offset": "0"}, "$.offset"),
        ("/read_file", {"absolute_path": "x", "limit": -1}, "$.limit"),
        ("/read_file", {"absolute_path": "x", "limit": True}, "$.limit"),
    ],
)
def test_a_missing_or_wrong_parameter_is_named(caller: Caller, path: str, body: Json, place: str) -> None:
    reply = caller.post(path, body)
    assert (reply.status, reply.messages) == (400, body.get("messages", []))
    assert place in reply.answer


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": 5, "content": "x"}, "$.messages[3].role"),
        ({"content": "x"}, "$.messages[3]"),
        ({"role": "wizard", "content": "x"}, "$.messages[3].role"),
        ({"role": "user", "content": 7}, "$.messages[3].content"),
        ({"role": "user", "content": {"text": "x"}}, "$.messages[3].content"),
        ({"role": "user", "content": ["x"]}, "$.messages[3].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "$.messages[3].content[0].text"),
        ({"role": "assistant", "tool_calls": "x"}, "$.messages[3].tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "$.messages[3].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": 3, "function": {}}]}, "$.messages[3].tool_calls[0]"),
        ({"role": "tool", "tool_call_id": 9, "content": "x"}, "$.messages[3].tool_call_id"),
        ("Go on.", "$.messages[3]"),
        (None, "$.messages[3]"),
        ([], "$.messages[3]"),
    ],
)
def test_a_wrong_message_is_named(caller: Caller, message: Any, place: str) -> None:
    history = [*HISTORY[:3], message, user()]
    reply = caller.compact(history)
    assert (reply.status, reply.messages) == (400, history)
    assert place in reply.answer


def test_the_newer_name_counts(caller: Caller) -> None:
    older = {"storage_path": "/other", "all_token_threshold": 1 << 40, "keep_recent": 100}
    reply = caller.compact(HISTORY, keep_recent_count=1, **older, working_summary_mode="compress")
    assert all(path.startswith(f"{STORE}/") for path in reply.files)
    assert len(reply.references) == 1
    [path] = reply.files
    assert caller.post("/read_file", {"absolute_path": path, "file_path": "/x"}).answer == TEXT
    for wrong in ("keep_recent_count", "keep_recent"):
        refused = caller.compact(HISTORY, **{"keep_recent_count": 1, "keep_recent": 1, wrong: {}})
        assert (refused.status, refused.messages) == (400, HISTORY)
        assert f"$.{wrong}`" in refused.answer


# -- numbers without bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**63, 2**64, 10**30])
def test_huge_numbers_are_accepted_or_named(caller: Caller, number: int) -> None:
    [path] = caller.compact(HISTORY).files
    replies = [
        caller.read(path, offset=number),
        caller.read(path, limit=number),
        caller.grep("result", limit=number),
        caller.post("/grep", {"pattern": "result", "file_path": path, "limit": number}),
        caller.compact(HISTORY, keep_recent_count=number),
        caller.compact(HISTORY, max_total_tokens=number),
        caller.compact(HISTORY, preview_char_length=number),
    ]
    assert [reply.status for reply in replies] == [200] * len(replies)
    assert all(reply.messages == HISTORY for reply in replies[4:])


# -- patterns ----------------------------------------------------------------------------------------------------------


INVALID = ["(", "[a", "a{2,1}", "*", r"\1", "(?=x)", "(?<=x)y", "\\", "x{1001}", "(?P<n", "\ud800"]


@pytest.mark.parametrize("pattern", INVALID)
def test_an_invalid_pattern_is_named(caller: Caller, pattern: str) -> None:
    caller.compact(HISTORY)
    reply = caller.grep(pattern)
    assert reply.status == 400
    assert "pattern" in reply.answer


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(.*)*x",
        "(?:(?:(?:a{1,100}){1,100}){1,100})",
        "((a{0,100}){0,100})b",
        "(x+x+)+y",
        "." * 900 + "$",
        "(?s).*" * 100,
        "a" * 1_000_000,
        "(" * 500 + ")" * 500,
    ],
    ids=range(10),
)
def test_a_catastrophic_pattern_is_answered_in_time(caller: Caller, pattern: str) -> None:
    [path] = caller.compact([user(), *step("c", "a" * 200_000 + "\n" + "x" * 50_000 + "!"), user()]).files
    replies = [caller.grep(pattern), caller.post("/grep", {"pattern": pattern, "file_path": path})]
    assert all(reply.status in (200, 400) for reply in replies)


# -- paths -------------------------------------------------------------------------------------------------------------


CLIMBING = ["..", "../x", "a/../../x", "/..", "/../etc/passwd", "./../x", "~/../../x", "a/b/../../../x", "x/..\\..\\y"]


@pytest.mark.parametrize("path", CLIMBING)
def test_a_path_that_leaves_the_files_is_refused(caller: Caller, path: str) -> None:
    reply = caller.compact(HISTORY, store_dir=path)
    assert (reply.status, reply.messages) == (400, HISTORY) or "\\" in path
    assert caller.read(path).status in (400, 404)
    assert caller.read(f"{path}/passwd").status in (400, 404)
    assert caller.post("/grep", {"pattern": "x", "file_path": path}).status in (400, 404)
    assert not caller.grep("root", path=path).metadata.get("matches")
    assert strays(caller.proxy) == []


@pytest.mark.parametrize("path", ["a\x00b", "\x00", "a\nb", "\ud800", "x" * 100_000, "a/" * 5_000 + "b", "", " "])
def test_a_path_that_no_file_system_takes(caller: Caller, path: str) -> None:
    reply = caller.compact(HISTORY, store_dir=path)
    if reply.status == 200:
        assert caller.restored(reply.messages) == HISTORY
    else:
        assert (reply.status, reply.messages) == (400, HISTORY)
        assert "store_dir" in reply.answer
    assert caller.read(path).status in (400, 404)
    assert caller.post("/grep", {"pattern": "x", "file_path": path}).status in (400, 404)
    assert caller.grep("never there", path=path).status in (200, 400, 404)
    assert strays(caller.proxy) == []


# -- messages that are odd ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "nobody", "content": TEXT}],
        [*step("c", TEXT)[:1], user("never answered")],
        [*step("same", TEXT), *step("same", TEXT), *step("same", TEXT + "!")],
        [{"role": "tool", "content": TEXT}, user()],
        [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, user()],
        [{"role": "user", "content": []}, {"role": "tool", "tool_call_id": "x", "content": []}],
        [{"role": "system", "content": TEXT}] * 3,
        [user("\ud800"), *step("c", "\ud83d half an emoji, \udc00 and the other half\n" * 100), user()],
    ],
    ids=["orphan", "unanswered", "same id", "no id", "function_call", "empty parts", "systems only", "half characters"],
)
@pytest.mark.parametrize("mode", ["compact", "compress", "auto"])
def test_odd_histories_come_back_whole(caller: Caller, messages: list[Json], mode: str) -> None:
    tight = {"max_total_tokens": 0, "max_tool_message_tokens": 0, "keep_recent_count": 0, "model": MODEL}
    reply = caller.offload(messages, context_manage_mode=mode, **tight)
    assert reply.status in (200, 400)
    if reply.status != 200:
        assert reply.messages == messages
    else:
        whole = [message for message in caller.restored(reply.messages) if message["role"] != "system"]
        assert whole == [message for message in messages if message["role"] != "system"]


def test_duplicate_keys_lose_nothing(caller: Caller) -> None:
    one, two = json.dumps(HISTORY), json.dumps([user("other")])
    body = f'{{"messages": {one}, "messages": {two}, "store_dir": "/a", "store_dir": "/b"}}'
    reply = caller.post("/context_offload", body.encode())
    assert reply.status in (200, 400)
    assert reply.messages in (HISTORY, [user("other")])
    twice = b'{"store_dir": "/a", "messages": [{"role": "user", "content": "a", "content": "b", "role": "user"}]}'
    assert caller.post("/context_offload", twice).messages in ([user("a")], [user("b")])


# -- bodies that are none ----------------------------------------------------------------------------------------------


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
        b'{"messages": [], "store_dir": "/s", "max_total_tokens": 1e400}',
        b'{"pattern": "x\\uZZZZ", "absolute_path": "\\uD800"}',
    ],
    ids=range(17),
)
@pytest.mark.parametrize("path", ALL)
def test_invalid_bodies_are_named(caller: Caller, path: str, body: bytes) -> None:
    reply = caller.post(path, body)
    assert reply.status in (400, 404) or (reply.status == 200 and body.startswith(b'{"messages": [], '))


def test_deep_json_in_an_unknown_field_is_harmless(caller: Caller) -> None:
    deep = "[" * 50_000 + "]" * 50_000
    body = f'{{"store_dir": "/s", "messages": [{{"role": "user", "content": "x", "deep": {deep}}}]}}'
    response = caller.http.post("/context_offload", content=body.encode())
    assert response.status_code in (200, 400)
    assert response.status_code == 400 or deep.encode() in response.content


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_methods_other_than_post_are_refused(caller: Caller, path: str, method: str) -> None:
    response = caller.http.request(method, path)
    assert response.status_code in (404, 405)
    assert enveloped(response).answer


def test_a_body_above_the_limit() -> None:
    with operated(body_limit=10_000) as (proxy, _, _), Caller(proxy) as caller:
        for path in ALL:
            reply = caller.post(path, {"messages": [user("x" * 20_000)], "store_dir": STORE, "pattern": "x"})
            assert (reply.status, reply.messages) == (413, []), "it was not read"


def test_too_many_requests_at_once() -> None:
    """A request that upstream does not answer takes the only place. An unfinished request takes none."""
    head = b"POST /%b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\ncontent-length: %d\r\n\r\n{"
    with (
        operated({"limits": {"concurrent_requests": 1}}) as (proxy, _, up),
        Caller(proxy) as caller,
        socket.create_connection(("127.0.0.1", proxy.port)) as unfinished,
        socket.create_connection(("127.0.0.1", proxy.port)) as slow,
    ):
        unfinished.sendall(head % (b"grep", 100))
        assert caller.compact(HISTORY).status == 200
        up.script(hang())
        message = b'"model": "m", "messages": [{"role": "user", "content": "Hi."}]}'
        slow.sendall(head % (b"v1/chat/completions", len(message) + 1) + message)
        wait_until(lambda: caller.compact(HISTORY).status == 503)
        reply = caller.compact(HISTORY)
        assert (reply.status, reply.messages) == (503, []), "it was not looked into"
        assert caller.grep("x").status == caller.read("x").status == 503
        slow.close()
        wait_until(lambda: caller.compact(HISTORY).status == 200)
