"""The routes below `/_offload/`: static files, the login, and what the pages ask for as JSON.

Whoever calls these has passed the check of `Host` and `Origin`, which the application makes for all
of them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from proxy.apps.dashboard import VALID, VALID_BY_LINK, Dashboard, Viewer, WayIn
from proxy.apps.dashboard.describe import KINDS
from proxy.apps.dashboard.queries import Reader, Wanted
from proxy.apps.dashboard.rows import Row
from proxy.apps.dashboard.savings import priced, savings
from proxy.errors import (
    BodyTooLarge,
    ClientFault,
    DashboardFault,
    Forbidden,
    NotThere,
    ProxyError,
    Unauthorized,
)
from proxy.release import version
from proxy.server.access import bearer

LARGEST_FORM = 4_096
"""Most bytes of a login."""

TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8",
         "svg": "image/svg+xml"}  # fmt: skip
"""What is served, by the ends of names, and its type."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

WITH_TOKEN = """<form method="post" action="login"><h2>Operator</h2>
<label for="token">Admin token (OFFLOAD_ADMIN_TOKEN)</label>
<input id="token" name="token" type="password" autocomplete="current-password" required>
<button>Log in</button></form>"""

WITHOUT_TOKEN = """<section><h2>Operator</h2><p>{way}</p>
<p>To log in again and again, start the proxy with OFFLOAD_ADMIN_TOKEN.</p></section>"""

WAYS = {
    WayIn.LINK: "Open the link that the proxy printed when it started. It opens once.",
    WayIn.NONE: "No link is left: the printed one has been used, or none was printed, as by "
    "<code>offload-proxy run</code> without a terminal. The proxy prints one when it starts again.",
    WayIn.OFF: "The dashboard is off. <code>offload-proxy serve --dashboard FILE</code> turns it on; if it was on, "
    "the proxy's log says why it is off.",
}
"""What the operator does without a token."""

USED = "This link has been used, or a later start of the proxy printed another one."


def routes(dashboard: Dashboard) -> Sequence[Route]:
    """Return the routes."""
    pages = _Pages(dashboard)
    reads = _reads(dashboard)
    answers: dict[str, Callable[[Request, Viewer], Awaitable[Any]]] = {
        "me": pages.me,
        "health": pages.health,
    }
    answers |= {path: partial(pages.read, read) for path, read in reads.items()}
    return [
        Route("/_offload/", pages.index),
        Route("/_offload/static/{name:path}", pages.static),
        Route("/_offload/login", pages.login, methods=["GET", "POST"]),
        Route("/_offload/logout", pages.logout, methods=["POST"]),
        *(
            Route(f"/_offload/api/{path}", partial(pages.answer, answer))
            for path, answer in answers.items()
        ),
    ]


