"""Real, unmodified clients, each in an environment of its own. `make test-clients` installs and runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients import running
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.model import LOGS, REFERENCE, Reader, called, log, ours, results
from tests.clients.tap import tap
from tests.fake_upstream import StrictUpstream
from tests.serving import Proxy, tight

NEEDLE = "heliotrope-7291"
TASK = f"Read the logs part0.log to part{LOGS - 1}.log, one after the other, and tell me the code word."
TIGHT = {"keep_views": 1, "max_total_tokens": 1500, "max_tool_message_tokens": 600}

pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name),
]


@pytest.fixture
def workspace(client: Client, tmp_path: Path) -> Path:
    """A directory of logs for the client to work in, next to its home."""
    if not client.installed.exists():
        pytest.skip(f"{client.name} is not installed: make test-clients")
    workspace = tmp_path / "work"
    workspace.mkdir()
    for number in range(LOGS):
        (workspace / f"part{number}.log").write_text(log(number, f"the code word is {NEEDLE}"))
    return workspace


@pytest.fixture
def model(client: Client, workspace: Path) -> Reader:
    return Reader(client.tool, client.arguments, workspace, client.finish)


async def test_the_client_works_through_the_proxy(
    client: Client, workspace: Path, model: Reader, spawn: Callable[..., Proxy]
) -> None:
    with StrictUpstream(client.rules) as upstream:
        upstream.respond(model)
        proxy = spawn({"default": tight(upstream.url, offload=TIGHT, tools={"inject": "agents"})})
        async with tap(proxy.port) as tapped:
            output = await run(client, tapped.port, workspace)
    assert '"level":"error"' not in proxy.log()
    last, shown = upstream.chats[-1], await tapped.requests()
    assert NEEDLE in output

    # Compacted, and read back: the needle occurs only in the answers of our tools. Each tool was called once, and later
    # requests contain its answer again.
    assert any(REFERENCE.search(result) for result in results(last.messages))
    read_back = [(name, call) for name, call in called(last.messages) if name in ours(last.tool_names)]
    answers = {call for _, call in read_back}
    others = {call for _, call in called(last.messages)} - answers
    assert any(NEEDLE in result for result in results(last.messages, answers))
    assert not any(NEEDLE in result for result in results(last.messages, others))
    assert [name for name, _ in read_back] == [*ours(last.tool_names)]
    assert [model.calls_of(name) for name in ours(last.tool_names)] == [1, 1]

    # The client saw only what is its own.
    assert [name for name, _ in called(shown[-1]["messages"])] == [client.tool] * LOGS
    assert not any(REFERENCE.search(result) for request in shown for result in results(request["messages"]))
    assert "/context_store" not in output
    assert len(shown) < len(upstream.chats)
    assert all(bool(request.get("stream")) is client.streams for request in shown)


async def run(client: Client, port: int, workspace: Path) -> str:
    return await running.run((*client.command, TASK), port, workspace, client.environment)
