"""The recorded runs, written as chat and as Responses, are planned alike: the same events, nearly the same tokens."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest

from proxy.core.history import History, Reading, Terms
from proxy.core.plan import Room
from proxy.core.policy import Mode, Offload
from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.responses import RESPONSES
from proxy.tokens import Tokens
from tests import transcripts
from tests.dialects.responses import converting
from tests.transcripts import Run

LONG = 60_000
"""Tokens of runs that have events under the default policy."""

_tokens = Tokens()


def history(dialect: Dialect, body: dict[str, object], offload: Offload) -> History:
    request = dialect.parse(json.dumps(body).encode())
    count = lambda text: _tokens.count(text, "")  # noqa: E731 - as the cache of messages passes it
    messages = [dialect.read(raw, Reading.of(offload), count) for raw in request.entries]
    return History.beginning(Terms("m", offload, Room(), 0)).extended(messages)


def assert_planned_alike(run: Run, mode: Mode) -> int:
    """Compare the plans; returns the number of their events."""
    offload = Offload(mode=mode)
    chat = history(CHAT, {"model": "m", "messages": run.messages}, offload)
    body = {"model": "m", "input": converting.items(run.messages), "tools": converting.tools(run.tools)}
    responses = history(RESPONSES, body, offload)
    assert responses.tokens == pytest.approx(chat.tokens, rel=0.02)
    assert len(responses.plan().events) == len(chat.plan().events)
    if not any(one["role"] == two["role"] == "assistant" for one, two in pairwise(run.messages)):
        # Items of two replies that follow each other cannot be told apart, so there they are one.
        assert responses.plan().events == chat.plan().events
        assert responses.plan().moves == chat.plan().moves
        assert responses.plan().boundaries == chat.plan().boundaries
        assert responses.plan().live == pytest.approx(chat.plan().live, rel=0.02)
    return len(chat.plan().events)


@transcripts.needed
def test_some_runs_are_planned_alike() -> None:
    runs = list(islice(transcripts.load(LONG, "sweagent-claude35"), 2))
    assert [assert_planned_alike(run, Mode.AUTO) > 0 for run in runs] == [True] * 2


@transcripts.needed
@pytest.mark.sweep
@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.COMPRESS, Mode.AUTO])
def test_all_runs_are_planned_alike(mode: Mode) -> None:
    assert sum(assert_planned_alike(run, mode) for run in transcripts.load()) > 50
