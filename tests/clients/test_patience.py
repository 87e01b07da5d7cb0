"""Clients that soon give up on a silent stream, unmodified, behind a model that thinks or hidden
rounds that take longer: they count what the proxy sends meanwhile as signs of life."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, Agent, codex
from tests.clients.apis import Asked, api
from tests.clients.tap import tap
from tests.clients.worker import write_logs
from tests.fake_upstream import (
    Message,
    Pieces,
    Recorded,
    Reply,
    Responder,
    StrictUpstream,
    calls,
    text,
)
from tests.serving import Proxy, tight

PATIENCE = 8
"""Seconds of silence after which Codex and the AI SDK give up here."""

CODEX = codex(
    "codex",
    {"gpt-5.5": "compact"},
    lambda path: ("exec_command", {"cmd": f"cat {path}"}),
    *("-c", f"model_providers.offload.stream_idle_timeout_ms={PATIENCE}000"),
    *(
        "-c",
        "model_providers.offload.stream_max_retries=0",
        "-c",
        "model_providers.offload.request_max_retries=0",
    ),
)


def ai_sdk(name: str, model: str, *timeouts: str) -> Agent:
    """The AI SDK, asked once, with this patience in place of Node's 300 seconds."""
    [agent] = (agent for agent in AGENTS if agent.name == f"ai_sdk_{name}")
    return replace(
        agent,
        models={model: "compact"},
        steps=lambda model, said: [(json.dumps({model: said[:1]}),)],
        settings=dict.fromkeys(timeouts, f"{PATIENCE}000"),
    )


BYTES = "BYTES_TIMEOUT_MS"
CONTENT = "CONTENT_TIMEOUT_MS"
"""The AI SDK's own time-out. It counts text and thinking, and no sign of life."""

[CLAUDE_CODE] = (agent for agent in AGENTS if agent.name == "claude_code")
ONE_CLAUDE = replace(CLAUDE_CODE, models={"claude-opus-5-5": "compact"}, limit=550)
"""It waits for 300 seconds at least, whatever `CLAUDE_STREAM_IDLE_TIMEOUT_MS` says, so its tests
take six minutes each. Version 2.1.197 then hangs up and asks again if only comments and pings
arrive; version 2.1.330 waits on."""

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(
    ("agent", "rounds", "seconds"),
    [
        # The rounds together take longer than the client would wait in silence.
        pytest.param(CODEX, 4, 5, id="codex"),
        pytest.param(ai_sdk("chat", "gpt-4.1", BYTES), 4, 5, id="ai_sdk_chat"),
        pytest.param(ai_sdk("responses", "gpt-4.1", BYTES), 4, 5, id="ai_sdk_responses"),
        pytest.param(ai_sdk("messages", "claude-opus-5-5", BYTES), 4, 5, id="ai_sdk_messages"),
        pytest.param(ONE_CLAUDE, 6, 55, id="claude_code", marks=pytest.mark.sweep),
    ],
)
async def test_hidden_rounds_are_no_silence(
    agent: Agent, rounds: int, seconds: int, tmp_path: Path, spawn: Callable[..., Proxy]
) -> None:
    turns: list[Asked] = []

    def answer(asked: Asked) -> Message:
        ours = next((name for name in asked.tools if name in ("grep", "offload_grep")), None)
        if ours is None:
            return text("A title.")
        turns.append(asked)
        time.sleep(seconds if len(turns) > 1 else 0)  # the first one begins the stream
        return (
            calls((ours, {"pattern": f"word {len(turns)}"}))
            if len(turns) <= rounds
            else text("The last word.")
        )

    # Thinking is shown, so it would be a sign of life, too.
    served = api(agent.api, answer, thinks="")
    await finishes(agent, served, tmp_path, spawn)
    assert len(turns) == rounds + 1, "one turn, which was not asked for again"
    assert served.refused == []


@pytest.mark.parametrize(
    ("agent", "pause"),
    [
        # The model thinks in 13 pieces, for longer than the client would wait for the first word.
        pytest.param(CODEX, 1.5, id="codex"),
        pytest.param(ai_sdk("responses", "gpt-5.5", CONTENT), 1.5, id="ai_sdk_responses"),
        pytest.param(ai_sdk("messages", "claude-opus-5-5", CONTENT), 1.5, id="ai_sdk_messages"),
        pytest.param(ONE_CLAUDE, 26, id="claude_code", marks=pytest.mark.sweep),
    ],
)
async def test_thinking_is_no_silence(
    agent: Agent, pause: float, tmp_path: Path, spawn: Callable[..., Proxy]
) -> None:
    served = api(agent.api, lambda asked: text("The last word."), thinks="I think." * 13)

    def slowly(request: Recorded) -> Reply:
        reply = served(request)
        if not (request.json if request.body else {}).get("stream"):
            return reply
        assert isinstance(reply, Pieces)
        events = b"".join(piece for piece in reply.pieces if isinstance(piece, bytes))
        paused = [
            piece
            for event in events.removesuffix(b"\n\n").split(b"\n\n")
            for piece in (event + b"\n\n", pause if b"I think." in event else 0)
        ]
        return replace(reply, pieces=paused)

    await finishes(agent, slowly, tmp_path, spawn)
    assert served.refused == []


async def finishes(
    agent: Agent,
    answers: Responder,
    folder: Path,
    spawn: Callable[..., Proxy],
) -> None:
    """Run the agent with its first prompt, before an upstream that answers so, to its only
    reply."""
    if not agent.installed.exists():
        pytest.skip(f"{agent.name} is not installed: make test-clients")
    for name in ("home", "work"):
        (folder / name).mkdir()
    write_logs(folder / "work")
    steps = agent.steps
    once = replace(agent, steps=lambda model, said: steps(model, said)[:1])
    with StrictUpstream(agent.rules) as upstream:
        upstream.respond(answers)
        proxy = spawn({"default": tight(upstream.url, tools={"inject": "agents"})})
        async with tap(proxy.port) as tapped:
            [said] = (await once.talk(tapped.port, folder / "work")).values()
            asked = [one for one in await tapped.requests() if one.get("tools")]
    assert "The last word." in said
    assert len(asked) == 1, "one turn, which was not asked for again"
