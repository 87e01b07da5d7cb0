"""The benchmark of requests that nothing is done about: its relay relays, and its figures compare what it says."""

from __future__ import annotations

import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from bench import passing
from tests.wire import OK, replying, upstream


@pytest.mark.parametrize("messages", passing.SIZES.values(), ids=passing.SIZES)
def test_bodies_have_the_sizes_that_they_are_called(messages: int) -> None:
    body = passing.body(messages, stream=False)
    size = {4: 1_000, 430: 100_000, 4_300: 1_000_000}[messages]
    assert 0.9 < len(body) / size < 1.1
    texts = {message["content"] for message in json.loads(body)["messages"]}
    assert len(texts) == messages and {len(text) for text in texts} == {passing.CHARACTERS}


async def test_the_relay_relays() -> None:
    async with (
        upstream(replying(OK)) as wire,
        TestClient(TestServer(passing.relay(wire.url))) as client,
        client.post("/v1/x?a=1", data=b"body", headers={"X-A": "1"}) as reply,
    ):
        assert (reply.status, await reply.read()) == (200, b"ok")
    [asked] = wire.requests
    assert (asked.target, asked.body, asked.get(b"x-a")) == (b"/v1/x?a=1", b"body", [b"1"])


def test_shares_are_of_the_same_turn(capsys: pytest.CaptureFixture[str]) -> None:
    passing.show(
        "1 KB, plain", {passing.RELAY: [(0.001, 0.001), (0.004, 0.001)], "ours": [(0.002, 0.001), (0.008, 0.001)]}
    )
    _, ours = capsys.readouterr().out.splitlines()
    assert "share 0.50" in ours and "share 1.00" in ours
