"""Entries: how messages are divided, what each part means and weighs, and which of its texts can be
moved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.messages import MESSAGES
from proxy.dialects.render import with_previews
from proxy.plan.plan import Message, Reading, Role
from proxy.plan.preview import MARK, Shape
from proxy.plan.texts import Carries
from proxy.policy import SnapshotRole
from tests.dialects.messages.api import say

Json = dict[str, Any]

SHAPE = Shape(store_dir="/context_store", preview_chars=100)
CITED = "sources, which replies cite by number"
READING = Reading(SHAPE, 20_000)
LONG = "long " * 400
HI = {"role": "user", "content": "hi"}
REMINDER = say("<system-reminder>x</system-reminder>")
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "A" * 9_000},
}


def parsed(messages: Any, **members: Any) -> Any:
    return MESSAGES.parse(
        json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **members}).encode()
    )


def entries(*blocks: Json) -> list[bytes]:
    return [bytes(entry) for entry in parsed([{"role": "user", "content": list(blocks)}]).entries]


def read(raw: Any) -> Message:
    return MESSAGES.read(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), READING, len)


def result(id: str = "t1", content: Any = LONG, **members: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **members}


def sent(request: Any, raws: Any) -> Json:
    return json.loads(MESSAGES.turn(request, raws, [], 8).request())  # type: ignore[no-any-return]


# -- dividing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "roles"),
    [
        ([say("a"), say("b")], [Role.USER]),
        ([result()], [Role.TOOL]),
        ([result("t1"), result("t2"), result("t3")], [Role.TOOL] * 3),
        ([result("t1"), REMINDER, result("t2"), REMINDER, REMINDER], [Role.TOOL] * 2),
        (
            [result("t1"), result("t2"), REMINDER, say("Stop!"), REMINDER],
            [Role.TOOL, Role.TOOL, Role.USER],
        ),
        ([REMINDER, result()], [Role.TOOL]),
        ([result(), IMAGE], [Role.TOOL]),
        ([REMINDER, say("Do it.")], [Role.USER]),
    ],
)
def test_results_are_entries_and_so_is_what_the_user_says_beside_them(
    blocks: list[Json], roles: list[Role]
) -> None:
    request = parsed(
        [HI, {"role": "assistant", "content": "x"}, {"role": "user", "content": blocks}]
    )
    assert [read(bytes(entry)).role for entry in request.entries[2:]] == roles
    assert sent(request, request.entries)["messages"][2] == {"role": "user", "content": blocks}


def test_a_message_with_members_of_its_own_stays_whole() -> None:
    odd = {"role": "user", "content": [result()], "id": "m1"}
    [entry] = parsed([odd]).entries
    assert json.loads(bytes(entry)) == odd
    assert read(odd).sealed


# -- meaning ---------------------------------------------------------------------------------------


def test_found_tools_stay_where_they_are() -> None:
    """Claude Code searches itself, and other clients have upstream do it."""
    found = {"type": "tool_reference", "tool_name": "fetch"}
    searched = {"type": "tool_search_tool_search_result", "tool_references": [found]}
    answer = {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": searched}
    assert read(entries(result(content=[found]))[0]).sealed
    assert read(
        json.dumps({"role": "assistant", "content": [answer, say("Found.")]}).encode()
    ).sealed
    assert not read(entries(result())[0]).sealed
    assert not read(
        json.dumps({"role": "assistant", "content": [say("tool_reference")]}).encode()
    ).sealed


def test_reminders_and_breakpoints_mean_nothing() -> None:
    assert (
        read(entries(result(), REMINDER)[0]).meaning
        == read(entries(result(cache_control={}))[0]).meaning
    )
    assert read({"role": "user", "content": [REMINDER, say("hi")]}).meaning == read(HI).meaning
    assert read(entries(result("t2"))[0]).meaning != read(entries(result())[0]).meaning
    assert read(entries(result(), REMINDER)[0]).tokens > read(entries(result())[0]).tokens


# -- texts that move -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [LONG, [say(LONG), IMAGE, say(LONG)], [{**say(LONG), "cache_control": {}}]]
)
def test_texts_and_images_of_results_move_and_nothing_else_changes(content: Any) -> None:
    block = result(content=content, is_error=False, cache_control={"type": "ephemeral"})
    [raw] = entries(block, REMINDER)
    message = read(raw)
    moved, reminder = json.loads(
        b"[%b]" % with_previews(MESSAGES, raw, message, SHAPE, first_preview=False)
    )
    texts = 1 if isinstance(content, str) else len(content)
    assert json.dumps(moved).count(MARK) == texts == len(message.pieces)
    assert reminder == REMINDER
    assert {**moved, "content": content} == block
    if not isinstance(content, str):
        texts_alone = [
            say("") if part["type"] == "image" else {**part, "text": ""} for part in content
        ]
        assert [{**part, "text": ""} for part in moved["content"]] == texts_alone
    assert message.preview < message.tokens


def test_texts_of_user_messages_move() -> None:
    for raw in ({"role": "user", "content": LONG}, {"role": "user", "content": [IMAGE, say(LONG)]}):
        made = json.loads(
            with_previews(MESSAGES, json.dumps(raw).encode(), read(raw), SHAPE, first_preview=False)
        )
        assert json.dumps(made).count(MARK) == 1
    [_, said] = entries(result(), say(LONG), IMAGE)
    made = json.loads(
        b"[%b]" % with_previews(MESSAGES, said, read(said), SHAPE, first_preview=False)
    )
    assert MARK in made[0]["text"]
    assert made[1] == IMAGE


def test_files_weigh_what_they_cost_and_text_documents_what_they_say() -> None:
    assert read({"role": "user", "content": [IMAGE]}).tokens < 1_000
    assert read({"role": "user", "content": [IMAGE]}).fixed > 0
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "x" * 60_000},
    }
    assert read({"role": "user", "content": [document]}).fixed == 0
    assert read({"role": "user", "content": [document]}).tokens > 9_000


@pytest.mark.parametrize("enabled", [True, False, None])
@pytest.mark.parametrize("kind", ["document", "search_result"])
def test_sources_that_replies_cite_by_number_stay(kind: str, enabled: bool | None) -> None:
    """Where an earlier one is gone, number 1 is another source."""
    citations = {} if enabled is None else {"citations": {"enabled": enabled}}
    more: Json = (
        {"source": "https://a", "content": [say("x")]}
        if kind == "search_result"
        else {"source": {"type": "text"}}
    )
    source = {"type": kind, "title": "A", **more, **citations}
    assert read({"role": "user", "content": [source, say("Look.")]}).sealed == (
        "sources, which replies cite by number" if enabled else ""
    )
    assert read(entries(result(content=[source]))[0]).sealed == (
        "sources, which replies cite by number" if enabled else ""
    )


# -- system messages -------------------------------------------------------------------------------


def system(text: str, **members: Any) -> Json:
    return {"role": "system", "content": text, **members}


def test_a_system_message_that_says_more_than_text_stays_where_it_is() -> None:
    message = read(system(LONG, output_config={"effort": "medium"}))
    assert message.role is Role.SEALED
    assert message.pieces == ()
    assert message.tokens > len(LONG)
    assert read(system(LONG)).role is Role.SYSTEM


def test_a_system_message_of_reminders_belongs_to_the_step_before_it() -> None:
    assert read(system("<total_tokens>14986893 tokens left</total_tokens>")).carries is Carries.YES
    assert read(system("Do not deploy.")).carries is Carries.NO
    assert read(system("")).carries is Carries.NO


@pytest.mark.parametrize(
    ("messages", "made"),
    [
        ([HI, system("a")], None),
        ([HI, HI, system("a"), {"role": "assistant", "content": "b"}, HI, system("c")], None),
        ([system("a"), HI], None),
        ([HI, system("a"), HI], [{"role": "user", "content": [say("hi"), say("hi")]}, system("a")]),
        (
            [
                HI,
                system("a", output_config={"effort": "low"}),
                system("b"),
                {"role": "user", "content": [say("x")]},
            ],
            [
                {"role": "user", "content": [say("hi"), say("x")]},
                system("a", output_config={"effort": "low"}),
                system("b"),
            ],
        ),
        (
            [HI, system("a", clear_at="never"), system("b", clear_at="never"), HI],
            [
                {"role": "user", "content": [say("hi"), say("hi")]},
                {"role": "system", "content": [say("a"), say("b")], "clear_at": "never"},
            ],
        ),
        ([HI, system("a"), {"role": "user", "content": 7}], None),
    ],
)
def test_a_system_message_is_the_last_before_a_reply(
    messages: list[Json], made: list[Json] | None
) -> None:
    request = parsed(messages)
    assert sent(request, request.entries)["messages"] == (made or messages)


# -- snapshots and put-back ------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, "Be brief.", [{**say("Be brief."), "cache_control": {}}]])
def test_a_snapshot_stands_behind_the_system_prompt(system: Any) -> None:
    request = parsed([HI], **({} if system is None else {"system": system}))
    body = sent(
        request, MESSAGES.with_snapshot(list(request.entries), 0, "record", SnapshotRole.AUTO)
    )
    before = [say(system)] if isinstance(system, str) else system or []
    assert body["system"] == [*before, say("record")]
    assert body["messages"] == [HI]


def test_a_snapshot_may_be_a_user_message() -> None:
    request = parsed([HI], system="Be brief.")
    made = MESSAGES.with_snapshot(list(request.entries), 0, "record", SnapshotRole.USER)
    assert sent(request, MESSAGES.joined(made))["messages"] == [
        {"role": "user", "content": [say("record"), say("hi")]}
    ]


def test_a_result_is_readable_with_its_reminder() -> None:
    [raw] = entries(result(content=[say("found")]), REMINDER)
    assert [section.text for section in MESSAGES.sections(raw, 3, read(raw), "fetch")] == [
        "found",
        REMINDER["text"],
    ]
