"""Clients that soon give up on a silent stream, unmodified, behind hidden rounds that take longer:
they count what the proxy sends meanwhile as signs of life."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, Agent, codex
from tests.clients.apis import Asked, api
from tests.clients.tap import tap
from tests.clients.worker import write_logs
from tests.fake_upstream import Message, StrictUpstream, calls, text
from tests.serving import Proxy, tight

PATIENCE = 8
"""Seconds of silence after which Codex gives up here."""

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
[CLAUDE_CODE] = (agent for agent in AGENTS if agent.name == "claude_code")
ONE_CLAUDE = replace(CLAUDE_CODE, models={"claude-opus-5-5": "compact"}, limit=550)
"""It waits for 300 seconds at least, whatever `CLAUDE_STREAM_IDLE_TIMEOUT_MS` says, so its test
takes six minutes. Version 2.1.197 then hangs up and asks again if only comments and pings arrive;
version 2.1.330 waits on."""

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(
    ("agent", "rounds", "seconds"),
    [
        # The rounds together take longer than the client would wait in silence.
        pytest.param(CODEX, 4, 5, id="codex"),
        pytest.param(ONE_CLAUDE, 6, 55, id="claude_code", marks=pytest.mark.sweep),
    ],
)
async def test_hidden_rounds_are_no_silence(
    agent: Agent, rounds: int, seconds: int, tmp_path: Path, spawn: Callable[..., Proxy]
) -> None:
    if not agent.installed.exists():
        pytest.skip(f"{agent.name} is not installed: make test-clients")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    write_logs(tmp_path / "work")
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

    steps = agent.steps
    once = replace(agent, steps=lambda model, said: steps(model, said)[:1])
    with StrictUpstream(agent.rules) as upstream:
        # Thinking is shown, so it would be a sign of life, too.
        served = api(agent.api, answer, thinks=False)
        upstream.respond(served)
        proxy = spawn({"default": tight(upstream.url, tools={"inject": "agents"})})
        async with tap(proxy.port) as tapped:
            [said] = (await once.talk(tapped.port, tmp_path / "work")).values()
            asked = [one for one in await tapped.requests() if one.get("tools")]
    assert "The last word." in said
    assert len(turns) == rounds + 1, "one turn, which was not asked for again"
    assert len(asked) == 1
    assert served.refused == []
