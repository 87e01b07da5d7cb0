"""/context_offload in compress and auto mode: parameters, aliases, defaults, borders, and the
formats to the letter."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from tests.apps.operations.served import (
    MODEL,
    ORIGINALS,
    STORE,
    SUMMARY,
    WRITTEN,
    Caller,
    Summaries,
    World,
    assistant,
    operated,
    page,
    step,
    system,
    user,
    words,
)
from tests.fake_upstream import error, text

Json = dict[str, Any]

TEXT = page("result", 3_000)
PART = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}


@pytest.fixture
def model(world: World) -> Summaries:
    world.model.asked.clear()
    return world.model


def dialogue(turns: int, size: int) -> list[Json]:
    """Return `turns` messages of exactly `size` tokens each, beginning with the user's."""
    roles = (user, assistant)
    return [roles[turn % 2](words(size - 4)) for turn in range(turns)]


# -- formats ---------------------------------------------------------------------------------------


def test_old_history_becomes_a_snapshot_in_the_system_message(
    caller: Caller, model: Summaries
) -> None:
    history = [
        system("You are brief."),
        user(),
        *step("c", TEXT),
        assistant("So be it."),
        user("Next?"),
        assistant(),
    ]
    reply = caller.compress(history, chat_id="session_1")
    assert reply.messages[1:] == history[-2:]
    content = reply.messages[0]["content"]
    [path] = reply.files
    assert re.fullmatch(rf"{STORE}/compressed_group_session_1_\d+\.json", path)
    assert content.startswith("You are brief.\n\n")
    block = f"<state_snapshot>\n{SUMMARY}<progress>number 1</progress>\n</state_snapshot>\n"
    assert content.endswith(f"\n{block}(Original 4 messages are stored in: {path})")
    assert reply.answer == WRITTEN + path
    assert reply.metadata["original_messages_path"] == path
    assert reply.metadata["compressed_message_count"] == 4
    assert json.loads(reply.files[path]) == json.loads(caller.text(path)) == history[1:5]
    assert len(model.asked) == 1
    assert model.asked[0].header("authorization") == f"Bearer {caller.key}"
    assert model.asked[0].json["model"] == MODEL


@pytest.mark.parametrize(
    ("leading", "role"),
    [
        ([], "system"),
        ([{"role": "developer", "content": "Be brief."}], "developer"),
        ([{"role": "system", "content": [PART]}], "system"),
    ],
    ids=["nothing", "developer", "parts"],
)
def test_the_snapshot_joins_whatever_leads(
    caller: Caller, model: Summaries, leading: list[Json], role: str
) -> None:
    """A developer message keeps its role, parts stay parts, and a system message is made where
    there is none."""
    reply = caller.compress([*leading, *dialogue(6, 100)])
    assert [message["role"] for message in reply.messages] == [role, "user", "assistant"]
    content = reply.messages[0]["content"]
    for message in leading:
        before = message["content"]
        assert content[: len(before)] == before
    assert ORIGINALS.findall(str(content)) == [("4", reply.groups[0])]


def test_later_system_messages_keep_their_place(caller: Caller, model: Summaries) -> None:
    old = dialogue(4, 100)
    reply = caller.compress(
        [system("One."), *old[:2], system("Two."), *old[2:], user("x"), assistant("y")]
    )
    assert [message["content"] for message in reply.messages[1:]] == ["Two.", "x", "y"]
    assert json.loads(caller.text(reply.groups[0])) == old


def test_compress_system_message_summarises_system_messages_too(
    caller: Caller, model: Summaries
) -> None:
    history = [system(words(300)), *dialogue(6, 100)]
    kept, taken = caller.compress(history), caller.compress(history, compress_system_message=True)
    assert history[0] not in json.loads(caller.text(kept.groups[0]))
    assert history[0] in json.loads(caller.text(taken.groups[0]))
    assert kept.messages[0]["content"].startswith(words(300))
    assert words(300) not in str(taken.messages)
    same = caller.compress(
        history, compress_system_message=False, chat_id=kept.metadata["chat_id"] + "b"
    )
    assert [message["role"] for message in same.messages] == [
        message["role"] for message in kept.messages
    ]


