"""What monitors ask: `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.server.access import require_monitor
from proxy.server.parts import Part
from proxy.server.process import Process


class Monitor(Part):
    """The pages for monitors of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._networks = [*map(ip_network, process.settings.monitor_networks)]
        self.pages = [Route("/health", self._health), Route("/metrics", self._metrics)]

    async def _health(self, request: Request) -> Response:
        if request.query_params.get("deep", "") in ("", "0", "false"):
            return JSONResponse({"status": "healthy"})
        self._check(request)
        healthy, page = await self._process.health()
        return JSONResponse(page, 200 if healthy else 503)

    async def _metrics(self, request: Request) -> Response:
        self._check(request)
        self._process.flush()
        kind, page = await asyncio.to_thread(self._process.metrics.render)
        return Response(page, media_type=kind)

    def _check(self, request: Request) -> None:
        token = self._process.settings.admin_token or ""
        require_monitor(request, token, self._networks, self._process.check_origin)
