"""Bad requests: the envelope names place and fault, the status is 400 or 404, and the caller loses nothing."""

from __future__ import annotations

import json
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

Json = dict[str, Any]

TEXT = page("result", 1_000)
HISTORY = [user(), *step("c", TEXT), user("And?")]


# -- what is refused returns the messages; `tests/apps/operations/test_schema.py` has the faults -----------------------


@pytest.mark.parametrize("operation", OFFLOADS)
def test_a_caller_who_is_refused_has_its_messages_back(caller: Caller, operation: str) -> None:
    given: list[tuple[Json, str]] = [
        ({"keep_recent": "5"}, "`$.keep_recent`"),
        ({"store_dir": "a/../../x"}, "`$.store_dir` is not a valid path: 'a/../../x' leads out of your files"),
        ({"messages": [*HISTORY, None]}, "`$.messages[4]`"),
        ({"messages": {"role": "user"}}, "`$.messages`"),
    ]
    for wrong, place in given:
        sent = {"messages": HISTORY, "store_dir": STORE, "model": MODEL, **wrong}
        reply = caller.post(operation, sent)
        assert (reply.status, reply.messages) == (400, sent["messages"] if isinstance(sent["messages"], list) else [])
        assert place in reply.answer


@pytest.mark.parametrize("path", ALL)
def test_a_body_that_is_none_is_answered(caller: Caller, path: str) -> None:
    for body in (b"", b"[]", b"\xff\xfe", b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"{}"):
        assert caller.post(path, body).status == 400


# -- numbers without bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**63 - 1, 2**64, 10**30])
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


# -- paths; `tests/apps/operations/test_call.py` says which are refused ------------------------


CLIMBING = ["..", "/../etc/passwd", "a/../../x", "~/../../x", "x/..\\..\\y"]
ODD = ["a\x00b", "a\nb", "\ud800", "x" * 100_000, "a/" * 5_000 + "b", "", " "]


@pytest.mark.parametrize("path", [*CLIMBING, *ODD], ids=range(12))
def test_a_path_that_climbs_or_that_no_file_system_takes(caller: Caller, path: str) -> None:
    reply = caller.compact(HISTORY, store_dir=path)
    if reply.status == 200:
        assert caller.restored(reply.messages) == HISTORY
    else:
        assert (reply.status, reply.messages) == (400, HISTORY)
        assert "store_dir" in reply.answer
    assert caller.read(path).status in (400, 404)
    assert caller.read(f"{path}/passwd").status in (400, 404)
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


@pytest.mark.parametrize("path", ALL)
def test_methods_other_than_post_are_refused(caller: Caller, path: str) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        response = caller.http.request(method, path)
        assert response.status_code in (404, 405)
        assert enveloped(response).answer


def test_a_body_above_the_limit() -> None:
    with operated(body_limit=10_000) as (proxy, _, _), Caller(proxy) as caller:
        for path in ALL:
            reply = caller.post(path, {"messages": [user("x" * 20_000)], "store_dir": STORE, "pattern": "x"})
            assert (reply.status, reply.messages) == (413, []), "it was not read"