class _Pages:
    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._access = dashboard.access

    # -- pages --

    async def index(self, request: Request) -> Response:
        if self._access.viewer(request.cookies.get(self._access.cookie_name, "")) is None:
            return RedirectResponse("login", 303, HEADERS)
        return _static("index.html")

    async def static(self, request: Request) -> Response:
        return _static(request.path_params["name"])

    async def login(self, request: Request) -> Response:
        """Show the form, or check what it sent, or the code of a link, and set the cookie."""
        # as link checkers ask
        code = request.query_params.get("once", "") if request.method != "HEAD" else ""
        if request.method != "POST" and not code:
            return await self._form("", 200)
        form = {} if code else await _form(request)
        valid = VALID_BY_LINK if code else VALID
        try:
            cookie = self._access.cookie(await self._let_in(code, form), valid)
        except ProxyError as error:
            return await self._form(error.message, max(error.status, 403))
        response = RedirectResponse("./", 303, HEADERS)
        secure = request.headers.get("origin", "").startswith("https://")
        response.set_cookie(
            self._access.cookie_name,
            cookie,
            max_age=valid,
            path="/_offload/",
            secure=secure,
            httponly=True,
            samesite="strict",
        )
        return response

    async def _let_in(self, code: str, form: Mapping[str, str]) -> Viewer:
        """Return whom the code of a link or what a form sent lets in. Raises ProxyError."""
        token = form.get("token", "")
        if code and not await self._dashboard.opens(code):
            raise Unauthorized(USED)
        if token and not self._access.is_admin(token):
            raise Unauthorized("This is not the admin token.")
        return Viewer() if code or token else await self._dashboard.owner(form.get("key", ""))

    async def _form(self, said: str, status: int) -> Response:
        way = await self._dashboard.way_in()
        operator = WITH_TOKEN if way is WayIn.TOKEN else WITHOUT_TOKEN.format(way=WAYS[way])
        page = _contents()["login.html"].decode().format(said=escape(said), operator=operator)
        return Response(page, status, HEADERS, TYPES["html"])

    async def logout(self, request: Request) -> Response:
        response = RedirectResponse("login", 303, HEADERS)
        response.delete_cookie(
            self._access.cookie_name, path="/_offload/", httponly=True, samesite="strict"
        )
        return response

    # -- data --

    async def answer(
        self, answer: Callable[[Request, Viewer], Awaitable[Any]], request: Request
    ) -> Response:
        """Answer with JSON, or with an error of ours."""
        try:
            body = await answer(request, await self._viewer(request))
            status = 200
        except ProxyError as error:
            body = {"error": {"message": error.message}}
            status = error.status
        return Response(msgspec.json.encode(body), status, HEADERS, "application/json")

    async def _viewer(self, request: Request) -> Viewer:
        """Return who asks, by a valid cookie or else by bearer token. Raises ProxyError."""
        if viewer := self._access.viewer(request.cookies.get(self._access.cookie_name, "")):
            return viewer
        token = bearer(request.headers)
        if self._access.is_admin(token):
            return Viewer()
        if not token:
            raise Unauthorized("Log in at /_offload/login")
        return await self._dashboard.owner(token)

    async def read(self, read: _Read, request: Request, viewer: Viewer) -> Any:
        return await self._dashboard.read(lambda reader: read(reader, request), viewer)

    async def me(self, request: Request, viewer: Viewer) -> Any:
        state = self._dashboard.state()
        if not viewer.operator:
            state = {"off": state["off"], "fault": state["fault"] and "ask whoever runs the proxy"}
        others: list[Row] = []
        with suppress(DashboardFault):
            others = await self._dashboard.read(Reader.replicas, viewer)
        return {
            "operator": viewer.operator,
            "namespace": viewer.namespace,
            "logged_in": self._access.cookie_name in request.cookies,
            "version": version(),
            "worker": os.getpid(),
            "replica": self._dashboard.replica,
            "replicas": others,
            "kinds": KINDS,
            **state,
        }

    async def health(self, request: Request, viewer: Viewer) -> Any:
        if not viewer.operator:
            raise Forbidden("This page is the operator's: log in with the admin token")
        return await self._dashboard.health()


# -- what pages read --

_Read = Callable[[Reader, "Request"], Any]


def _reads(dashboard: Dashboard) -> Mapping[str, _Read]:
    """Return what pages read, by its path."""
    price = dashboard.price

    def request(reader: Reader, asked: Request) -> Row:
        """Return one request with its messages, and with their texts where that is still
        allowed."""
        id = asked.path_params["id"]
        found = reader.request(int(id)) if re.fullmatch("[0-9]{1,18}", id) else None
        if found is None:
            raise NotThere("Nothing is kept of this request")
        if found["detail"] and not dashboard.shows_content(found["tenant"]):
            messages = [{**one, "about": ""} for one in found["detail"]["messages"]]
            found["detail"] |= {"messages": messages, "texts": {}, "snapshot": None}
        return {**found, "price": price(found["tenant"], found["model"])}

    return {
        "requests": lambda reader, asked: reader.requests(_wanted(asked)),
        "requests/{id}": request,
        "latency": lambda reader, asked: reader.latency(_wanted(asked)),
        "names": lambda reader, asked: reader.names(),
        "savings": lambda reader, asked: savings(
            reader, asked.query_params.get("period", ""), time.time(), price
        ),
        "sessions": lambda reader, asked: priced(reader.sessions(_wanted(asked)), price),
        "sessions/{session}": lambda reader, asked: reader.session(asked.path_params["session"]),
    }


def _wanted(request: Request) -> Wanted:
    """Return which rows a page asks for. Raises ClientFault."""
    try:
        return msgspec.convert(dict(request.query_params), Wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ClientFault(str(error)) from error


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a posted form. Raises BodyTooLarge."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise BodyTooLarge(f"The form is larger than {LARGEST_FORM} bytes")
    return {name: values[-1] for name, values in parse_qs(body.decode("latin-1")).items()}


def _static(name: str) -> Response:
    if name not in _contents():
        raise NotThere("There is no such file")
    return Response(_contents()[name], 200, HEADERS, TYPES[name.rpartition(".")[2]])


@cache
def _contents() -> dict[str, bytes]:
    """Return every static file by its name."""
    found = (files("proxy.apps.dashboard") / "static").iterdir()
    return {file.name: file.read_bytes() for file in found if file.name.rpartition(".")[2] in TYPES}
