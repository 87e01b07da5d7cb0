"""Recorded runs in each API: planned as in chat, taken by the strict API as rewritten, and stable between events."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from typing import Any

import pytest

from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.history import History, Terms
from proxy.plan.message import Reading
from proxy.plan.plan import Room
from proxy.policy import Mode, Offload, Policy
from proxy.requests.cache import MessageCache
from proxy.requests.planned import plan
from proxy.requests.rendered import Rendered
from proxy.tokens import Tokens
from tests import transcripts, written
from tests.dialects.messages import converting as messages
from tests.dialects.messages.api import MessagesApi, RefusedMessage
from tests.dialects.responses import converting as responses
from tests.dialects.responses.api import ResponsesApi
from tests.transcripts import Json, Run

_tokens = Tokens()
_reader = MessageCache(_tokens)


def converted(dialect: Dialect, history: list[Json], tools: list[Json]) -> Json:
    """The members of a request of this API that says what these chat messages say."""
    if dialect is MESSAGES:
        return messages.request(history, tools)
    return {"model": "gpt-4o", "input": responses.items(history), "tools": responses.tools(tools)}


def history(dialect: Dialect, body: Json, offload: Offload) -> History:
    request = dialect.parse(json.dumps(body).encode())
    count = lambda text: _tokens.count(text, "")  # noqa: E731 - as the cache of messages passes it
    read = [dialect.read(raw, Reading.of(offload), count) for raw in request.entries]
    return History(Terms("m", offload, Room(), 0)).extended(read)


def assert_planned_alike(dialect: Dialect, run: Run, mode: Mode) -> int:
    """Compare the plan with that of chat; returns the number of its events."""
    offload = written.offload(mode=mode)
    leading = 0
    if dialect is MESSAGES:  # whose system prompt is no entry
        leading = next(place for place, one in enumerate(run.messages) if one["role"] not in ("system", "developer"))
    chat = history(CHAT, {"model": "m", "messages": run.messages[leading:]}, offload)
    ours = history(dialect, converted(dialect, run.messages, run.tools), offload)
    assert ours.tokens == pytest.approx(chat.tokens, rel=0.02)
    assert len(ours.plan().events) == len(chat.plan().events)
    if dialect is MESSAGES or not any(one["role"] == two["role"] == "assistant" for one, two in pairwise(run.messages)):
        # Items of two replies that follow each other cannot be told apart in Responses, so there they are one.
        assert [item.role for item in ours.items] == [item.role for item in chat.items]
        assert ours.plan().events == chat.plan().events
        assert ours.plan().moves == chat.plan().moves
        assert ours.plan().boundaries == chat.plan().boundaries
        assert ours.plan().live == pytest.approx(chat.plan().live, rel=0.02)
    return len(chat.plan().events)


async def assert_taken(dialect: Dialect, run: Run, policy: Policy) -> int:
    """Check every request of the run; returns how many of them were rewritten."""
    api: Any = MessagesApi(window=10_000_000) if dialect is MESSAGES else ResponsesApi()
    before, events, changed = b"", 0, 0
    for said, _ in transcripts.requests_of(run):
        raw = json.dumps(converted(dialect, said, run.tools)).encode()
        try:
            api.checked(json.loads(raw))
        except RefusedMessage:
            continue
        request = dialect.parse(raw)
        planned = await plan(dialect, request, policy, None, _reader)
        assert planned is not None
        ready = Rendered.of(planned, None, {}, _reader)
        sent = ready.turn().request() if ready.changed else request.body
        api.checked(json.loads(sent))
        entries = b",".join([*map(bytes, ready.entries), b""])  # one entry may be several items with commas between
        if len(ready.plan.events) == events:
            assert entries.startswith(before)
        before, events = entries, len(ready.plan.events)
        changed += ready.changed
    return changed


pytestmark = transcripts.needed
in_each = pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES], ids=lambda dialect: dialect.name)


@in_each
def test_some_runs_are_planned_alike(dialect: Dialect) -> None:
    runs = list(islice(transcripts.load(60_000, "sweagent-claude35"), 2))
    assert [assert_planned_alike(dialect, run, Mode.AUTO) > 0 for run in runs] == [True] * 2


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dialect", "mode"),
    [(RESPONSES, Mode.COMPACT), (RESPONSES, Mode.COMPRESS), (RESPONSES, Mode.AUTO), (MESSAGES, Mode.AUTO)],
)
def test_all_runs_are_planned_alike(dialect: Dialect, mode: Mode) -> None:
    runs = [run for run in transcripts.load() if dialect is RESPONSES or not _speaks_later(run)]
    assert sum(assert_planned_alike(dialect, run, mode) for run in runs) > 50


def _speaks_later(run: Run) -> bool:
    """Whether the run has system messages in the middle, for which Messages has no form."""
    system = [message["role"] in ("system", "developer") for message in run.messages]
    return any(system[system.index(False) :])


@in_each
async def test_requests_of_some_runs_are_taken(dialect: Dialect) -> None:
    runs = list(islice(transcripts.load(30_000, "sweagent-claude35"), 1))
    assert [await assert_taken(dialect, run, Policy()) > 0 for run in runs] == [True]


@in_each
@pytest.mark.sweep
async def test_requests_of_all_runs_are_taken(dialect: Dialect) -> None:
    policy = Policy(offload=written.offload(mode=Mode.COMPACT, max_total_tokens=8_000, keep_recent_count=4))
    assert sum([await assert_taken(dialect, run, policy) for run in transcripts.load()]) > 1_000
