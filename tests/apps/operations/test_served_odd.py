"""Requests that are odd but not wrong, of another method, or too large.
`tests/apps/operations/test_schema.py` has the table of wrong parameters, and
`test_operations_fuzz.py` sends them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.apps.operations.served import (
    ALL,
    MODEL,
    STORE,
    Caller,
    enveloped,
    operated,
    page,
    step,
    user,
)

Json = dict[str, Any]

TEXT = page("result", 1_000)
HISTORY = [user(), *step("c", TEXT), user("And?")]


# -- numbers without bounds ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**63 - 1, 2**64, 10**30])
def test_a_huge_number_means_all_there_is(caller: Caller, number: int) -> None:
    [path] = caller.compact(HISTORY).files
    replies = [
        caller.read(path, offset=number),
        caller.read(path, limit=number),
        caller.read(path, column=number),
        caller.grep("result", limit=number),
        caller.grep("result", limit=number, archive=True),
        caller.post("/grep", {"pattern": "result", "file_path": path, "limit": number}),
    ]
    assert [reply.status for reply in replies] == [200] * len(replies)
    assert [reply.answer for reply in replies[:3]] == ["", TEXT, ""]


# -- messages that are odd -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "nobody", "content": TEXT}],
        [*step("c", TEXT)[:1], user("never answered")],
        [*step("same", TEXT), *step("same", TEXT), *step("same", TEXT + "!")],
        [{"role": "tool", "content": TEXT}, user()],
        [
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}"},
            },
            user(),
        ],
        [{"role": "user", "content": []}, {"role": "tool", "tool_call_id": "x", "content": []}],
        [{"role": "system", "content": TEXT}] * 3,
        [
            user("\ud800"),
            *step("c", "\ud83d half an emoji, \udc00 and the other half\n" * 100),
            user(),
        ],
    ],
    ids=[
        "orphan",
        "unanswered",
        "same id",
        "no id",
        "function_call",
        "empty parts",
        "systems only",
        "half characters",
    ],
)
@pytest.mark.parametrize("mode", ["compact", "compress", "auto"])
def test_odd_histories_come_back_whole(caller: Caller, messages: list[Json], mode: str) -> None:
    tight = {
        "max_total_tokens": 0,
        "max_tool_message_tokens": 0,
        "keep_recent_count": 0,
        "model": MODEL,
    }
    reply = caller.offload(messages, context_manage_mode=mode, **tight)
    assert reply.status in (200, 400)
    if reply.status != 200:
        assert reply.messages == messages
    else:
        whole = [
            message for message in caller.restored(reply.messages) if message["role"] != "system"
        ]
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
            reply = caller.post(
                path, {"messages": [user("x" * 20_000)], "store_dir": STORE, "pattern": "x"}
            )
            assert (reply.status, reply.messages) == (413, []), "it was not read"
