"""Agents that rewrite their histories, unmodified, in each mode: what was moved, or said in the
middle, stays known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import AGENTS, Agent
from tests.clients.apis import Asked, api
from tests.clients.tap import tap
from tests.clients.worker import CODE, KEY, NEVER, REFERENCE, SNAPSHOT, Worker, is_work, write_logs
from tests.fake_upstream import Message, StrictUpstream
from tests.serving import Proxy, tight

TIGHT = {
    "keep_views": 1,
    "max_total_tokens": 2500,
    "max_tool_message_tokens": 400,
    "keep_recent_count": 2,
    "pin_user_tokens": 1000,
    "compress": {"wait": "always", "snapshot_tokens": 200},
}

# Those that are started most often take the longest, and come first, so that no core idles at the
# end.
pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize(
        "agent", sorted(AGENTS, key=lambda agent: -agent.starts), ids=lambda agent: agent.name
    ),
]


@pytest.fixture
def workspace(agent: Agent, tmp_path: Path) -> Path:
    """A directory of logs, next to a home."""
    if not agent.installed.exists():
        pytest.skip(f"{agent.name} is not installed: make test-clients")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    write_logs(tmp_path / "work")
    return tmp_path / "work"


async def test_the_agent_remembers(
    agent: Agent, workspace: Path, spawn: Callable[..., Proxy]
) -> None:
    """In each mode it ends with the word, the key and the rule, and sees nothing of how."""
    workers = {model: agent.worker(workspace) for model in agent.models}
    seen: list[Asked] = []

    def answer(asked: Asked) -> Message:
        seen.append(asked)
        said = workers[asked.model](asked)
        return said if agent.appends else identified(said, len(seen))

    with StrictUpstream(agent.rules) as upstream:
        upstream.respond(served := api(agent.api, answer))
        proxy = spawn({"default": policy(upstream.url, agent)})
        async with tap(proxy.port) as tapped:
            answers = await agent.talk(tapped.port, workspace)
        assert '"level":"error"' not in proxy.log()
    assert not [said for said in served.refused if "bound to a different conversation" not in said]
    for name, mode in agent.models.items():
        check(
            mode,
            [asked for asked in seen if asked.model == name and is_work(asked)],
            workers[name],
            agent.appends,
        )
        assert squeezed(f"{CODE}, {KEY}, {NEVER}") in squeezed(answers[name]), answers[name]
    assert (tapped.upgrades > 0) is agent.name.endswith("_websocket"), (
        "these go on over HTTP by themselves"
    )
    for request in await tapped.requests():
        assert "/context_store" not in json.dumps(request)


def identified(said: Message, number: int) -> Message:
    """The message with ids like OpenAI's: only by these, a reply is found whatever precedes it."""
    ids = [
        hashlib.sha256(b"%d %d" % (number, place)).hexdigest()[:24]
        for place in range(len(said.calls))
    ]
    return replace(
        said,
        calls=tuple((*call[:2], f"call_{id}") for call, id in zip(said.calls, ids, strict=True)),
    )


def check(mode: str, work: list[Asked], worker: Worker, appends: bool) -> None:
    """What upstream got: moved text, the rule always, hidden rounds again, and prefixes that only
    events change if the agent only appends to its history."""
    last = work[-1].shown
    assert REFERENCE.search(last) or SNAPSHOT in last
    assert (SNAPSHOT in last) is (mode == "compress") or mode == "auto"
    assert NEVER in last
    said = [asked for asked in work if NEVER in asked.shown]
    assert work[work.index(said[0]) :] == said
    for one, other in pairwise(work) if appends else ():
        before, after = steady(one), steady(other)
        assert changed(one) != changed(other) or after[: len(before)] == before
    if mode == "compact":
        assert worker.greps() == ["code word is", "bay key is"]


def steady(asked: Asked) -> list[Message]:
    """The history but for system messages behind its first one, as aider moves its reminder to the
    end of each request, for names, as Agent Framework gives one to replies of earlier turns, and
    for members without a value, as Codex sends them over HTTP."""
    kept = (
        each
        for place, each in enumerate(asked.history)
        if place == 0 or each.get("role") != "system"
    )
    return [
        {key: one for key, one in each.items() if key != "name" and one is not None}
        for each in kept
    ]


def squeezed(output: str) -> str:
    """The text without spaces: terminals wrap it."""
    return "".join(output.split())


def changed(asked: Asked) -> tuple[list[str], str]:
    """What only an event changes: the references, and the snapshot."""
    return REFERENCE.findall(asked.shown), asked.shown.partition(SNAPSHOT)[2].partition(
        "</state_snapshot>"
    )[0]


def policy(url: str, agent: Agent) -> dict[str, Any]:
    """One proxy for all modes: the model's name chooses."""
    rules = [{"model": model, "offload": {"mode": mode}} for model, mode in agent.models.items()]
    offload = {**TIGHT, "results": list(agent.results)}
    return tight(url, offload=offload, tools={"inject": "agents"}, rules=rules)
