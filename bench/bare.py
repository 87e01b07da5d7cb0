"""The baseline of the overhead benchmark: the simplest relay made of Starlette and the proxy's own
transport.

It collects the body, passes the headers on unchanged, and streams the reply. It has no tenants,
limits, error handling or metrics, and does not notice when a client leaves. Run `uvicorn
bench.bare:app`; BARE_UPSTREAM is the upstream.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from proxy.settings import Settings
from proxy.upstream import client
from proxy.upstream.headers import Headers

BASE = os.environ.get("BARE_UPSTREAM", "")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with client.UpstreamClient(Settings()) as app.state.upstream:
        yield


async def relay(request: Request) -> StreamingResponse:
    asked = client.UpstreamRequest(
        method=request.method,
        url=f"{BASE}{request.url.path}",
        headers=Headers(request.headers.raw).without((b"host",)),
        content=await request.body(),
        connect_timeout=5,
        first_byte_timeout=60,
        idle_timeout=60,
    )
    reply = await request.app.state.upstream.send(asked)
    response = StreamingResponse(reply, reply.status)
    response.raw_headers = reply.headers
    return response


app = Starlette(routes=[Route("/{path:path}", relay, methods=["POST"])], lifespan=lifespan)
