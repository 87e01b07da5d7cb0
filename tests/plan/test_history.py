"""What a history's beginning decides: its digest, and the part that each message plays in the
plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.history import History, Terms
from proxy.plan.plan import Message, Reading, Role, Room
from proxy.plan.texts import After, ResultPreset, ResultRole, ResultRule
from proxy.policy import Offload

Json = dict[str, Any]

OFFLOAD = Offload(max_tool_message_tokens=200, pin_user_tokens=500)


def said(role: str, text: Any = "", **more: Any) -> Json:
    return {"role": role, "content": text, **more}


def measured(messages: list[Json], offload: Offload = OFFLOAD) -> list[Message]:
    return [CHAT.read(json.dumps(one).encode(), Reading.of(offload), len) for one in messages]


def chain(*messages: Json) -> list[str]:
    history = History(Terms("m", OFFLOAD, Room(), 0)).extended(measured(list(messages)))
    return [link.hex() for link in history.links[1:]]


# -- the digest ------------------------------------------------------------------------------------

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"b": 1, "a": [2]}'},
}
TALK = [
    said("system", "be good"),
    said("developer", "it is noon"),
    said("user", " look into it "),
    said("assistant", "yes", tool_calls=[CALL]),
    said("tool", "seen", tool_call_id="c1"),
    said(
        "user", [{"type": "text", "text": "go "}, {"type": "image_url", "image_url": {"url": "u"}}]
    ),
]


def test_leading_system_messages_are_no_part_of_the_digest() -> None:
    assert chain(*TALK)[:2] == ["0" * 32] * 2
    assert chain(*TALK)[2:] == chain(*TALK[2:])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_later_system_messages_are_part_of_the_digest(role: str) -> None:
    banana = chain(*TALK, said(role, "BANANA"), said("assistant", "I see"))
    apple = chain(*TALK, said(role, "APPLE"), said("assistant", "I see"))
    assert banana[:6] == apple[:6] == chain(*TALK)
    assert banana[6] != apple[6] and banana[7] != apple[7]
    assert chain(*TALK, said(role, [{"type": "text", "text": " BANANA\n"}]))[6] == banana[6]


# -- the parts -------------------------------------------------------------------------------------

TALKED = [said("system", "s"), said("user", "u"), said("assistant", "a")]


def items(*messages: Json, offload: Offload = OFFLOAD) -> list[tuple[Role, bool]]:
    """The part that each message plays, and whether it can be moved. Read in two steps, as a cache
    would."""
    read = measured([*TALKED, *messages], offload)
    history = History(Terms("m", offload, Room(), 0)).extended(read[:2]).extended(read[2:])
    assert history.items == History(history.terms).extended(read).items
    return [(item.role, item.preview < item.tokens) for item in history.items[len(TALKED) :]]


def test_leading_system_messages_and_the_first_user_message_never_move() -> None:
    large = [said("system", "x" * 9000), said("developer", "x" * 9000), said("user", "x" * 9000)]
    history = History(Terms("m", OFFLOAD, Room(), 0)).extended(measured(large))
    assert [item.role for item in history.items] == [Role.SYSTEM, Role.SYSTEM, Role.USER]
    assert all(item.preview == item.tokens for item in history.items)


def test_only_large_messages_of_user_and_system_can_move() -> None:
    assert items(said("system", "x" * 100), said("developer", "x" * 300)) == [
        (Role.SYSTEM, False),
        (Role.TOOL, True),
    ]
    assert items(said("user", "x" * 490), said("user", "x" * 600)) == [
        (Role.USER, False),
        (Role.USER, True),
    ]


def named(*results: ResultPreset | ResultRule) -> Offload:
    return Offload(max_tool_message_tokens=200, pin_user_tokens=500, results=results)


@pytest.mark.parametrize(
    ("preset", "messages", "results"),
    [
        (ResultPreset.SMOLAGENTS, ["Observation:\nReady.\nNew task:\nNever write to /etc."], [False]),
        (ResultPreset.SMOLAGENTS, ["Observation:\nfound", "New task:\ngo", "Call id: c1\nno"], [True, False, True]),
        (ResultPreset.CLINE, ["[read_file for 'a.py'] Result:", "[ask_followup_question] Result:"], [True, False]),
        (ResultPreset.GPTME, ["Observation: no"], [False]),
    ],
)  # fmt: skip
def test_presets_name_the_results_of_their_clients(
    preset: ResultPreset, messages: list[str], results: list[bool]
) -> None:
    for made in (
        str,
        lambda text: [{"type": "image_url", "image_url": {}}, {"type": "text", "text": text}],
    ):
        found = items(
            *(said("user", made(text + " x" * 200)) for text in messages), offload=named(preset)
        )
        assert [part is Role.TOOL for part, _ in found] == results
        assert [movable for _, movable in found if _ is Role.TOOL] == [True] * sum(results)
        assert not any(
            part is Role.TOOL for part, _ in items(*(said("user", made(text)) for text in messages))
        )


def test_gptmes_results_are_system_messages_after_the_users_first() -> None:
    assert items(said("system", "Ran command"), offload=named(ResultPreset.GPTME)) == [
        (Role.TOOL, False)
    ]
    assert items(said("system", "Ran command")) == [(Role.SYSTEM, False)]
    early = [
        said("assistant", "hello"),
        said("system", "x" * 50),
        said("user", "u"),
        said("system", "y" * 50),
    ]
    history = History(Terms("m", named(ResultPreset.GPTME), Room(), 0)).extended(measured(early))
    assert [item.role for item in history.items] == [
        Role.ASSISTANT,
        Role.SYSTEM,
        Role.USER,
        Role.SYSTEM,
    ]
    read = measured(early, named(ResultPreset.GPTME))
    history = History(history.terms).extended(read)
    assert [item.role for item in history.items] == [
        Role.ASSISTANT,
        Role.SYSTEM,
        Role.USER,
        Role.TOOL,
    ]


def test_the_first_user_message_is_no_result_whatever_it_says() -> None:
    rule = ResultRule(role=ResultRole.USER, prefix="Observation:")
    read = measured(
        [said("user", "Observation: the sky"), said("user", "Observation: the sea")], named(rule)
    )
    history = History(Terms("m", named(rule), Room(), 0)).extended(read)
    assert [item.role for item in history.items] == [Role.USER, Role.TOOL]


def test_a_rule_may_ask_for_role_prefix_and_place() -> None:
    rule = ResultRule(role=ResultRole.SYSTEM, prefix="Result:", after=After.FIRST_USER)
    assert items(said("system", "Result: 1"), said("system", "Note: 1"), said("user", "Result: 1"),
                 offload=named(rule)) == [(Role.TOOL, False), (Role.SYSTEM, False), (Role.USER, False)]  # fmt: skip


def test_results_change_no_digest() -> None:
    messages = [*TALKED, said("user", "Observation: x"), said("assistant", "y")]
    plain, marked = (
        measured(messages, offload) for offload in (OFFLOAD, named(ResultPreset.SMOLAGENTS))
    )
    history = History(Terms("m", OFFLOAD, Room(), 0))
    assert history.extended(plain).links == history.extended(marked).links
