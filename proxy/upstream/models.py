"""Reads an upstream's list of models, and asks for it using httpx.

Only deep health and `check --live` ask in this way; it is never part of a client's request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from proxy import __version__
from proxy.errors import UpstreamBroken, UpstreamSilent, UpstreamUnreachable
from proxy.upstream.client import Routes, certificates
from proxy.upstream.headers import Header

if TYPE_CHECKING:
    import httpx

LARGEST = 8 << 20
"""The most bytes of a list of models. The longest public lists have less than one MiB."""

_WINDOWS = ("max_model_len", "context_length", "context_window", "n_ctx", "n_ctx_train", "max_input_tokens")
"""Members in which servers give a model's context window: vLLM and SGLang, OpenRouter, Groq; llama.cpp in `meta`, where
`n_ctx` is the window in use and `n_ctx_train` the largest one that the model was trained for; and Anthropic."""


class ModelList(msgspec.Struct, frozen=True):
    """The reply to `GET /models`."""

    status: int
    windows: Mapping[str, int | None]
    """Each model's context window in tokens, or None if the reply does not give it."""


class ModelsClient:
    """Asks through the environment's proxies and with its certificates, without cookies, redirects or `.netrc`.

    Create it in a thread, because importing httpx and reading the certificates take long enough to hold up the event
    loop. Raises UserMistake if proxies or certificates cannot be used.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every request
        self._httpx = httpx
        self._routes = Routes(environment)
        self._certificates = certificates(environment)

    async def status(self, base_url: str, seconds: float) -> int:
        """Ask without anyone's key, and return the reply's status. Raises UpstreamFault."""
        return (await self._ask(base_url, (), seconds, read=False)).status

    async def models(self, base_url: str, headers: Iterable[Header], seconds: float) -> ModelList:
        """Return the models that upstream lists for the holder of the key in `headers`. Raises UpstreamFault."""
        return await self._ask(base_url, headers, seconds, read=True)

    async def _ask(self, base_url: str, headers: Iterable[Header], seconds: float, *, read: bool) -> ModelList:
        httpx, url = self._httpx, base_url.rstrip("/") + "/models"
        origin = url[: url.find("/", url.find("://") + 3)]
        try:
            async with (
                asyncio.timeout(seconds),
                self._client(origin, seconds) as client,
                client.stream("GET", url, headers=list(headers)) as reply,
            ):
                return ModelList(reply.status_code, windows(await _body(reply)) if read else {})
        except (TimeoutError, httpx.TimeoutException) as error:
            raise UpstreamSilent(f"no answer within {seconds:g} s") from error
        except (httpx.ConnectError, httpx.ProxyError) as error:
            raise UpstreamUnreachable("Upstream cannot be reached", detail=_detail(origin, error)) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UpstreamBroken("Upstream's reply cannot be read", detail=_detail(origin, error)) from error

    def _client(self, origin: str, seconds: float) -> httpx.AsyncClient:
        proxy = self._routes.to(origin)
        trusted = self._certificates if proxy is not None and proxy.scheme == "https" else None
        return self._httpx.AsyncClient(
            headers={"user-agent": f"offload-proxy/{__version__}"},
            verify=self._certificates,
            proxy=None if proxy is None else self._httpx.Proxy(str(proxy), ssl_context=trusted),
            timeout=seconds,
            trust_env=False,
        )


def _detail(origin: str, error: Exception) -> str:
    return f"{origin}: {type(error).__name__}: {error}"


async def _body(reply: httpx.Response) -> bytes:
    """Read the body. Raises UpstreamBroken if it is too large."""
    whole = bytearray()
    async for chunk in reply.aiter_bytes():
        whole += chunk
        if len(whole) > LARGEST:
            raise UpstreamBroken(f"The list of models is larger than {LARGEST} bytes")
    return bytes(whole)


def windows(body: bytes) -> Mapping[str, int | None]:
    """Return the models and their windows, or nothing if this is not a list of models."""
    try:
        page = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    models = page.get("data") if isinstance(page, dict) else None
    named = [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    return {model["id"]: _window(model) for model in named if isinstance(model.get("id"), str)}


def _window(model: Mapping[str, Any]) -> int | None:
    meta = model.get("meta")
    places = (model, meta) if isinstance(meta, dict) else (model,)
    found = (place.get(name) for name in _WINDOWS for place in places)
    return next((value for value in found if type(value) is int and value > 0), None)
