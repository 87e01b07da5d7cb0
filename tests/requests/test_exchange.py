"""The client's side: its body within limits, its target as written, and whether it is still
there."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import BodyTooLarge, MethodNotAllowed, Overloaded
from proxy.requests.exchange import WRITTEN, Account, ClientGone
from proxy.telemetry.outcome import Kind
from tests.asgi import ScriptedClient
from tests.clock import turns


@pytest.mark.parametrize(
    "pieces", [(b"abcdef",), (b"abc", b"def"), (b"", b"abc", b"", b"def", b"")]
)
async def test_read(pieces: tuple[bytes, ...]) -> None:
    assert await ScriptedClient(*pieces).client().read(6) == b"abcdef"
    with pytest.raises(BodyTooLarge):
        await ScriptedClient(*pieces).client().read(5)


async def test_an_endless_body_is_refused_when_it_is_too_large() -> None:
    exchange = ScriptedClient(b"abc", b"def", b"never read")
    exchange._incoming._queue.pop()  # type: ignore[attr-defined]
    with pytest.raises(BodyTooLarge):
        await exchange.client().read(5)


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
    client.admit([Account("acme", "this tenant's", 1)])
    client.close()
    assert (exchange.inflow.held, [one.name for one in exchange.inflow.admitted]) == (0, ["acme"])
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


async def test_who_serves_a_client_says_how_an_error_reads() -> None:
    exchange = ScriptedClient()
    client = exchange.client()
    client.fault_body = lambda error: error.message.upper().encode()
    await client.fail(MethodNotAllowed("post it"))
    headers = dict(exchange.headers)
    assert (exchange.status, headers[b"allow"], exchange.body) == (405, b"POST", b"POST IT")


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
        (
            b"/v1/models/gemini-pro:generateContent?key=SECRET",
            "/v1/models/gemini-pro:generateContent",
        ),
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
