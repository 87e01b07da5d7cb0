"""Codex's built-in provider tries WebSocket first, whatever the server: it goes on over HTTP, and
logs one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.agents import codex
from tests.clients.apis import api
from tests.clients.tap import tap
from tests.clients.test_codex_compaction import STAMP
from tests.dialects.responses.api import ITEM_FIELDS
from tests.fake_upstream import StrictUpstream, text
from tests.serving import Proxy

BUILT_IN = replace(
    codex("codex", {"gpt-5.5": "compact"}, lambda path: ("exec_command", {"cmd": f"cat {path}"})),
    home=lambda port: {".codex/config.toml": f'openai_base_url = "http://127.0.0.1:{port}/v1"'},
    settings={"CODEX_API_KEY": "a-key"},
)

pytestmark = pytest.mark.clients


async def test_codex_goes_on_over_http(
    tmp_path: Path, spawn: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not BUILT_IN.installed.exists():
        pytest.skip("codex is not installed: make test-clients")
    for kind, fields in ITEM_FIELDS.items():
        monkeypatch.setitem(ITEM_FIELDS, kind, fields | {STAMP})
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    with StrictUpstream() as upstream:
        upstream.respond(api("responses", lambda asked: text("Hello there.")))
        proxy = spawn({"default": {"upstream": {"base_url": upstream.url}}})
        async with tap(proxy.port) as tapped:
            [answer] = (await BUILT_IN.talk(tapped.port, tmp_path / "work")).values()
    assert answer.strip() == "Hello there."
    starts = BUILT_IN.starts
    assert (tapped.upgrades, len(await tapped.requests())) == (starts, starts), (
        "one try at each start"
    )
