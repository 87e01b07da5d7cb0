"""Our own cache breakpoints: where they go, what they look like, and when there are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.entries import MARKS, OPENAI, Mark, marks_in
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.plan import Reading
from proxy.plan.preview import Shape
from proxy.policy import Mode, Policy
from proxy.requests.cache import MessageCache
from proxy.requests.planned import Rendered, plan
from tests import steps, written
from tests.dialects.responses import converting
from tests.requests.planning import Counting

Json = dict[str, Any]

POLICY = Policy(
    offload=written.offload(mode=Mode.COMPACT, keep_views=1, max_tool_message_tokens=300)
)
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def text(said: str, mark: Json | None, key: str) -> list[Json]:
    return [{"type": "text", "text": said, **({key: mark} if mark else {})}]


def chat(
    sizes: list[int],
    system: Json | None = MARK,
    end: Json | None = MARK,
    key: str = "cache_control",
) -> Json:
    """A conversation of calls with results of so many characters, whose client marks system prompt
    and end."""
    messages: list[Json] = [
        {"role": "system", "content": text("be good", system, key)},
        {"role": "user", "content": "the task"},
    ]
    for number, size in enumerate(sizes):
        messages += steps.chat(f"c{number}", f"{number}" * size, "look")
    messages[-1]["content"] = text(messages[-1]["content"], end, key)
    return {"model": "m", "messages": messages}


def anthropic(sizes: list[int], system: Json | None = MARK, end: Json | None = MARK) -> Json:
    """The same for Messages."""
    messages: list[Json] = [{"role": "user", "content": "the task"}]
    for number, size in enumerate(sizes):
        use = {"type": "tool_use", "id": f"c{number}", "name": "look", "input": {}}
        messages.append(
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, use],
            }
        )
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"{number}" * size}
        messages.append({"role": "user", "content": [result]})
    if end:
        messages[-1]["content"][-1]["cache_control"] = end
    return {
        "model": "m",
        "max_tokens": 9,
        "system": text("be good", system, "cache_control"),
        "messages": messages,
    }


async def sent(dialect: Dialect, body: Json, policy: Policy = POLICY) -> Json:
    reader = MessageCache(Counting())
    asked = dialect.parse(json.dumps(body).encode())
    planned = await plan(dialect, asked, policy, None, reader)
    assert planned is not None and planned.plan.moves
    found: Json = json.loads(Rendered.of(planned, None, {}, reader).turn().request())
    return found


def marks(sent: Json) -> list[tuple[int, Json]]:
    """The marks in the messages or items: the index of each, and the mark on its last part."""
    found = []
    for index, entry in enumerate(sent.get("messages") or sent["input"]):
        content = entry.get("content") or entry.get("output")
        last = content[-1] if content and isinstance(content, list) else {}
        found += [(index, last[key]) for key in MARKS if last.get(key)]
    return found


BOTH = pytest.mark.parametrize(
    ("dialect", "body", "first"), [(CHAT, chat, 2), (MESSAGES, anthropic, 1)]
)
SIZES = [200, 200, 9000, 200]
"""The third one moves."""


@BOTH
async def test_they_are_before_and_on_what_moved_last_until_the_next_event(
    dialect: Dialect, body: Any, first: int
) -> None:
    where, made = first + 3, await sent(dialect, body(SIZES))
    assert marks(made)[-3:] == [(where, MARK), (where + 2, MARK), (where + 4, MARK)]
    assert "0000" not in json.dumps(made["messages"][where]) and "1111" in json.dumps(
        made["messages"][where]
    )
    later = await sent(dialect, body([*SIZES, 200, 200]))
    assert later["messages"][: len(made["messages"]) - 1] == made["messages"][:-1]


@BOTH
@pytest.mark.parametrize(
    ("system", "end", "ours"), [(HOUR, MARK, MARK), (HOUR, HOUR, HOUR), (HOUR, None, MARK)]
)
async def test_it_lives_as_long_as_the_clients_next_one(
    dialect: Dialect, body: Any, first: int, system: Json, end: Json | None, ours: Json
) -> None:
    """A mark must not outlive the ones before it, so where there is none behind it, it has the
    shortest life."""
    made = await sent(dialect, body(SIZES, system, end))
    assert (first + 3, ours) in marks(made)


@pytest.mark.parametrize(("dialect", "body"), [(CHAT, chat), (MESSAGES, anthropic)])
async def test_without_marks_of_the_client_or_room_there_is_none(
    dialect: Dialect, body: Any
) -> None:
    unmarked = await sent(dialect, body(SIZES, None, None))
    assert "cache_control" not in json.dumps(unmarked)
    full = body(SIZES)
    full["tools"] = [{"name": f"t{n}", "input_schema": {}, "cache_control": MARK} for n in range(2)]
    assert json.dumps(await sent(dialect, full)).count("cache_control") == 4


async def test_a_mark_of_the_clients_at_that_place_stays_as_it_is() -> None:
    request = anthropic(SIZES)
    request["messages"][4]["content"][0]["cache_control"] = HOUR
    assert marks(await sent(MESSAGES, request)) == [(4, HOUR), (6, MARK), (8, MARK)]


@pytest.mark.parametrize(
    "content", [{"a": 1}, 7, True, None, "", [], [{"type": "thinking", "thinking": "hm"}]]
)
@BOTH
async def test_content_that_can_carry_none_keeps_its_bytes(
    dialect: Dialect, body: Any, first: int, content: Any
) -> None:
    """What no API knows included, which goes upstream as it came and costs no request."""
    request = body(SIZES)
    odd = {"role": "user", "content": content}
    request["messages"].insert(first + 4, odd)
    made = await sent(dialect, request)
    assert made["messages"][first + 4] == odd
    assert marks(made)[-2:] == [(first + 6, MARK), (first + 8, MARK)] and len(marks(made)) <= 3


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,", " : ")])
def test_nulls_and_quotations_are_no_marks(separators: tuple[str, str]) -> None:
    """Clients that write all fields of a block have one in each."""
    marked = {"type": "text", "text": "x", "cache_control": HOUR}
    parts = [marked | {"cache_control": None}, marked | {"text": json.dumps(marked)}, marked]
    [one, other] = marks_in(json.dumps({"content": parts}, separators=separators).encode())
    assert one == other and (one.key, json.loads(bytes(one.value))) == ("cache_control", HOUR)


# -- OpenAI's spelling -----------------------------------------------------------------------------

EXPLICIT = {"mode": "explicit"}


def openai_chat(sizes: list[int]) -> Json:
    return chat(sizes, EXPLICIT, EXPLICIT, OPENAI)


def openai_responses(sizes: list[int]) -> Json:
    return {"model": "m", "input": converting.items(openai_chat(sizes)["messages"])}


@pytest.mark.parametrize(("dialect", "body"), [(CHAT, openai_chat), (RESPONSES, openai_responses)])
async def test_ours_are_spelled_like_the_clients(dialect: Dialect, body: Any) -> None:
    """OpenAI writes three of them beside the one that it sets itself: the client's two, and one of
    ours."""
    request = body(SIZES)
    made = await sent(dialect, request)
    assert marks(made) == [(place, EXPLICIT) for place in (0, 5, 9)]
    assert "cache_control" not in json.dumps(made)
    made = await sent(dialect, request | {"prompt_cache_options": {"mode": "explicit"}})
    assert [place for place, _ in marks(made)] == [0, 5, 7, 9]
    name, kind = ("content", "text") if dialect is CHAT else ("output", "input_text")
    (request.get("messages") or request["input"])[3][name] = [
        {"type": kind, "text": "so", OPENAI: EXPLICIT}
    ]
    made = await sent(dialect, request)
    assert [place for place, _ in marks(made)] == [0, 3, 9], "ours displaces none of the client's"


@pytest.mark.parametrize("type", ["computer_call_output", "local_shell_call_output"])
def test_an_output_that_can_be_no_list_of_parts_gets_none(type: str) -> None:
    output = {"type": type, "call_id": "c", "output": "so"}
    entry = json.dumps(output).encode()
    assert RESPONSES.marked(entry, Mark(OPENAI, MARKS[OPENAI])) is entry


@pytest.mark.parametrize(
    ("dialect", "body"),
    [(CHAT, openai_chat), (RESPONSES, openai_responses), (CHAT, chat), (MESSAGES, anthropic)],
)
def test_a_summary_call_ends_with_the_mark_that_the_client_has_behind_it(
    dialect: Dialect, body: Any
) -> None:
    request = dialect.parse(json.dumps(body(SIZES)).encode())
    made = json.loads(dialect.summary_on_prefix("the task", request, request.entries[:4], [], 9, 4))
    last = (made.get("messages") or made["input"])[-1]["content"][-1]
    assert last["text"] == "the task" and last.keys() & set(MARKS)


# -- marks and meaning -----------------------------------------------------------------------------

IMAGE = "data:image/png;base64,iVBORw0KGgo="
PARTS: list[tuple[Dialect, Json]] = [
    (CHAT, {"type": "text", "text": "look"}),
    (CHAT, {"type": "image_url", "image_url": {"url": IMAGE}}),
    (CHAT, {"type": "file", "file": {"file_id": "f"}}),
    (MESSAGES, {"type": "text", "text": "look"}),
    (MESSAGES, {"type": "image", "source": {"type": "url", "url": "http://h/i.png"}}),
    (RESPONSES, {"type": "input_text", "text": "look"}),
    (RESPONSES, {"type": "input_image", "image_url": IMAGE}),
    (RESPONSES, {"type": "input_file", "file_id": "f"}),
]


@pytest.mark.parametrize("key", MARKS)
@pytest.mark.parametrize(("dialect", "part"), PARTS)
def test_a_mark_says_nothing_of_what_an_entry_means(dialect: Dialect, part: Json, key: str) -> None:
    """Clients move theirs with each request, and the history is the same."""

    def meaning(part: Json) -> bytes:
        entry = json.dumps({"role": "user", "content": [part]}).encode()
        return dialect.read(entry, Reading(Shape("", 0), 0), len).meaning

    assert meaning(part | {key: {"mode": "explicit"}}) == meaning(part)
    assert meaning(part) != meaning({"type": part["type"], "text": "other"})
