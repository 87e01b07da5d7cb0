"""`recall` and `mcp`: thin clients of the running proxy's operations, with the caller's own key.

Without a key, `recall` shows what this user's runs of `offload-proxy run` moved, for which it
starts a proxy. With a namespace, it calls the operations itself, over the store.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from proxy import policies, rawjson
from proxy.apps.offline import opened
from proxy.apps.operations import look
from proxy.apps.operations.call import CallerFiles
from proxy.apps.operations.schema import Envelope
from proxy.apps.run import archive
from proxy.errors import ProxyError, UserMistake
from proxy.policies.tenants import Tenant, policy_of
from proxy.policy import Policy
from proxy.release import install
from proxy.settings import Settings
from proxy.stores import is_part
from proxy.stores.guarded import Guarded
from proxy.terminal import harmless
from proxy.threads import WorkPool
from proxy.upstream.client import certificates
from proxy.upstream.routes import Routes, origin_of

P = ParamSpec("P")
T = TypeVar("T")

Ask = Callable[[bytes, bytes], Coroutine[Any, Any, Envelope]]

KEY = "OFFLOAD_API_KEY"

SECONDS = 120.0
"""Seconds for one call, in which a search may wait for its turn and for the store."""

WHOLE = 16 << 20
"""Characters of a text that are shown of it: the most that the proxy gives at once."""


def _key(settings: Settings) -> str:
    """Return the caller's key; without a variable, the first line of standard input, if no terminal
    is there."""
    key = settings.environment.get(KEY, "")
    return key or ("" if sys.stdin.isatty() else sys.stdin.readline().strip())


def _caller(settings: Settings, url: str | None, key: str) -> Ask:
    """Return what calls operations of the proxy at `url`, which may end in `/v1`, with the caller's
    key.

    Raises UserMistake; calls raise ProxyError if no proxy answers.
    """
    url = url or f"http://127.0.0.1:{settings.port}"
    try:
        urlsplit(url)
        way = Routes(settings.environment).to(origin_of(url))
    except ValueError as error:
        raise UserMistake(f"--url {url}: {error}") from error
    trusted = certificates(settings.environment)
    if not (key and key.isascii() and key.isprintable()):
        raise UserMistake(f"set {KEY} to the key with which your client calls the proxy")
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def call(path: bytes, given: bytes) -> Envelope:
        address = f"{url.rstrip('/').removesuffix('/v1')}{path.decode()}"
        try:
            async with httpx.AsyncClient(
                timeout=SECONDS, proxy=str(way) if way else None, verify=trusted, trust_env=False
            ) as client:
                reply = await client.post(address, content=given, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProxyError(
                f"no answer from {address}: {error or type(error).__name__}; is the proxy there?"
            ) from error
        try:
            return msgspec.json.decode(reply.content, type=Envelope)
        except ValueError as error:
            raise ProxyError(
                f"{address} answered {reply.status_code}, and not as an offload-proxy"
            ) from error

    return call


class StoreCall:
    """A look into one namespace of the store, by whoever may open that."""

    def __init__(self, tenant: Tenant, shelf: CallerFiles) -> None:
        self.tenant = tenant
        self.shelf = shelf

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(work, *args, **kwargs)

    async def search(self, work: Callable[[], None]) -> None:
        await asyncio.to_thread(work)

    async def written(self) -> bool:
        return False


def _owner(settings: Settings, namespace: str) -> Ask:
    """Return what calls operations for this namespace over the store. Raises UserMistake; calls
    raise ProxyError."""
    if not is_part(namespace):
        raise UserMistake(
            f"--namespace {namespace!r}: expected a namespace, as `store ls` lists them"
        )
    loaded = policies.load(settings.policies, settings.environment)
    tenant = Tenant(policy_of(namespace, loaded) or Policy(), namespace, listed=True)

    def warn(kind: str, text: str) -> None:
        sys.stderr.write(f"offload-proxy: {harmless(text)}\n")

    async def call(path: bytes, given: bytes) -> Envelope:
        async with opened(settings) as store:
            visit = Guarded(store, warn=warn).visit(SECONDS)
            threads = WorkPool("recall")
            try:
                shelf = CallerFiles(visit, namespace, tenant.policy, threads)
                reply = await look(path, StoreCall(tenant, shelf), given)
            finally:
                threads.close()
        return msgspec.json.decode(reply, type=Envelope)

    return call


def recall(settings: Settings, chosen: Namespace) -> int:
    """Write sessions, one session's texts, matching lines, or a whole text. Returns the exit code:
    1 if nothing is there. Raises UserMistake and ProxyError."""
    path = chosen.path
    session = chosen.session
    pattern = chosen.grep
    if path and (session or pattern):
        raise UserMistake("give a PATH, or --session and --grep")
    if chosen.namespace and chosen.url:
        raise UserMistake("give --url for a running proxy, or --namespace for the store itself")
    if session and not re.fullmatch(r"[0-9a-f]{1,16}", session):
        raise ProxyError(f"no session begins with {session}")
    given: dict[str, object] = {"session": session} if session else {}
    if path:
        operation = b"/read_file"
        given = {"absolute_path": path, "characters": WHOLE}
    elif pattern:
        operation = b"/grep"
        given = {"pattern": pattern, "archive": True, **given}
    else:
        operation = b"/recall_sessions"
        given = {"limit": 200, **given}
    with ExitStack() as held:
        if chosen.namespace:
            ask = _owner(settings, chosen.namespace)
        else:
            url = chosen.url
            key = _key(settings)
            if url is None and not key:
                url, key = held.enter_context(archive(settings))
            ask = _caller(settings, url, key)
        reply = asyncio.run(ask(operation, rawjson.encode(given)))
    if not reply.success:
        raise ProxyError(reply.answer)
    text = reply.answer if path and not sys.stdout.isatty() else harmless(reply.answer)
    sys.stdout.write(text if path else f"{text}\n")
    return 0 if path or any(map(reply.metadata.get, ("matches", "sessions", "texts"))) else 1


def mcp(settings: Settings, chosen: Namespace) -> int:
    """Serve an MCP client at standard input and output. Raises UserMistake without the library."""
    try:
        from proxy.apps.operations.mcp import over_stdio
    except ModuleNotFoundError as error:
        raise UserMistake(f"this needs: {install('mcp')}") from error
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(over_stdio(_caller(settings, chosen.url, settings.environment.get(KEY, ""))))
    return 0
