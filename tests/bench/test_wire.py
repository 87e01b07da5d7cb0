"""The client of the benchmarks uses its connection again, as the clients of agents do."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from bench import bodies
from bench.wire import Client, Replying


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_keeps_its_connection(stream: bool) -> None:
    opened = Mock(side_effect=Replying)

    async def ask() -> None:
        server = await asyncio.get_running_loop().create_server(opened, "127.0.0.1")
        client = Client(server.sockets[0].getsockname()[1])
        for number in range(3):
            await client.ask(bodies.request(bodies.small(number, stream=stream)))
        client.close()
        server.close()

    asyncio.run(ask())
    assert opened.call_count == 1
