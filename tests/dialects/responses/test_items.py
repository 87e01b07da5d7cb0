"""Entries: how an input is grouped, what each means and weighs, and which of its texts can be
moved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.render import with_previews
from proxy.dialects.responses import RESPONSES
from proxy.plan.history import History, Terms
from proxy.plan.plan import Message, Reading, Role, Room
from proxy.plan.preview import MARK, Shape
from proxy.plan.recognise import Hidden
from proxy.policy import Offload, SnapshotRole
from tests.dialects.responses.api import call, reasoning, say

Json = dict[str, Any]

SHAPE = Shape(store_dir="/context_store", preview_chars=100)
READING = Reading(SHAPE, 20_000)
LONG = "long " * 400
USER = {"role": "user", "content": "hi"}


def parsed(items: Any, **members: Any) -> Any:
    return RESPONSES.parse(json.dumps({"model": "m", "input": items, **members}).encode())


def read(*items: Any) -> Message:
    return RESPONSES.read(b",".join(json.dumps(item).encode() for item in items), READING, len)


def result(type: str = "function_call_output", output: Any = LONG, **members: Any) -> Json:
    return {"type": type, "call_id": "c1", "output": output, **members}


# -- grouping --------------------------------------------------------------------------------------


def test_the_items_of_a_reply_are_one_entry() -> None:
    search = {"type": "web_search_call", "id": "ws", "status": "completed"}
    reply = [
        reasoning("Hm."),
        search,
        say("So."),
        call("fetch", call_id="c1"),
        call("fetch", call_id="c2"),
    ]
    outputs = [result(), result(call_id="c2")]
    entries = parsed(
        [USER, *reply, *outputs, say("Done."), {"role": "developer", "content": "x"}]
    ).entries
    assert [len(json.loads(b"[%b]" % bytes(entry))) for entry in entries] == [1, 5, 1, 1, 1, 1]
    assert json.loads(b"[%b]" % bytes(entries[1])) == reply


def test_what_the_developer_adds_is_no_reply_and_leads() -> None:
    """Codex defines its tools so. They must not be summarised, nor end the leading system
    messages."""
    tools = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions"}],
    }
    prompt = {"role": "developer", "content": "Be brief."}
    entries = parsed([tools, prompt, USER]).entries
    assert len(entries) == 3
    messages = [read(json.loads(bytes(entry))) for entry in entries]
    assert [message.role for message in messages] == [Role.SYSTEM, Role.SYSTEM, Role.USER]
    assert [bool(message.sealed) for message in messages] == [True, False, False]
    assert messages[0].tokens > len("additional_tools")
    grown = RESPONSES.with_snapshot(list(entries), 2, "record", SnapshotRole.AUTO)
    assert [bytes(entry) for entry in (*grown[:2], grown[-1])] == [
        bytes(entry) for entry in entries
    ]


def test_a_string_is_one_entry_and_keeps_its_form_alone() -> None:
    request = parsed("hi", tools=[])
    assert [bytes(entry) for entry in request.entries] == [b'"hi"']
    assert json.loads(RESPONSES.turn(request, request.entries, [], 8).request())["input"] == "hi"
    grown = RESPONSES.with_snapshot(list(request.entries), 0, "record", SnapshotRole.SYSTEM)
    sent = json.loads(RESPONSES.turn(request, grown, [], 8).request())["input"]
    assert sent == [{"role": "developer", "content": "record"}, USER]
    assert read("hi").meaning == read(USER).meaning == read({"type": "message", **USER}).meaning


def named(*names: str) -> list[Json]:
    return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


SEARCH = {
    "type": "tool_search_call",
    "id": "ts",
    "call_id": "c1",
    "status": "completed",
    "arguments": {"query": "x"},
}
FOUND = {
    "type": "tool_search_output",
    "call_id": "c1",
    "status": "completed",
    "tools": named("fetch"),
}
ASKS = {
    "type": "mcp_approval_request",
    "id": "mcpr_1",
    "name": "drop",
    "server_label": "db",
    "arguments": "{}",
}
ALLOWS = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}


@pytest.mark.parametrize(
    ("asked", "answered"),
    [({**SEARCH, "execution": "client"}, {**FOUND, "execution": "client"}), (ASKS, ALLOWS)],
)
def test_what_the_client_answers_ends_a_reply(asked: Json, answered: Json) -> None:
    entries = parsed(
        [USER, reasoning("Hm."), asked, answered, call("fetch", call_id="c2"), result(call_id="c2")]
    ).entries
    messages = [read(*json.loads(b"[%b]" % bytes(entry))) for entry in entries]
    assert [message.role for message in messages] == [Role.USER, *(Role.ASSISTANT, Role.TOOL) * 2]
    assert [id for id, _ in messages[1].calls] == [messages[2].answers]
    assert messages[2].pieces == ()


def test_found_tools_weigh_what_they_say_and_mean_it() -> None:
    few = read({**FOUND, "execution": "client"})
    more = read({**FOUND, "execution": "client", "tools": named("fetch", "x" * 500)})
    assert more.tokens - few.tokens > 500
    assert more.meaning != few.meaning


def test_what_upstream_finds_itself_belongs_to_its_reply() -> None:
    search, found = ({**item, "execution": "server", "call_id": None} for item in (SEARCH, FOUND))
    entries = parsed(
        [USER, search, found, call("fetch", call_id="c2"), result(call_id="c2")]
    ).entries
    assert [len(json.loads(b"[%b]" % bytes(entry))) for entry in entries] == [1, 3, 1]
    assert read(search, found, call("fetch", call_id="c2")).calls == (("c2", "fetch"),)


@pytest.mark.parametrize("execution", ["client", "server"])
def test_found_tools_stay_defined_behind_a_cut(execution: str) -> None:
    search, found = ({**item, "execution": execution} for item in (SEARCH, FOUND))
    entries = parsed(
        [USER, search, found, call("fetch", call_id="c2"), result(call_id="c2")]
    ).entries
    messages = [read(*json.loads(b"[%b]" % bytes(entry))) for entry in entries]
    kept = set[int]()
    for index, one in enumerate(History(Terms("m", Offload(), Room(), 0)).extended(messages).items):
        kept.update(range(index - one.stays_before, index + one.stays))
    assert kept == {1, 2}, "the search and what it found, or the reply with both and its result"


# -- meaning ---------------------------------------------------------------------------------------


def test_a_reference_means_the_item_that_it_names() -> None:
    """Otherwise histories with other replies would share their records."""
    one, same, other = (
        read({"type": "item_reference", "id": id}) for id in ("msg_1", "msg_1", "msg_2")
    )
    assert one.meaning == same.meaning != other.meaning


def test_calls_and_results_pair_by_their_ids() -> None:
    shell = {
        "type": "local_shell_call",
        "id": "ls",
        "call_id": "c1",
        "action": {"type": "exec"},
        "status": "completed",
    }
    assert read(reasoning(), call("fetch", call_id="c1"), shell).calls == (
        ("c1", "fetch"),
        ("c1", "local_shell_call"),
    )
    assert read(result()).answers == "c1"
    assert read({"type": "local_shell_call_output", "id": "c1", "output": "x"}).answers == "c1"
    assert (
        read({"type": "web_search_call", "id": "ws", "status": "completed"}, say("x")).calls == ()
    )


def test_upstreams_own_summary_stays() -> None:
    assert read({"type": "compaction", "encrypted_content": "x" * 60}).role is Role.SEALED


# -- texts that move -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "texts"),
    [
        (result(), 1),
        (result("custom_tool_call_output"), 1),
        (result("apply_patch_call_output", status="completed"), 1),
        ({"type": "local_shell_call_output", "id": "c1", "output": LONG}, 1),
        (
            result(
                output=[
                    {"type": "input_text", "text": LONG},
                    {"type": "input_image", "image_url": "u"},
                ]
            ),
            2,
        ),
        (
            result(
                "custom_tool_call_output",
                [{"type": "input_text", "text": LONG}, {"type": "input_text", "text": LONG}],
            ),
            2,
        ),
        (
            result(
                "shell_call_output", [{"stdout": LONG, "stderr": "", "outcome": {"type": "exit"}}]
            ),
            1,
        ),
        (
            result(
                "shell_call_output", [{"stdout": "", "stderr": ""}, {"stdout": "x", "stderr": LONG}]
            ),
            1,
        ),
    ],
)
def test_texts_of_results_move_and_nothing_else_changes(item: Json, texts: int) -> None:
    raw = json.dumps(item).encode()
    message = read(item)
    assert message.role is Role.TOOL
    moved = json.loads(with_previews(RESPONSES, raw, message, SHAPE, first_preview=False))
    assert json.dumps(moved).count(MARK) == texts
    assert moved.keys() == item.keys()
    assert {key: moved[key] for key in item if key != "output"} == {
        key: item[key] for key in item if key != "output"
    }
    assert message.preview < message.tokens
    loaded = [
        text for place, text in RESPONSES.pieces(raw) if text == LONG or "input_image" in text
    ]
    assert len(loaded) == texts


def test_a_screenshot_has_no_text_and_stays_as_it_must() -> None:
    shot = result(
        "computer_call_output", {"type": "computer_screenshot", "image_url": "data:" + "x" * 9_000}
    )
    message = read(shot)
    assert [piece.preview == piece.tokens for piece in message.pieces] == [True]
    assert message.preview == message.tokens == message.fixed + 4 < 1_000


def test_reasoning_weighs_what_it_says_and_what_it_hides() -> None:
    assert (
        read({**reasoning("Hm."), "encrypted_content": "x" * 600}).tokens
        == len("Hm.") + 602 // 6 + 4
    )
    image = {
        "type": "image_generation_call",
        "id": "ig",
        "status": "completed",
        "result": "x" * 90_000,
    }
    assert read(image).tokens < 1_000


# -- hidden rounds ---------------------------------------------------------------------------------


def test_an_item_of_a_type_that_nobody_knows_yet_is_put_back_with_its_round() -> None:
    new = json.dumps({"type": "quantum_call", "call_id": "q1", "qubits": "q" * 900}).encode()
    before = (new, json.dumps(call("grep", call_id="c1")).encode(), json.dumps(result()).encode())
    hidden = Hidden(before, b"[" + new + b"]", (), (900, 20, 1_080))
    shrunk = RESPONSES.shrunk(hidden, 100)
    assert shrunk.before[:2] == before[:2]
    assert "left out now" in json.loads(shrunk.before[2])["output"]
    assert list(map(bytes, RESPONSES.reinserted(shrunk, new))) == [*shrunk.before, new]
