"""The HTTP operations as their documents show them: offload, adopt, go on, find, read, page,
reload."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import pytest

from tests import transcripts
from tests.apps.operations.served import (
    MODEL,
    STORE,
    WRITTEN,
    Caller,
    assistant,
    page,
    research,
    step,
    system,
    tokens,
    user,
)
from tests.sampling import sample
from tests.strict import check
from tests.transcripts import Run

Json = dict[str, Any]


def without_systems(messages: list[Json]) -> list[Json]:
    return [message for message in messages if message["role"] != "system"]


def size(messages: list[Json]) -> int:
    return sum(map(tokens, messages))


# -- offload 95,000 tokens in auto mode, adopt the messages, go on ---------------------------------


def test_a_conversation_continues_with_adopted_messages(caller: Caller) -> None:
    """Sixty more searches, after each tenth the offload: the context stays small and nothing is
    ever lost."""
    whole = adopted = research(30_000)
    chat = uuid.uuid4().hex
    for turn in range(6):
        for number in range(10):
            more = step(f"call_{turn}_{number}", page(f"turn {turn}, result {number}", 3_000))
            whole, adopted = [*whole, *more], [*adopted, *more]
        adopted = caller.offload(
            adopted, context_manage_mode="auto", model=MODEL, chat_id=chat
        ).messages
        assert size(adopted) < 20_000
        check({"model": MODEL, "messages": adopted})
    assert size(whole) > 200_000
    assert without_systems(caller.restored(adopted)) == without_systems(whole)


@transcripts.needed
@pytest.mark.parametrize("name", sample(transcripts.names(90_000), 3))
def test_a_recorded_run_in_auto_mode(caller: Caller, name: str) -> None:
    run: Run = transcripts.one(name)
    history = [*run.messages, user("Go on.")]  # so that the last result is not recent
    reply = caller.offload(history, model=MODEL)
    assert reply.metadata["tokens_after"] <= reply.metadata["tokens_before"] * 0.75
    assert without_systems(caller.restored(reply.messages)) == without_systems(history)
    again = caller.offload([*reply.messages, assistant("Yes."), user("And?")], model=MODEL)
    assert without_systems(caller.restored(again.messages)) == without_systems(
        [*history, assistant("Yes."), user("And?")]
    )


# -- reload a session by its chat_id ---------------------------------------------------------------


def test_reload_a_session_by_its_chat_id(caller: Caller) -> None:
    chat = "research_session_001"
    whole = adopted = [system(), user()]
    for turn in range(3):
        more = [
            user(f"Question {turn}. " + page("q", 300)),
            assistant(f"Answer {turn}. " + page("a", 300)),
        ]
        whole, adopted = [*whole, *more], [*adopted, *more]
        adopted = caller.compress(adopted, chat_id=chat, keep_recent_count=0).messages
    caller.compress(
        [user("Somebody else's. " * 50), assistant()], chat_id="another", keep_recent_count=0
    )
    found = caller.grep(".", path=STORE, glob=f"compressed_group_{chat}_*.json")
    names = sorted(set(re.findall(r"^File: (.*)$", found.answer, re.MULTILINE)))
    assert len(names) == 3
    groups = [json.loads(caller.text(f"{STORE}/{name}")) for name in names]
    assert [message for group in groups for message in group] == without_systems(whole)


def test_a_chat_id_is_made_where_there_is_none(caller: Caller) -> None:
    reply = caller.compress([system(), user(page("q", 300)), assistant(), user(), assistant()])
    made = uuid.UUID(reply.metadata["chat_id"])
    assert str(made).replace("-", "_") in reply.groups[0]
    assert (
        caller.compact([user()]).metadata["chat_id"] != caller.compact([user()]).metadata["chat_id"]
    )


# -- re-feed the result ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["compact", "compress", "auto"])
def test_feeding_the_result_back_ten_times_changes_nothing(caller: Caller, mode: str) -> None:
    history = [
        *research(12_000, 2_500),
        user(page("question", 500)),
        assistant("Let me see."),
        user("Go on."),
    ]
    messages = history
    given = {
        "context_manage_mode": mode,
        "max_total_tokens": 3_000,
        "model": MODEL,
        "chat_id": "one",
    }
    for _ in range(10):
        messages = caller.offload(messages, **given).messages
        assert without_systems(caller.restored(messages)) == without_systems(history)
    assert messages == caller.offload(messages, **given).messages, "it comes to rest"


# -- the older names -------------------------------------------------------------------------------


def test_context_compact_is_simple_truncation(caller: Caller) -> None:
    result = page("result", 3_000)
    history = [user(), *step("c1", result), assistant()]
    reply = caller.post(
        "/context_compact",
        {
            "messages": history,
            "all_token_threshold": 1_000,
            "max_tool_message_tokens": 500,
            "storage_path": "old/x",
        },
    )
    [(path, content)] = reply.files.items()
    assert path.startswith("old/x/c1.") and content == result
    assert reply.answer == WRITTEN + path
    assert reply.messages[2]["content"].startswith(
        f"{result[:100]}... (detailed result is stored in {path}"
    )


def test_context_compress_keeps_its_originals_traceable(caller: Caller) -> None:
    talk = [
        message
        for n in range(5)
        for message in (user(page(f"q{n}", 300)), assistant(page(f"a{n}", 300)))
    ]
    history = [system(), user("First."), *talk]
    reply = caller.post(
        "/context_compress",
        {"messages": history, "all_token_threshold": 1_000, "storage_path": STORE, "model": MODEL},
    )
    assert reply.messages[1:] == history[-5:], "keep_recent is 5"
    path = reply.metadata["original_messages_path"]
    assert f"(Original 6 messages are stored in: {path})" in reply.messages[0]["content"]
    assert reply.metadata["compressed_message_count"] == 6
    assert json.loads(caller.text(path)) == history[1:-5]


@pytest.mark.parametrize("name", ["/context_compact", "/context_compress"])
def test_operations_under_older_names_do_nothing_below_the_threshold(
    caller: Caller, name: str
) -> None:
    history = [user(page("short", 100)), assistant(), *[user()] * 6]
    reply = caller.post(name, {"messages": history, "storage_path": STORE, "model": MODEL})
    assert (reply.messages, reply.files) == (history, {})
    assert reply.answer and WRITTEN not in reply.answer
