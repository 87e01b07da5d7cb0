"""Asks upstreams for their lists of models, which often name the context windows. No request waits for an answer.

A list is asked for once with each credential: a tenant's key, or the key that callers send themselves. What a caller's
own key brings counts for that caller's namespace alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol

from proxy.dialects.messages import MESSAGES
from proxy.errors import ProxyError, UpstreamBroken
from proxy.lru import Lru
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy
from proxy.telemetry import logs
from proxy.upstream import models
from proxy.upstream.client import UpstreamReply, UpstreamRequest, decoded
from proxy.upstream.headers import Headers, url_for

if TYPE_CHECKING:
    from proxy.requests.background import Background
    from proxy.threads import WorkPool

log = logging.getLogger(__name__)

SECONDS = 5.0
"""The most seconds for one question and its answer."""

AGAIN = 600.0
"""Seconds after which an upstream that did not answer is asked again."""

QUESTIONS = 10_000
"""The most credentials for which it is remembered that their list was asked for."""

WINDOWS = 200_000
"""The most windows that are remembered. The longest public lists name some 500."""

LARGE = 32 << 10
"""The most bytes of a list that are parsed on the event loop."""


Source = tuple[str, str]
"""An upstream, and whose credential it gets: that of a caller, named by the namespace, or a tenant's, of which only
Python's salted hash is kept."""


class Sender(Protocol):
    """Sends requests upstream, as `UpstreamClient` does."""

    async def send(self, request: UpstreamRequest) -> UpstreamReply: ...


class ListedWindows:
    """The windows in the lists of all upstreams, as far as they have been asked.

    `learned` is called for every list that names windows.
    """

    def __init__(
        self,
        upstream: Sender,
        background: Background,
        reading: WorkPool,
        learned: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._background = background
        self._reading = reading
        self._learned = learned
        self._clock = clock
        self._asked: Lru[Source, float] = Lru(QUESTIONS)
        """Source → when to ask again."""
        self._windows: Lru[Source, Mapping[str, int]] = Lru(WINDOWS)

    def ask(self, tenant: Tenant, headers: Headers) -> None:
        """Ask the upstream of this request, in the background, unless that was done or the policy needs no answer.

        `tenant` has the policy for the request's model, and `headers` are the request's.
        """
        upstream = tenant.policy.upstream
        if not upstream.ask_models or upstream.context_window is not None:
            return
        source = _source(tenant.namespace, tenant.policy)
        again = self._asked.get(source)
        if again is not None and self._clock() < again:
            return
        fetch = partial(self._fetch, source, tenant, headers)
        if self._background.start(f"models of {source[0]} for {source[1]}", fetch):
            self._asked.put(source, self._clock() + AGAIN)

    def window(self, namespace: str, policy: Policy, model: str) -> int | None:
        """Return the window that upstream's list gives for this model, or None if it is not known."""
        if not policy.upstream.ask_models:
            return None
        return (self._windows.get(_source(namespace, policy)) or {}).get(model)

    async def _fetch(self, source: Source, tenant: Tenant, headers: Headers) -> None:
        base_url = tenant.policy.upstream.base_url
        request = UpstreamRequest(
            method="GET",
            url=_address(base_url, headers),
            headers=Headers((*_credentials(tenant, headers), (b"accept", b"application/json"))),
            content=b"",
            connect_timeout=SECONDS,
            first_byte_timeout=SECONDS,
            idle_timeout=SECONDS,
        )
        try:
            async with asyncio.timeout(SECONDS):
                body = await self._body(request)
        except (ProxyError, TimeoutError) as error:
            logs.event(log, "no list of models", upstream=base_url, tenant=tenant.name, reason=str(error) or "silence")
            return
        self._asked.put(source, float("inf"))
        read = partial(models.windows, body)
        listed = await self._reading.run(tenant.namespace, read) if len(body) > LARGE else read()
        windows = {model: window for model, window in listed.items() if window is not None}
        self._windows.put(source, windows, len(windows) + 1)
        logs.event(
            log, "list of models", upstream=base_url, tenant=tenant.name, models=len(listed), windows=len(windows)
        )
        if windows:
            self._learned()

    async def _body(self, request: UpstreamRequest) -> bytes:
        """Return the list's bytes, or none if upstream has no list for us. Raises ProxyError."""
        whole = bytearray()
        async with aclosing(await self._upstream.send(request)) as reply:
            if reply.status >= 500 or reply.status in (408, 429):  # it may have a list for us later
                raise UpstreamBroken(f"Upstream answered {reply.status}")
            if reply.status != 200:
                return b""
            async with aclosing(decoded(reply)) as chunks:
                async for chunk in chunks:
                    whole += chunk
                    if len(whole) > models.LARGEST:
                        raise UpstreamBroken(f"The list of models is larger than {models.LARGEST} bytes")
        return bytes(whole)


def _source(namespace: str, policy: Policy) -> Source:
    upstream = policy.upstream
    if upstream.api_key is None:
        return upstream.base_url, namespace
    return upstream.base_url, f"tenant {policy.tenant}, key {hash(upstream.api_key):x}"


def _address(base_url: str, headers: Headers) -> str:
    """Return where the list is. Anthropic's has pages."""
    if MESSAGES.owns(b"", headers.names()):
        return url_for(base_url, b"/v1/models?limit=1000", anthropic=True)
    return url_for(base_url, b"/v1/models")


def _credentials(tenant: Tenant, headers: Headers) -> Headers:
    """Return the headers by which upstream knows the caller, and the API that it speaks with it."""
    own = tenant.credential(tenant.policy.upstream, anthropic=MESSAGES.owns(b"", headers.names()))
    kept = (MESSAGES.version_header,) if own is not None else (*KEY_HEADERS, MESSAGES.version_header)
    found = headers.only(kept)
    return found if own is None else Headers((own, *found))
