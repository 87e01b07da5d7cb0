"""The connections that the pool keeps: which of them is used next, and whether it still can be."""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    import ssl

    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.http_parser import RawResponseMessage
    from aiohttp.streams import StreamReader
    from aiohttp.tracing import Trace


_HEAD_LIMIT = 256 * 1024
"""Bytes in one line of a reply's head. Gateways in front of models send more than aiohttp's default of 8 KiB."""

_MAX_HEADERS = 1_000

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


_anew = ContextVar("anew", default=False)
"""Whether those that idle are left to others."""


class Exhausted(aiohttp.ClientError):
    """All connections stayed in use for as long as a request may take to be connected."""


class KeptConnection(ResponseHandler):
    """A connection that may carry several requests, one after the other."""

    used = False
    """Whether it has carried one."""
    _poll: Callable[[int], list[Any]] | None = None
    _failed_on = b""
    """What had arrived when the connection failed."""

    def data_received(self, data: bytes) -> None:
        ResponseHandler.data_received(self, data)
        if self._exception is not None:
            self._failed_on = data

    def expect_reply(self, method: str) -> None:
        """Make a parser for the reply to a request with this method."""
        self.set_response_params(
            skip_payload=method == "HEAD",
            read_until_eof=True,
            auto_decompress=False,
            max_line_size=_HEAD_LIMIT,
            max_field_size=_HEAD_LIMIT,
            max_headers=_MAX_HEADERS,
        )

    def whole_reply(self, method: str) -> tuple[RawResponseMessage, StreamReader] | None:
        """Return the reply that arrived in one piece with bytes behind it that are none, or None. The parser fails on
        these, and drops what stood before them."""
        self.expect_reply(method)
        data, start = self._failed_on, 0
        with suppress(HttpProcessingError):
            while end := _BLANK_LINE.search(data, start):
                messages = self._parser.feed_data(data[start : end.end()])[0]  # type: ignore[union-attr]
                start = end.end()
                if messages and messages[-1][0].code >= 200:
                    message, content = messages[-1]
                    with suppress(HttpProcessingError):
                        self._parser.feed_data(data[start:])  # type: ignore[union-attr]
                    return (message, content) if content.is_eof() else None
        return None

    def fit(self) -> bool:
        """Return whether a used connection can carry another request: not if upstream has closed it, or has sent bytes
        of its own accord, which would be taken for the reply."""
        if self.should_close:
            return False
        try:
            begun = self._parser is None or self._parser.feed_eof() is not None
        except HttpProcessingError:
            begun = True
        return not begun and not self.unread()

    def unread(self) -> bool:
        """Return whether bytes, or the end, have arrived that the event loop has not read yet. Asks the system, as
        urllib3 and httpcore do before they use a connection again."""
        if self._poll is None:
            self._poll = _poll(self.transport)
        return bool(self._poll(0))


class Connector(aiohttp.TCPConnector):
    """Makes and keeps connections. Of those that idle it takes the one that was used last, as Go and urllib3 do:
    upstream is the least likely to close it just now, and those that are not needed grow old."""

    def __init__(self, *, limit: int, keepalive: float, ssl: ssl.SSLContext) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive, ssl=ssl)
        self._factory = partial(KeptConnection, loop=self._loop)  # type: ignore[assignment]
        self._keepalive = keepalive

    @property
    def exhausted(self) -> bool:
        """Whether all connections are in use."""
        return len(self._acquired) >= self.limit

    async def connect_anew(
        self, req: aiohttp.ClientRequest, traces: list[Trace], limits: aiohttp.ClientTimeout
    ) -> Connection:
        """Return a new connection, as `connect` returns any."""
        token = _anew.set(True)
        try:
            return await self.connect(req, traces, limits)
        finally:
            _anew.reset(token)

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        idle = None if _anew.get() else self._conns.get(key)
        while idle:
            kept, since = idle.pop()
            if not idle:
                del self._conns[key]
            if kept.fit() and monotonic() - since <= self._keepalive:  # type: ignore[attr-defined]
                self._acquired.add(kept)
                return Connection(self, key, kept, self._loop)
            kept.close()
        return None


def _poll(transport: asyncio.BaseTransport | None) -> Callable[[int], list[Any]]:
    """Return a function that waits for so many milliseconds until there is something to read, or the end."""
    socket = None if transport is None else transport.get_extra_info("socket")
    if socket is None or not hasattr(select, "poll"):  # as on Windows
        return lambda _: []
    made = select.poll()
    made.register(socket.fileno(), select.POLLIN)
    return made.poll
