"""The dashboard as a part of a process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from proxy.apps.dashboard import Dashboard, pages
from proxy.requests.exchange import Exchange
from proxy.requests.prepared import Prepared
from proxy.server.parts import Part
from proxy.server.process import Process
from proxy.telemetry.logs import Limited
from proxy.telemetry.outcome import Outcome
from proxy.threads import running

logger = logging.getLogger(__name__)


class Board(Part):
    """Shows the requests of one process, and those of other replicas."""

    def __init__(self, process: Process) -> None:
        self._dashboard = Dashboard(process.settings, process.policies, process.state)
        self._store = process.services.store.store
        self.pages = [Route("/", _open), *pages.routes(self._dashboard)]

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        self._dashboard.record(outcome, prepared)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._dashboard.start()
        try:
            async with running(self._dashboard.exchange(self._store, Limited(logger))):
                yield
        finally:
            self._dashboard.close()


async def _open(request: Request) -> Response:
    return RedirectResponse("/_offload/")