# -- borders ---------------------------------------------------------------------------------------


def test_compress_counts_what_it_would_compress(caller: Caller, model: Summaries) -> None:
    history = [system(words(1_000)), *dialogue(4, 100), user(words(900)), assistant(words(800))]
    assert caller.compress(history, max_total_tokens=400).messages == history
    assert not model.asked
    assert len(caller.compress(history, max_total_tokens=399).messages) == 3
    assert len(model.asked) == 1


def test_two_messages_are_recent_by_default(caller: Caller, model: Summaries) -> None:
    history = dialogue(8, 100)
    assert caller.compress(history).messages[1:] == history[-2:]
    assert caller.compress(history, keep_recent_count=None).messages[1:] == history[-2:]
    assert caller.compress(history, keep_recent_count=3).messages[1:] == history[-3:]
    assert caller.compress(history, keep_recent=5).messages[1:] == history[-5:]
    assert caller.compress(history, keep_recent_count=0).messages[1:] == []
    assert caller.compress(history, keep_recent_count=8).messages == history
    assert caller.compress(history, keep_recent_count=9_999).messages == history


@pytest.mark.parametrize(
    ("threshold", "sizes"),
    [
        (None, [6]),
        (0, [6]),
        (600, [6]),
        (599, [5, 1]),
        (300, [3, 3]),
        (200, [2, 2, 2]),
        (199, [1] * 6),
        (1, [1] * 6),
    ],
)
def test_groups_are_greedy_and_their_border_is_exact(
    caller: Caller, model: Summaries, threshold: int | None, sizes: list[int]
) -> None:
    history = dialogue(8, 100)
    reply = caller.compress(history, group_token_threshold=threshold, chat_id="grouped")
    content = reply.messages[0]["content"]
    assert [int(number) for number, _ in ORIGINALS.findall(content)] == sizes
    assert content.count("<state_snapshot>") == content.count("</state_snapshot>") == len(sizes)
    groups = [json.loads(caller.text(path)) for path in reply.groups]
    assert [message for group in groups for message in group] == history[:6]
    assert len(reply.files) == len(reply.answer.splitlines()) == len(model.asked) == len(sizes)
    numbers = [int(path.removesuffix(".json").rpartition("_")[2]) for path in reply.groups]
    assert numbers == list(range(numbers[0], numbers[0] + len(sizes)))


def test_groups_consist_of_whole_steps_and_a_large_step_is_its_own_group(
    caller: Caller, model: Summaries
) -> None:
    small, large = dialogue(2, 100), step("big", words(900), words(800))
    history = [*small, *large, *dialogue(2, 100), user(), assistant()]
    reply = caller.compress(history, group_token_threshold=500)
    assert [json.loads(caller.text(path)) for path in reply.groups] == [
        small,
        large,
        dialogue(2, 100),
    ]
    _, orphan = step("gone", words(100))
    reply = caller.compress([*dialogue(6, 100), orphan], keep_recent_count=1)
    assert reply.messages[1:] == [dialogue(6, 100)[-1], orphan], "it belongs to what precedes it"


# -- auto ------------------------------------------------------------------------------------------


def test_compact_ratio_threshold_is_exact(caller: Caller, model: Summaries) -> None:
    history = [
        user(words(2_000)),
        assistant(words(1_000)),
        *step("c", words(3_000)),
        user(),
        assistant(),
        user(),
    ]
    tight = {
        "max_total_tokens": 100,
        "max_tool_message_tokens": 0,
        "context_manage_mode": "auto",
        "model": MODEL,
    }
    compacted = caller.compact(history).metadata
    ratio = compacted["tokens_after"] / compacted["tokens_before"]
    assert not caller.offload(history, compact_ratio_threshold=ratio, **tight).groups
    assert not model.asked
    assert caller.offload(history, compact_ratio_threshold=math.nextafter(ratio, 0), **tight).groups
    assert len(model.asked) == 1


