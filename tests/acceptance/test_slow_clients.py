"""slowhttptest (https://github.com/shekyan/slowhttptest, in Debian) against the server: the others
are served on.

It opens many connections that are slow in one way for some seconds, and asks on another one whether
the service is still available. We ask as well, all the time.
"""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest

from tests.clock import soon
from tests.serving import served
from tests.wire import ask, replying, upstream

pytestmark = pytest.mark.skipif(
    not shutil.which("slowhttptest"), reason="needs slowhttptest (Debian)"
)

CONNECTIONS, SECONDS = 200, 4

PROBE = 60
"""Seconds after which the tool says that the service is not available: more than its attack, as the
machine may be busy. Our own requests would wait for those of the attackers as well."""

SLOW = {
    "heads": ("-H", "-i", "1", "-t", "GET"),
    "bodies": ("-B", "-i", "1", "-s", "8192", "-t", "POST"),
    "readers": ("-X", "-w", "512", "-y", "1024", "-n", "1", "-z", "32"),
}

LARGE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (1 << 20, bytes(1 << 20))
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-other\r\n\r\n"
"""With a key, as the attackers have none: one caller has no more than a share of the places."""


async def test_slow_clients_keep_nobody_from_being_served() -> None:
    async with upstream(replying(LARGE)) as wire:
        with served({"default": {"upstream": {"base_url": wire.url + "/v1"}}}) as proxy:
            attacks = asyncio.gather(*(attack(proxy.port, way) for way in SLOW))
            served_meanwhile = 0
            while not attacks.done():
                assert (await soon(ask(proxy.port, GET))).status == 200
                served_meanwhile += 1
                await asyncio.sleep(0.02)
    assert served_meanwhile >= 1
    for report in attacks.result():
        states = re.findall(r"service available:\s*(\w+)", report)
        assert states and set(states) == {"YES"}, report[-2000:]
        opened = max(map(int, re.findall(r"connected:\s*(\d+)", report)))
        assert opened >= CONNECTIONS // 2, "it was an attack"


async def attack(port: int, way: str) -> str:
    """Return what slowhttptest says of an attack."""
    process = await asyncio.create_subprocess_exec(
        "slowhttptest",
        *SLOW[way],
        *("-c", str(CONNECTIONS), "-r", str(CONNECTIONS), "-l", str(SECONDS), "-p", str(PROBE)),
        *("-u", f"http://127.0.0.1:{port}/v1/models"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return re.sub(rb"\x1b\[[0-9;]*m", b"", said).decode("utf-8", "replace")
