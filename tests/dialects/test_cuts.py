"""What strict chat templates take, they still take after every cut; irregular messages stay;
prefixes are stable."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from proxy.dialects.chat import CHAT
from proxy.dialects.render import moved_files
from proxy.plan.history import History, Terms
from proxy.plan.plan import Plan, Reading, Role, Room
from proxy.policy import Compress, Mode, Offload, SnapshotRole
from tests import written
from tests.dialects.rendering import rendered, snapshot
from tests.templates import refusal
from tests.transcripts import load, needed

Message = dict[str, Any]
REFERENCE = re.compile(rb"/store/[\w.-]+\.txt")

OFFLOAD = written.offload(
    mode=Mode.AUTO,
    keep_views=1,
    max_total_tokens=800,
    max_tool_message_tokens=100,
    unseen_limit=5_000,
    pin_user_tokens=150,
    compact_ratio_threshold=0.2,
    cached_read=1,
    cache_write=1,
    store_dir="/store",
    compress=Compress(snapshot_tokens=20),
)


class Conversation:
    """A conversation's requests as they go upstream if every snapshot exists."""

    def __init__(self, offload: Offload = OFFLOAD, role: SnapshotRole = SnapshotRole.AUTO) -> None:
        self.offload, self.role = offload, role
        self.past = History(Terms("m", offload, Room(), 0))
        self.raws: list[Raw] = []

    def add(self, messages: Sequence[Message]) -> tuple[Plan, list[bytes]]:
        """The plan of the request that ends with these messages, and what is sent. Every reference
        leads to a file."""
        new = [Raw(json.dumps(message).encode()) for message in messages]
        self.raws += new
        self.past = self.past.extended(
            [CHAT.read(raw, Reading.of(self.offload), len) for raw in new]
        )
        plan, transcript = self.past.plan(), self.past.transcript(self.raws)
        shown = snapshot(self.past, plan, f"record {len(plan.boundaries)}", self.role)
        sent = rendered(CHAT, transcript, plan, self.offload, shown)
        files = moved_files(
            CHAT, transcript, plan, "/store", shown.boundary if shown else None, self.past.links
        )
        assert {name for one in sent for name in REFERENCE.findall(one)} <= {
            path.encode() for path in files
        }
        return plan, sent


SIZES = st.sampled_from([1, 40, 150, 700])