def test_compact_ratio_threshold_is_three_quarters_by_default(
    caller: Caller, model: Summaries
) -> None:
    for rest, compressed in ((2_000, False), (20_000, True)):
        history = [user(words(rest)), *step("c", words(3_000)), user(), assistant(), user()]
        reply = caller.offload(history, max_total_tokens=100, model=MODEL)
        assert bool(reply.groups) is compressed


def test_every_alias_and_every_default_spelled_out(caller: Caller, model: Summaries) -> None:
    """Make the same call twice, once with the older names and once with every default."""
    history = [user(words(20_000)), *step("c", words(3_000)), user(), assistant(), user()]
    old = {
        "working_summary_mode": "auto",
        "all_token_threshold": 20_000,
        "keep_recent": None,
        "storage_path": STORE,
    }
    new = {
        "context_manage_mode": "auto",
        "compact_ratio_threshold": 0.75,
        "max_total_tokens": 20_000,
        "max_tool_message_tokens": 2_000,
        "group_token_threshold": None,
        "keep_recent_count": None,
        "store_dir": STORE,
        "preview_char_length": 100,
        "compress_system_message": False,
    }
    shapes = []
    for given in (old, new, {"store_dir": STORE}):
        with Caller(caller.proxy) as one:
            reply = one.post(
                "/context_offload", {"messages": history, "model": MODEL, "chat_id": "x", **given}
            )
            shapes.append(
                (
                    set(reply.files),
                    [message["role"] for message in reply.messages],
                    reply.messages[1:],
                )
            )
    assert shapes[0] == shapes[1] == shapes[2]


# -- who writes the summary ------------------------------------------------------------------------


def test_the_policys_model_writes_summaries_by_default() -> None:
    with (
        operated({"offload": {"compress": {"model": "policy-model"}}}) as (proxy, model, _),
        Caller(proxy) as caller,
    ):
        assert caller.compress(dialogue(6, 100), model=None).groups
        assert caller.compress(dialogue(6, 100), model="own-model").groups
        assert [request.json["model"] for request in model.asked] == ["policy-model", "own-model"]


@pytest.mark.parametrize("mode", ["compress", "auto"])
def test_a_missing_summary_model_is_named(caller: Caller, model: Summaries, mode: str) -> None:
    history = dialogue(6, 100)
    reply = caller.compress(history, model=None, context_manage_mode=mode)
    assert (reply.status, reply.messages) == (400, history)
    assert "model" in reply.answer and "compress.model" in reply.answer


def test_compaction_needs_no_model(caller: Caller) -> None:
    history = [user(), *step("c", TEXT), user(words(96))]
    assert len(caller.compact(history).files) == 1
    tight = {"max_total_tokens": 500, "max_tool_message_tokens": 0}
    assert len(caller.offload(history, context_manage_mode="auto", **tight).files) == 1, (
        "enough without a summary"
    )


@pytest.mark.parametrize("made", [0, 1, 2])
def test_a_summary_that_fails_loses_nothing(
    caller: Caller, world: World, model: Summaries, made: int
) -> None:
    """Whichever group fails, nothing is written, and a caller that adopts the reply still has its
    history."""
    history = dialogue(8, 500)
    snapshot = text(f"<state_snapshot>{SUMMARY}</state_snapshot>")
    world.up.script(*[snapshot] * made, error(500))
    reply = caller.compress(history, group_token_threshold=1_000)
    assert (reply.status, reply.messages) == (502, history)
    assert caller.grep(".").metadata["matches"] == []
    assert len(caller.compress(history, group_token_threshold=1_000).groups) == 3


def test_an_answer_without_a_snapshot_is_refused(
    caller: Caller, world: World, model: Summaries
) -> None:
    history = dialogue(6, 100)
    world.up.script(text("I'm sorry, I can't."), text("Hello! How can I help?"))
    reply = caller.compress(history)
    assert (reply.status, reply.messages) == (502, history)
    assert world.up.unused == 0
