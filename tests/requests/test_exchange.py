"""The client's side: its body within limits, its target as written, and whether it is still there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.errors import BodyTooLarge, MethodNotAllowed, Overloaded, UpstreamUnreachable
from proxy.requests.exchange import WRITTEN, ClientGone
from proxy.telemetry.outcome import Kind
from tests.asgi import ScriptedClient
from tests.clock import turns


@pytest.mark.parametrize(
    ("scope", "target", "path"),
    [
        ({}, b"/v1/x", b"/v1/x"),
        ({"query_string": b"a=1"}, b"/v1/x?a=1", b"/v1/x"),
    ],
)
def test_target(scope: dict[str, Any], target: bytes, path: bytes) -> None:
    client = ScriptedClient(**scope).client()
    assert (client.target, client.path) == (target, path)


@pytest.mark.parametrize("pieces", [(b"abcdef",), (b"abc", b"def"), (b"", b"abc", b"", b"def", b"")])
async def test_read(pieces: tuple[bytes, ...]) -> None:
    assert await ScriptedClient(*pieces).client().read(6) == b"abcdef"
    with pytest.raises(BodyTooLarge):
        await ScriptedClient(*pieces).client().read(5)


async def test_an_announced_size_is_enough_to_refuse() -> None:
    """Not a byte of the body is asked for, so that `Expect: 100-continue` is not answered."""
    with pytest.raises(BodyTooLarge):
        await ScriptedClient(headers=[(b"content-length", b"7")]).client().read(6)


async def test_an_endless_body_is_refused_when_it_is_too_large() -> None:
    exchange = ScriptedClient(b"abc", b"def", b"never read")
    exchange._incoming._queue.pop()  # type: ignore[attr-defined]
    with pytest.raises(BodyTooLarge):
        await exchange.client().read(5)


async def test_no_body() -> None:
    for headers in ([], [(b"content-length", b"0")]):
        assert await ScriptedClient(headers=headers).client().read(0) == b""


async def test_gone_while_it_sends() -> None:
    exchange = ScriptedClient(b"abc", b"more")
    exchange._incoming._queue.pop()  # type: ignore[attr-defined]
    exchange.hang_up()
    with pytest.raises(ClientGone):
        await exchange.client().read(100)


async def test_a_piece_is_not_lost_when_waiting_for_it_is_cancelled() -> None:
    exchange = ScriptedClient(b"one", b"two")
    exchange._incoming._queue.pop()  # type: ignore[attr-defined]
    body = await exchange.client().body()
    assert not isinstance(body, bytes)
    assert await anext(body) == b"one"
    waiting = asyncio.ensure_future(anext(body))
    await turns()
    waiting.cancel()
    await asyncio.wait([waiting])
    exchange.say(b"two", more=False)
    assert [piece async for piece in body] == [b"two"]


async def test_present_ends_with_the_client() -> None:
    exchange = ScriptedClient()
    client = exchange.client()
    await client.body()
    with pytest.raises(ClientGone), client.present():
        exchange.hang_up()
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert client.gone and task and not task.cancelling()


async def test_a_fault_of_the_body_ends_it() -> None:
    exchange = ScriptedClient(b"abc", b"more")
    client = exchange.client()
    exchange.inflow.fault = Overloaded("too much", retry_after=1)
    with pytest.raises(Overloaded):
        await client.read(100)
    assert client.broken is exchange.inflow.fault


async def test_a_large_piece_is_written_in_parts() -> None:
    exchange = ScriptedClient()
    client = exchange.client()
    whole = bytes(range(256)) * (WRITTEN // 100)
    await client.start(200, [])
    await client.write(whole)
    await client.finish(whole)
    assert exchange.body == whole * 2 and exchange.complete
    assert max(len(message["body"]) for message in exchange.messages[1:]) == WRITTEN


async def test_the_end_of_a_request_lets_go_of_its_body() -> None:
    exchange = ScriptedClient(b"abc")
    client = exchange.client()
    client.hold(5)
    client.charge("acme")
    client.close()
    assert (exchange.inflow.held, exchange.inflow.charged) == (0, "acme")
    assert "extensions" not in exchange.scope


async def test_present_lets_a_cancellation_from_elsewhere_through() -> None:
    async def work() -> None:
        client = ScriptedClient().client()
        await client.body()
        with client.present():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_present_leaves_no_watcher() -> None:
    exchange = ScriptedClient()
    client = exchange.client()
    await client.body()
    with client.present():
        pass
    await turns()
    assert not exchange.inflow.watching and asyncio.all_tasks() == {asyncio.current_task()}


async def test_fail() -> None:
    exchange = ScriptedClient()
    client = exchange.client()
    await client.fail(Overloaded("full", retry_after=3))
    headers = dict(exchange.headers)
    assert (exchange.status, headers[b"retry-after"], client.status) == (503, b"3", 503)
    assert headers[b"x-request-id"] == client.request_id.encode()
    assert int(headers[b"content-length"]) == len(exchange.body)
    assert json.loads(exchange.body)["error"]["message"] == "full"


async def test_who_serves_a_client_says_how_an_error_reads() -> None:
    exchange = ScriptedClient()
    client = exchange.client()
    client.fault_body = lambda error: error.message.upper().encode()
    await client.fail(MethodNotAllowed("post it"))
    headers = dict(exchange.headers)
    assert (exchange.status, headers[b"allow"], exchange.body) == (405, b"POST", b"POST IT")


async def test_outcome() -> None:
    client = ScriptedClient().client()
    began = client.outcome("relay", "acme", "acme-1")
    assert (began.kind, began.tenant, began.namespace, began.path, began.status) == (
        "relay",
        "acme",
        "acme-1",
        "/v1/x",
        0,
    )
    client.sent = client.began + 1
    await client.start(204, [])
    ended = client.completed(began, "broken")
    assert (ended.status, ended.fault, ended.added_seconds) == (204, "broken", 1)
    assert ended.seconds == round(ended.seconds, 6), "to the microsecond"
    assert ended.first_byte_seconds is not None and 0 < ended.first_byte_seconds <= ended.seconds


async def test_who_leaves_behind_the_last_byte_stops_nothing() -> None:
    exchange = ScriptedClient(b"{}")
    client = exchange.client()
    await client.read(10)
    with client.present():
        await client.start(200, [])
        await client.finish(b"all")
        exchange.hang_up()
        await turns()
    assert (client.gone, client.replied) == (False, True)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (b"/v1/chat/completions", "/v1/chat/completions"),
        (b"/v1/models/gemini-pro:generateContent?key=SECRET", "/v1/models/gemini-pro:generateContent"),
        (b"/v1/chat/completions;x", "/v1/chat/*"),
        (b"/v1;key=SECRET/chat/completions", "/*/chat/completions"),
        (b"/v1/models%3Bkey%3DSECRET", "/v1/*"),
        (b"/v1/key=SECRET/models", "/v1/*/models"),
        (b"/https://user:SEC@RET@host/v1", "/https://*/v1"),
        (b"/v1/\xe9\xff", "/v1/*"),
        (b"*", "*"),
    ],
)
def test_a_path_is_shown_without_what_may_be_a_key(target: bytes, shown: str) -> None:
    path, _, query = target.partition(b"?")
    browser = ScriptedClient(raw_path=path, query_string=query)
    assert browser.client().shown_path == shown
    assert browser.client().outcome(Kind.RELAY).path == shown


@pytest.mark.parametrize(
    ("client", "headers", "told"),
    [
        (("127.0.0.1", 1), [], True),
        (("::ffff:127.0.0.1", 1), [], True),
        (("10.0.0.2", 1), [], False),
        (("127.0.0.1", 1), [(b"x-forwarded-for", b"10.0.0.2")], False),
        (("127.0.0.1", 1), [(b"via", b"1.1 nginx")], False),
        (None, [], False),
    ],
)
async def test_only_callers_on_this_machine_learn_upstreams_address(
    client: tuple[str, int] | None, headers: list[tuple[bytes, bytes]], told: bool
) -> None:
    asked = ScriptedClient(b"", headers=headers, client=client)
    await asked.client().fail(UpstreamUnreachable("No.", detail="http://10.0.0.1: refused"))
    assert (b"10.0.0.1: refused" in asked.body) is told and b"No." in asked.body
