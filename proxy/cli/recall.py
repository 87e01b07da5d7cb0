"""`recall` and `mcp`: thin clients of the running proxy's operations, with the caller's own key."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx
import msgspec

from proxy.cli.words import harmless
from proxy.errors import ProxyError, UserMistake
from proxy.operations.schema import Envelope
from proxy.plan.prices import is_loopback

KEY = "OFFLOAD_API_KEY"

SECONDS = 120.0
"""Seconds for one call, in which a search may wait for its turn and for the store."""

WHOLE = 16 << 20
"""Characters of a text that are shown of it: the most that the proxy gives at once."""


class Caller:
    """Calls operations of the proxy at `url`, which may end in `/v1`. Raises UserMistake."""

    def __init__(self, url: str, key: str) -> None:
        try:
            host = urlsplit(url).hostname or ""
        except ValueError as error:
            raise UserMistake(f"--url {url}: {error}") from error
        self._environment = not is_loopback(host)  # whose proxies do not lead to this machine
        self._root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def __call__(self, path: bytes, given: bytes) -> Envelope:
        """Raises ProxyError if no proxy answers."""
        address = f"{self._root}{path.decode()}"
        try:
            async with httpx.AsyncClient(timeout=SECONDS, trust_env=self._environment) as client:
                reply = await client.post(address, content=given, headers=self._headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProxyError(
                f"no answer from {address}: {error or type(error).__name__}; is the proxy there?"
            ) from error
        try:
            return msgspec.json.decode(reply.content, type=Envelope)
        except ValueError as error:
            raise ProxyError(f"{address} answered {reply.status_code}, and not as an offload-proxy") from error


def key_of(environment: Mapping[str, str], *, ask: bool) -> str:
    """Return the caller's key, or the first line of standard input if we may `ask` and no terminal is there. Raises
    UserMistake."""
    key = environment.get(KEY, "")
    if ask and not key and not sys.stdin.isatty():
        key = sys.stdin.readline().strip()
    if not (key and key.isascii() and key.isprintable()):
        raise UserMistake(f"set {KEY} to the key with which your client calls the proxy")
    return key


def recall(url: str, key: str, path: str | None, session: str | None, pattern: str | None) -> int:
    """Write sessions, one session's texts, matching lines, or a whole text. Returns the exit code: 1 if nothing is
    there. Raises ProxyError."""
    given: dict[str, object] = {"session": session} if session else {}
    if path:
        operation, given = b"/recall_read", {"path": path, "characters": WHOLE}
    elif pattern:
        operation, given = b"/recall_search", {"pattern": pattern, "limit": 1_000, **given}
    else:
        operation, given = b"/recall_sessions", {"limit": 200, **given}
    reply = asyncio.run(Caller(url, key)(operation, msgspec.json.encode(given)))
    if not reply.success:
        raise ProxyError(reply.answer)
    text = reply.answer if path and not sys.stdout.isatty() else harmless(reply.answer)
    sys.stdout.write(text if path else f"{text}\n")
    return 0 if path or any(map(reply.metadata.get, ("matches", "sessions", "texts"))) else 1


def serve_mcp(url: str, key: str) -> None:
    """Serve an MCP client at standard input and output. Raises UserMistake without the library."""
    try:
        from proxy.operations import mcp
    except ModuleNotFoundError as error:
        raise UserMistake("this needs: pip install 'offload-proxy[mcp]'") from error
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(mcp.over_stdio(Caller(url, key)))
