"""The MCP server, driven by the protocol's own client: over streamable HTTP at the proxy, and over
stdio."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.acceptance.test_archive import FACT, LOGS, Kept, kept
from tests.apps.operations.test_recall import NOBODYS
from tests.clock import PATIENCE, until
from tests.serving import Proxy

pytestmark = pytest.mark.skipif(not find_spec("mcp"), reason="the package mcp is not installed")

__all__ = ["kept"]

Connect = Callable[[Proxy, str], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def over_http(proxy: Proxy, key: str) -> AsyncIterator[Any]:
    import httpx2
    import mcp
    from mcp.client.streamable_http import streamable_http_client

    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE, trust_env=False) as http:
        transport = streamable_http_client(f"{proxy.root}/_offload/mcp", http_client=http)
        async with mcp.Client(transport) as client:
            yield client


@asynccontextmanager
async def over_stdio(proxy: Proxy, key: str) -> AsyncIterator[Any]:
    import mcp

    command = ["-m", "proxy", "mcp", "--url", proxy.url]
    environment = {**os.environ, "OFFLOAD_API_KEY": key}
    parameters = mcp.StdioServerParameters(command=sys.executable, args=command, env=environment)
    async with mcp.Client(mcp.stdio_client(parameters)) as client:
        yield client


def said(result: Any) -> str:
    [content] = result.content
    return str(content.text)


@pytest.mark.parametrize("connect", [over_http, over_stdio])
async def test_a_client_finds_and_reads_what_was_moved(kept: Kept, connect: Connect) -> None:
    async with connect(kept.proxy, "alice") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        sessions = said(await client.call_tool("recall_sessions", {}))
        found = said(await client.call_tool("grep", {"pattern": "vault"}))
        text = await client.call_tool("read_file", {"absolute_path": kept.reference})
    assert set(tools) == {"recall_sessions", "grep", "read_file"}
    assert tools["grep"].input_schema["required"] == ["pattern"]
    for tool in tools.values():
        Draft202012Validator.check_schema(tool.input_schema)
    Draft202012Validator(tools["read_file"].input_schema).validate(
        {"absolute_path": {"path": kept.reference}}
    )
    assert (
        "Look into the logs." in sessions
        and FACT in found
        and kept.reference.rpartition("/")[2] in found
    )
    assert said(text) == dict(LOGS)["/logs/0.log"] and not text.is_error


async def test_what_a_model_sends_counts_before_our_defaults(kept: Kept) -> None:
    async with over_http(kept.proxy, "alice") as client:
        files = await client.call_tool("grep", {"pattern": "vault", "archive": False})
        everything = said(
            await client.call_tool("grep", {"pattern": "nothing happened", "limit": None})
        )
        page = said(
            await client.call_tool(
                "read_file", {"absolute_path": kept.reference, "characters": 1_000}
            )
        )
    assert "No matches found" in said(files)
    assert everything.count("nothing happened") <= 52 and "there are more" in everything, (
        "50 by default"
    )
    assert len(page) <= 1_000 and "continue with read_file(" in page


async def test_another_key_gets_the_words_for_what_never_existed(kept: Kept) -> None:
    async with over_http(kept.proxy, "mallory") as client:
        answers = [
            await client.call_tool("read_file", {"absolute_path": path})
            for path in (kept.reference, NOBODYS)
        ]
        found = said(await client.call_tool("grep", {"pattern": "vault"}))
    assert all(answer.is_error for answer in answers) and FACT not in found
    assert said(answers[0]).replace(kept.reference, "PATH") == said(answers[1]).replace(
        NOBODYS, "PATH"
    )


async def test_a_wrong_call_is_an_error_that_the_model_can_read(kept: Kept) -> None:
    async with over_http(kept.proxy, "alice") as client:
        wrong = await client.call_tool("grep", {"pattern": "("})
        unknown = await client.call_tool("store_forget", {})
    assert wrong.is_error and "`$.pattern` cannot be used" in said(wrong)
    assert unknown.is_error and "store_forget" in said(unknown)


async def test_many_clients_at_once(kept: Kept) -> None:
    async def found(key: str) -> str:
        async with over_http(kept.proxy, key) as client:
            return said(await client.call_tool("grep", {"pattern": "vault"}))

    answers = await asyncio.gather(*(found(key) for key in ("alice", "mallory") * 4))
    assert [FACT in answer for answer in answers] == [True, False] * 4


@pytest.mark.parametrize(
    ("method", "key", "body", "status"),
    [
        ("POST", "", b"{}", 401),
        ("GET", "", b"", 401),
        ("GET", "alice", b"", 405),
        ("DELETE", "alice", b"", 405),
        ("POST", "alice", b"{", 400),
        ("POST", "alice", b"x" * (2 << 20), 413),
    ],
)
def test_what_is_no_message_is_refused(
    kept: Kept, method: str, key: str, body: bytes, status: int
) -> None:
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    url = f"{kept.proxy.root}/_offload/mcp"
    reply = httpx.request(method, url, content=body, headers=headers, trust_env=False)
    assert reply.status_code == status, reply.text


async def test_each_call_is_logged_as_its_operation(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with over_http(kept.proxy, "alice") as client:
        await client.call_tool("grep", {"pattern": "secret words"})
    await until(lambda: "path='/grep'" in str([vars(one) for one in caplog.records]))
    assert not [
        one
        for one in caplog.records
        if one.name.startswith("proxy") and "secret words" in str(vars(one))
    ]
    assert kept.proxy.metric("requests_total", 'kind="operation"')


def test_without_the_extra_the_answer_says_what_to_install(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "proxy.apps.operations.mcp", None)
    reply = kept.proxy.post("/_offload/mcp", {}, "alice")
    assert reply.status_code == 501 and "pip install '.[mcp]'" in reply.text