def said(role: str, text: str, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


@st.composite
def turns(draw: st.DrawFn, irregular: bool) -> list[Message]:
    """A user message, steps with calls, a reply: now and then without results, with others'
    results, or cut short."""
    text = draw(st.sampled_from(["do ", "look "])) * draw(SIZES)
    found = [said("user", [{"type": "text", "text": text}] if draw(st.booleans()) else text)]
    for _ in range(draw(st.integers(0, 3))):
        ids = draw(
            st.lists(
                st.sampled_from(["c1", "c2", ""]), min_size=1, max_size=2, unique=not irregular
            )
        )
        calls = [
            {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            for id in ids
        ]
        found.append(said("assistant", "now " * draw(SIZES), tool_calls=calls))
        results = (
            draw(st.lists(st.sampled_from(["c1", "c2", "", "c9"]), max_size=3))
            if irregular
            else ids
        )
        found += [said("tool", "found " * draw(SIZES), tool_call_id=id) for id in results]
    if not irregular or draw(st.booleans()):
        found.append(said("assistant", "done " * draw(SIZES)))
    return found


HISTORIES = st.booleans().flatmap(lambda odd: st.lists(turns(odd), min_size=1, max_size=8))


def points(messages: Sequence[Message]) -> list[int]:
    """Where the client asks: before each assistant message, and at the end."""
    replies = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and index
    ]
    return [*replies, len(messages)]


def check(messages: Sequence[Message], talk: Conversation, pairs: bool = True) -> int:
    """Every request passes the templates that its client's own passes, and extends the one before
    between events."""
    last: tuple[object, list[bytes]] = None, []
    begun = cuts = 0
    for point in points(messages):
        plan, sent = talk.add(messages[begun:point])
        begun = point
        decoded = [json.loads(one) for one in sent]
        if not refusal(messages[:point], pairs=pairs):
            assert refusal(decoded, pairs=pairs) == ""
        if last[0] == plan.events:
            assert sent[: len(last[1])] == last[1]
        last = plan.events, sent
        cuts += bool(plan.boundaries)
    return cuts


@given(HISTORIES, st.booleans(), st.booleans(), st.sampled_from(SnapshotRole))
def test_templates_that_take_the_clients_history_take_ours(
    history: list[list[Message]], system: bool, pairs: bool, role: SnapshotRole
) -> None:
    if role is SnapshotRole.SYSTEM and not system:
        role = SnapshotRole.AUTO  # the policy would add a message that templates may refuse
    messages = [said("system", "be good")] * system + [
        message for turn in history for message in turn
    ]
    check(messages, Conversation(role=role), pairs)


@given(HISTORIES)
def test_irregular_messages_keep_bytes_and_order(history: list[list[Message]]) -> None:
    messages = [message for turn in history for message in turn]
    talk = Conversation()
    begun = 0
    for point in points(messages):
        _, sent = talk.add(messages[begun:point])
        begun = point
        rest = iter(sent)
        known = talk.past.items
        alone = {
            index
            for index, item in enumerate(known)
            for index in range(index - item.stays_before, index + item.stays)
        }
        for index in sorted(alone):
            if known[index].preview == known[index].tokens and known[index].role is not Role.USER:
                assert bytes(talk.raws[index]) in rest, "in the order in which they came"


def test_user_messages_that_a_cut_makes_neighbours_are_one() -> None:
    messages = [
        said("user", "task"),
        said("assistant", "a" * 100),
        said("user", [{"type": "image_url", "image_url": {"url": "data:,x"}}]),
        said("assistant", "b" * 100),
        said("user", "rule"),
        said("assistant", "c" * 3_000),
        said("user", "next"),
    ]
    talk = Conversation(replace(OFFLOAD, pin_user_tokens=2_000, keep_recent_count=1))
    _, sent = talk.add(messages)
    [one] = map(json.loads, sent)
    block, *parts = one["content"]
    assert "record" in block["text"]
    assert [part.get("text", part["type"]) for part in parts] == [
        "\n\ntask",
        "image_url",
        "\n\nrule",
        "\n\nnext",
    ]
    _, later = talk.add([said("assistant", "ok"), said("user", "thanks")])
    assert later[:1] == sent and len(later) == 3


def test_user_messages_that_the_client_sent_side_by_side_stay_apart() -> None:
    messages = [
        said("user", "task"),
        said("user", "rule"),
        said("assistant", "a" * 2_000),
        said("user", "x"),
        said("user", "y"),
    ]
    _, sent = Conversation(replace(OFFLOAD, keep_recent_count=1)).add(
        [said("system", "s"), *messages]
    )
    assert [json.loads(one)["content"] for one in sent[1:]] == ["task", "rule\n\nx", "y"]


@needed
@pytest.mark.sweep
@pytest.mark.parametrize("role", [SnapshotRole.AUTO, SnapshotRole.USER])
def test_recorded_runs_stay_acceptable(role: SnapshotRole) -> None:
    offload = written.offload(
        mode=Mode.COMPRESS, max_total_tokens=20_000, pin_user_tokens=4_000, store_dir="/store"
    )
    assert sum(check(run.messages, Conversation(offload, role)) for run in load()) > 1_000


@needed
def test_a_recorded_run_with_many_users_stays_acceptable() -> None:
    offload = written.offload(mode=Mode.COMPRESS, max_total_tokens=5_000, pin_user_tokens=1_000)
    runs = list(load(source="tau-bench"))[:3]
    assert all(check(run.messages, Conversation(offload)) for run in runs)
