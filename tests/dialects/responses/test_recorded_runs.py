"""The strict API takes every request of recorded runs as the proxy rewrites them, and prefixes stand between events."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from proxy.core.policy import Mode, Offload, Policy
from proxy.dialects.responses import RESPONSES
from proxy.requests import prepare
from proxy.requests.message_cache import MessageCache
from proxy.tokens import Tokens
from tests import transcripts
from tests.dialects.responses import converting
from tests.dialects.responses.api import ResponsesApi
from tests.transcripts import Run

LONG = 30_000

_reader = MessageCache(Tokens())


async def assert_taken(run: Run, policy: Policy) -> int:
    """Check every request of the run; returns how many of them were rewritten."""
    api, tools, before, events, changed = ResponsesApi(), converting.tools(run.tools), b"", 0, 0
    for messages, _ in transcripts.requests_of(run):
        body = {"model": "gpt-4o", "input": converting.items(messages), "tools": tools}
        request = RESPONSES.parse(json.dumps(body).encode())
        planned = await prepare.plan(RESPONSES, request, policy, None, _reader)
        assert planned is not None
        ready = prepare.rendered(planned, None, {}, _reader)
        sent = ready.turn().request() if ready.changed else request.body
        api.checked(json.loads(sent))
        items = b",".join([*map(bytes, ready.entries), b""])
        if len(ready.plan.events) == events:
            assert items.startswith(before)
        before, events = items, len(ready.plan.events)
        changed += ready.changed
    return changed


@transcripts.needed
async def test_requests_of_some_runs_are_taken() -> None:
    runs = list(islice(transcripts.load(LONG, "sweagent-claude35"), 1))
    assert [await assert_taken(run, Policy()) > 0 for run in runs] == [True]


@transcripts.needed
@pytest.mark.sweep
async def test_requests_of_all_runs_are_taken() -> None:
    policy = Policy(offload=Offload(mode=Mode.COMPACT, max_total_tokens=8_000, keep_recent_count=4))
    assert sum([await assert_taken(run, policy) for run in transcripts.load()]) > 1_000
