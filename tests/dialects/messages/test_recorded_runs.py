"""Recorded runs as Messages: planned as in chat, taken by the strict API as rewritten, and stable between events."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from proxy.core.history import History, Reading, Terms
from proxy.core.plan import Room
from proxy.core.policy import Mode, Offload, Policy
from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.requests import prepare
from proxy.requests.message_cache import MessageCache
from proxy.tokens import Tokens
from tests import transcripts
from tests.dialects.messages import converting
from tests.dialects.messages.api import MessagesApi, RefusedMessage
from tests.transcripts import Run

_tokens = Tokens()
_reader = MessageCache(_tokens)


def history(dialect: Dialect, body: dict[str, object], offload: Offload) -> History:
    request = dialect.parse(json.dumps(body).encode())
    count = lambda text: _tokens.count(text, "")  # noqa: E731 - as the cache of messages passes it
    messages = [dialect.read(raw, Reading.of(offload), count) for raw in request.entries]
    return History.beginning(Terms("m", offload, Room(), 0)).extended(messages)


def assert_planned_alike(run: Run, mode: Mode) -> int:
    """Compare the plans; returns the number of their events."""
    offload = Offload(mode=mode)
    leading = next(
        index for index, message in enumerate(run.messages) if message["role"] not in ("system", "developer")
    )
    chat = history(CHAT, {"model": "m", "messages": run.messages[leading:]}, offload)
    ours = history(MESSAGES, converting.request(run.messages), offload)
    assert ours.tokens == pytest.approx(chat.tokens, rel=0.02)
    assert [item.role for item in ours.items] == [item.role for item in chat.items]
    assert ours.plan().events == chat.plan().events
    assert ours.plan().moves == chat.plan().moves
    assert ours.plan().boundaries == chat.plan().boundaries
    return len(chat.plan().events)


async def assert_taken(run: Run, policy: Policy) -> int:
    """Check every request of the run; returns how many of them were rewritten."""
    api, before, events, changed = MessagesApi(window=10_000_000), b"", 0, 0
    for messages, _ in transcripts.requests_of(run):
        raw = json.dumps(converting.request(messages, run.tools)).encode()
        try:
            api.checked(json.loads(raw))
        except RefusedMessage:
            continue
        request = MESSAGES.parse(raw)
        planned = await prepare.plan(MESSAGES, request, policy, None, _reader)
        assert planned is not None
        ready = prepare.rendered(planned, None, {}, _reader)
        sent = ready.turn().request() if ready.changed else request.body
        api.checked(json.loads(sent))
        entries = b"\n".join([*map(bytes, ready.entries), b""])
        if len(ready.plan.events) == events:
            assert entries.startswith(before)
        before, events = entries, len(ready.plan.events)
        changed += ready.changed
    return changed


@transcripts.needed
def test_some_runs_are_planned_alike() -> None:
    runs = list(islice(transcripts.load(60_000, "sweagent-claude35"), 2))
    assert [assert_planned_alike(run, Mode.AUTO) > 0 for run in runs] == [True] * 2


@transcripts.needed
async def test_requests_of_some_runs_are_taken() -> None:
    runs = list(islice(transcripts.load(30_000, "sweagent-claude35"), 1))
    assert [await assert_taken(run, Policy()) > 0 for run in runs] == [True]


@transcripts.needed
@pytest.mark.sweep
async def test_requests_of_all_runs_are_taken() -> None:
    policy = Policy(offload=Offload(mode=Mode.COMPACT, max_total_tokens=8_000, keep_recent_count=4))
    assert sum([await assert_taken(run, policy) for run in transcripts.load()]) > 1_000
