"""One call of `/context_offload`, as tables: a token is a word, and four a message."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy.operations import one_shot, schema
from proxy.operations.one_shot import Offloaded
from proxy.operations.schema import OffloadParameters
from proxy.plan import summary
from proxy.plan.message import Message
from proxy.plan.plan import Role

Json = dict[str, Any]

OPTIONS = OffloadParameters(
    messages=[],
    context_manage_mode="compact",
    store_dir="./cache/",
    max_total_tokens=100,
    max_tool_message_tokens=50,
    compact_ratio_threshold=0.75,
    preview_char_length=10,
)


def options(**changes: Any) -> OffloadParameters:
    return msgspec.structs.replace(OPTIONS, **changes)


def count(text: str) -> int:
    return len(text.split())


def words(number: int, word: str = "word") -> str:
    """A text of so many tokens."""
    return " ".join(f"{word}{index}" for index in range(number))


def system(tokens: int) -> Json:
    return {"role": "system", "content": words(tokens - 4, "sys")}


def user(tokens: int) -> Json:
    return {"role": "user", "content": words(tokens - 4, "user")}


def said(tokens: int) -> Json:
    return {"role": "assistant", "content": words(tokens - 4, "said")}


def call(*ids: str) -> Json:
    """Six tokens a call, about."""
    made = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: str, tokens: int, word: str = "result") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": words(tokens - 4, word)}


def run(messages: list[Json], chosen: OffloadParameters) -> Offloaded:
    raws, measured = read(messages, chosen)
    return one_shot.offload(raws, measured, chosen, count)


def read(messages: list[Json], chosen: OffloadParameters) -> tuple[list[Raw], list[Message]]:
    raws = [Raw(json.dumps(message).encode()) for message in messages]
    return raws, [one_shot.measured(raw, chosen, count) for raw in raws]


def texts(offloaded: Offloaded) -> list[Any]:
    return [json.loads(bytes(raw)).get("content") for raw in offloaded.raws]


# -- compact ----------------------------------------------------------------------------------------------------------


def test_a_large_result_becomes_a_reference_and_a_file() -> None:
    moved = result("call_1", 96)
    done = run([user(10), call("call_1"), moved, user(10)], OPTIONS)
    [(path, text)] = done.files.items()
    assert text == moved["content"]
    assert re.fullmatch(r"\./cache/f-[0-9a-f]{16}\.txt", path)
    assert texts(done)[2] == (
        f"result0 re... (detailed result is stored in {path}; complete, 1 lines, 92 tokens; result of f)"
    )
    assert done.compacted == 1 and done.groups == ()
    assert done.tokens_before == 10 + 6 + 96 + 10
    assert 0 <= done.tokens[2] - count(texts(done)[2]) - 4 <= 2, "the name is counted by itself"


def test_untouched_messages_keep_their_bytes_and_moved_ones_their_other_fields() -> None:
    raws = [
        Raw(b'{"content" : "\\u00e9", "role":"user","x":1.0}'),
        Raw(json.dumps(call("a")).encode()),
        Raw(json.dumps(result("a", 200) | {"name": "f", "cache_control": {"type": "ephemeral"}}).encode()),
        Raw(json.dumps(user(9)).encode()),
    ]
    done = one_shot.offload(raws, [one_shot.measured(raw, OPTIONS, count) for raw in raws], OPTIONS, count)
    assert [bytes(raw) for raw in done.raws[:2]] == [bytes(raw) for raw in raws[:2]]
    after = json.loads(bytes(done.raws[2]))
    assert list(after) == ["role", "tool_call_id", "content", "name", "cache_control"]


def test_a_repeated_id_belongs_to_the_latest_call() -> None:
    messages = [call("a"), result("a", 60), call("a"), result("a", 60, "other"), user(5)]
    done = run(messages, options(keep_recent_count=2))
    assert [index for index, text in enumerate(texts(done)) if text and "stored in" in text] == [1]


def test_a_call_cannot_leave_the_directory() -> None:
    made = call("../../x")
    made["tool_calls"][0]["function"]["name"] = "../../x"
    done = run([made, result("../../x", 200), user(5)], OPTIONS)
    [path] = done.files
    assert path.startswith("./cache/x-") and ".." not in path


# -- feeding results back in ------------------------------------------------------------------------------------------


TIGHT = options(max_total_tokens=0, max_tool_message_tokens=0, preview_char_length=0)


@pytest.mark.parametrize("preview", [0, 10, 500])
def test_a_reference_is_never_moved(preview: int) -> None:
    messages = [call("a"), result("a", 200), user(5)]
    first = run(messages, options(preview_char_length=preview))
    second = run([json.loads(bytes(raw)) for raw in first.raws], TIGHT)
    assert texts(second) == texts(first) and not second.files


@pytest.mark.parametrize(
    "look_alike",
    [
        "{text} (detailed result is stored in ./cache/f.txt)",
        "{text}... (detailed result is stored in ./cache/f.txt; complete, 1 lines, 92 tokens) and more",
        "{text} {text}... (detailed result is stored in ./cache/f.txt; complete, 1 lines, 92 tokens)",
    ],
)
def test_text_that_cannot_be_a_reference_is_moved_like_any_other(look_alike: str) -> None:
    text = look_alike.format(text=words(92))
    messages = [call("a"), {"role": "tool", "tool_call_id": "a", "content": text}, user(5)]
    assert list(run(messages, TIGHT).files.values()) == [text]


# -- compress ---------------------------------------------------------------------------------------------------------

COMPRESS = options(context_manage_mode="compress")


@pytest.mark.parametrize(
    ("messages", "changes", "groups"),
    [
        pytest.param([system(500), user(50), said(51), user(9), said(9)], {}, ((1, 2),), id="systems and recents stay"),
        pytest.param([system(500), user(50), said(50), user(9), said(9)], {}, (), id="exactly the total"),
        pytest.param([system(50), user(50), said(9), user(9)], {"compress_system_message": True}, (), id="100 exactly"),
        pytest.param([system(51), user(50), said(9), user(9)], {"compress_system_message": True}, ((0, 1),), id="101"),
        pytest.param([user(60), said(60), user(9)], {"keep_recent_count": 0}, ((0, 1, 2),), id="nothing kept"),
        pytest.param([user(60), said(60), user(9)], {"keep_recent_count": 3}, (), id="all kept"),
        pytest.param([user(60), said(60)], {}, (), id="too short"),
        pytest.param([user(200), call("a"), result("a", 60), user(9)], {}, ((0,),), id="a step is not cut"),
        pytest.param([user(200), user(5), system(5), user(5), user(5)], {}, ((0, 1),), id="a system message between"),
        pytest.param([user(50)] * 6, {"group_token_threshold": 100}, ((0, 1), (2, 3)), id="exactly the group"),
        pytest.param([user(50)] * 6, {"group_token_threshold": 99}, ((0,), (1,), (2,), (3,)), id="one less"),
        pytest.param(
            [user(20), call("a"), result("a", 300), user(20), user(20), user(9), user(9)],
            {"group_token_threshold": 50},
            ((0,), (1, 2), (3, 4)),
            id="a step above it stands alone",
        ),
    ],
)
def test_which_messages_are_compressed(
    messages: list[Json], changes: Json, groups: tuple[tuple[int, ...], ...]
) -> None:
    done = run(messages, msgspec.structs.replace(COMPRESS, **changes))
    assert done.groups == groups
    assert not done.files and done.compacted == 0


# -- auto -------------------------------------------------------------------------------------------------------------

HALF = [user(50), said(50), call("a"), result("a", 96), user(9), user(9)]
"""Of 220 tokens, 138 stay when the result is moved."""


@pytest.mark.parametrize(
    ("changes", "moved", "groups"),
    [
        pytest.param({}, 1, (), id="compaction was enough"),
        pytest.param({"compact_ratio_threshold": 0.5}, 1, ((0, 1, 2, 3),), id="it left too much"),
        pytest.param({"compact_ratio_threshold": 0.5, "max_total_tokens": 150}, 1, (), id="what is left is not above"),
        pytest.param({"max_tool_message_tokens": 96}, 0, ((0, 1, 2, 3),), id="there was nothing to compact"),
        pytest.param({"max_tool_message_tokens": 96, "compact_ratio_threshold": 1.0}, 0, (), id="never"),
        pytest.param({"max_total_tokens": 220}, 0, (), id="exactly the total"),
    ],
)
def test_auto_mode_compresses_if_compaction_leaves_too_much(
    changes: Json, moved: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    done = run(HALF, options(context_manage_mode="auto", **changes))
    assert (done.compacted, done.groups) == (moved, groups)


def test_auto_never_throws_the_compaction_away() -> None:
    done = run([*HALF[:4], call("b"), result("b", 96), call("c"), result("c", 70)], options(
        context_manage_mode="auto", compact_ratio_threshold=0.1, keep_recent_count=4
    ))  # fmt: skip
    assert done.groups == ((0, 1, 2, 3),)
    assert list(done.files.values()) == [result("a", 96)["content"]]
    _, measured = read(HALF[:4], OPTIONS)
    turns = one_shot.group_turns(done, measured, done.groups[0])
    assert any("stored in ./cache/f-" in turn.text for turn in turns), "the model that summarises sees paths"


# -- odd messages -----------------------------------------------------------------------------------------------------

ODD: list[Json] = [
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "user", "content": []},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "function", "name": "f", "content": words(200)},
    {"role": "tool", "tool_call_id": "orphan", "content": words(200)},
    {"role": "tool", "content": None},
    {"role": "assistant", "tool_calls": [{"id": "call_123", "name": "web_search", "arguments": {"q": 1}}]},
    {"role": "tool", "tool_call_id": "call_123", "content": words(90)},
    {"role": "assistant", "tool_calls": [{"id": 5}]},
    {"role": "user", "content": [{"type": "text", "text": 5}, {"no": "type"}]},
    {"role": "user", "content": "half a pair \ud83d"},
]


@pytest.mark.parametrize("mode", ["compact", "compress", "auto"])
def test_no_message_fails_a_call(mode: str) -> None:
    chosen = options(context_manage_mode=mode, keep_recent_count=0)
    raws, measured = read(ODD, chosen)
    done = one_shot.offload(raws, measured, chosen, count)
    assert done.tokens_before == sum(message.tokens for message in measured)
    turns = one_shot.group_turns(done, measured, range(len(ODD)))
    assert "web_search" in " ".join(turn.title + turn.text for turn in turns)


def test_unreadable_messages_stay_whole_and_are_counted_raw() -> None:
    raw = Raw(json.dumps(ODD[4]).encode())
    message = one_shot.measured(raw, OPTIONS, count)
    assert message.role is Role.TOOL and message.tokens == count(bytes(raw).decode()) + 4
    done = run([ODD[3], ODD[4], user(5)], OPTIONS)
    assert texts(done)[1] == words(200) and not done.files


messages = st.lists(
    st.one_of(
        st.sampled_from(ODD),
        st.builds(result, st.sampled_from("abc"), st.integers(4, 120)),
        st.builds(lambda ids: call(*ids), st.lists(st.sampled_from("abc"), min_size=1, unique=True)),
        st.builds(user, st.integers(4, 60)),
        st.builds(system, st.integers(4, 60)),
    ),
    max_size=14,
)
chosen_options = st.builds(
    options,
    context_manage_mode=st.sampled_from(["compact", "compress", "auto"]),
    max_total_tokens=st.integers(0, 200),
    max_tool_message_tokens=st.integers(0, 100),
    compact_ratio_threshold=st.floats(0, 1),
    group_token_threshold=st.integers(0, 100),
    keep_recent_count=st.none() | st.integers(0, 8),
    compress_system_message=st.booleans(),
)


@given(messages, chosen_options)
def test_no_content_is_lost_and_no_call_is_separated_from_its_result(
    given_messages: list[Json], chosen: OffloadParameters
) -> None:
    raws, measured = read(given_messages, chosen)
    done = one_shot.offload(raws, measured, chosen, count)
    taken = done.taken
    assert sorted(taken) == [index for group in done.groups for index in group], "in order, each once"
    for index, raw in enumerate(done.raws):
        if raw is not raws[index]:
            original = given_messages[index]["content"]
            parts = [original] if isinstance(original, str) else [part["text"] for part in original if "text" in part]
            assert set(parts) & set(done.files.values())
    border = max(taken, default=-1)
    calls: dict[str, int] = {}
    for index, message in enumerate(measured):
        if message.role is Role.TOOL and message.answers in calls:
            assert (calls[message.answers] <= border) == (index <= border)
        calls |= {made: index for made, _ in message.calls}


# -- what the caller gets ---------------------------------------------------------------------------------------------


def test_snapshots_go_into_the_first_system_message_one_block_per_group() -> None:
    done = run([system(9), *[user(50)] * 6], msgspec.structs.replace(COMPRESS, group_token_threshold=100))
    after = one_shot.with_snapshots(done, [("one", "/s/0.json"), ("two", "/s/1.json")])
    first, *kept = [json.loads(bytes(raw)) for raw in after]
    assert first["role"] == "system" and kept == [user(50)] * 2
    assert first["content"] == (
        f"{words(5, 'sys')}\n\n{summary.NOTICE}\n\n"
        "<state_snapshot>\none\n</state_snapshot>\n(Original 2 messages are stored in: /s/0.json)\n\n"
        "<state_snapshot>\ntwo\n</state_snapshot>\n(Original 2 messages are stored in: /s/1.json)"
    )


def test_without_snapshots_the_messages_stay_as_they_came() -> None:
    done = run(HALF, options(context_manage_mode="compress", max_total_tokens=1_000))
    assert one_shot.with_snapshots(done, []) == done.raws


def test_a_groups_file_is_a_json_array_with_each_message_as_it_came() -> None:
    raws = [b'{"role":"user","content":"a"}', b'{ "role": "user",\n"content": "b" }']
    file = one_shot.group_file(raws)
    assert json.loads(file) == [json.loads(raw) for raw in raws]
    assert file.splitlines()[1] == raws[0] + b","


@pytest.mark.parametrize(
    ("chat_id", "stem"),
    [
        ("research_session_001", "compressed_group_research_session_001_"),
        ("a/../b", "compressed_group_a_b_"),
        ("x" * 65, f"compressed_group_{'x' * 64}_"),
        ("\ud800", "compressed_group___"),
    ],
)
def test_a_groups_file_is_named_after_chat_id_and_number(chat_id: str, stem: str) -> None:
    assert one_shot.group_stem(chat_id) == stem
    assert len(stem) + len("999999..json") <= schema.LONGEST_NAME
