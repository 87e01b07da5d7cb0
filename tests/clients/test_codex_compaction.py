"""Codex has its server compact: the proxy serves it, in front of an upstream that knows no
compaction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.agents import codex
from tests.clients.apis import Asked, api
from tests.clients.tap import tap
from tests.clients.worker import CODE, KEY, NEVER, write_logs
from tests.dialects.responses.api import ITEM_FIELDS
from tests.fake_upstream import Message, StrictUpstream
from tests.serving import Proxy, tight

STAMP = "internal_chat_message_metadata_passthrough"
"""What Codex writes on each item for OpenAI itself."""

AGENT = codex(
    "codex",
    {"gpt-5.5": "compact"},
    lambda path: ("exec_command", {"cmd": f"cat {path}"}),
    *("-c", "model_providers.offload.name='OpenAI'", "-c", "model_auto_compact_token_limit=14000"),
)

pytestmark = pytest.mark.clients


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    if not AGENT.installed.exists():
        pytest.skip("codex is not installed: make test-clients")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    write_logs(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("ceiling", [2_500, 30_000], ids=["results had moved", "nothing had moved"])
async def test_the_proxy_compacts_for_codex(
    workspace: Path, spawn: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, ceiling: int
) -> None:
    for kind, fields in ITEM_FIELDS.items():
        monkeypatch.setitem(ITEM_FIELDS, kind, fields | {STAMP})
    worker, seen = AGENT.worker(workspace), list[Asked]()

    def answer(asked: Asked) -> Message:
        seen.append(asked)
        return worker(asked)

    offload = {"max_total_tokens": ceiling, "max_tool_message_tokens": 400}
    with StrictUpstream() as upstream:
        upstream.respond(served := api("responses", answer))
        proxy = spawn({"default": tight(upstream.url, offload=offload, tools={"inject": "agents"})})
        async with tap(proxy.port) as tapped:
            [said] = (await AGENT.talk(tapped.port, workspace)).values()
    asked = [json.dumps(one["input"]) for one in await tapped.requests()]
    moved = any("(detailed result is stored in" in one.shown for one in seen)
    assert moved is (ceiling == 2_500)
    assert any('"compaction_trigger"' in one for one in asked) is not moved, (
        "what has moved leaves nothing to compact"
    )
    assert ('"compaction"' in asked[-1]) is not moved
    assert not [
        item for one in seen for item in one.history if "compaction" in item.get("type", "")
    ]
    assert served.refused == []
    assert said.split() == f"{CODE}, {KEY}, {NEVER}".split()
