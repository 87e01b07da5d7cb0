"""The routes below `/_offload/`: static files, the login, and what the pages ask for as JSON.

Whoever calls these has passed the check of `Host` and `Origin`, which the application makes for all of them.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from proxy import __version__
from proxy.dashboard import COOKIE, VALID, VALID_BY_LINK, Viewer
from proxy.dashboard.describe import KINDS
from proxy.dashboard.queries import PERIODS, Reader, Wanted
from proxy.dashboard.rows import DAY, Row
from proxy.errors import BodyTooLarge, ClientFault, DashboardFault, Forbidden, NotThere, ProxyError, Unauthorized
from proxy.telemetry.outcome import Basis, Holdout, Kind

if TYPE_CHECKING:
    from starlette.requests import Request

    from proxy.dashboard import Dashboard

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

WITH_LINK = """<section><h2>Operator</h2><p>Open the link that <code>offload-proxy serve</code> printed when it
started. It opens once. To log in again and again, start the proxy with OFFLOAD_ADMIN_TOKEN.</p></section>"""

USED = "This link has been used, or a later start of the proxy printed another one."

Price = Callable[[str, str], float | None]
"""Returns the money for a million plain input tokens, for a tenant and a model, if its policy says."""


def routes(dashboard: Dashboard) -> Sequence[Route]:
    """Return the routes."""
    pages, reads = _Pages(dashboard), _reads(dashboard)
    answers: dict[str, Callable[[Request, Viewer], Awaitable[Any]]] = {"me": pages.me, "health": pages.health}
    answers |= {path: partial(pages.read, read) for path, read in reads.items()}
    return [
        Route("/_offload/", pages.index),
        Route("/_offload/static/{name:path}", pages.static),
        Route("/_offload/login", pages.login, methods=["GET", "POST"]),
        Route("/_offload/logout", pages.logout, methods=["POST"]),
        *(Route(f"/_offload/api/{path}", partial(pages.answer, answer)) for path, answer in answers.items()),
    ]


class _Pages:
    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._access = dashboard.access

    # -- pages --

    async def index(self, request: Request) -> Response:
        if self._access.viewer(request.cookies.get(COOKIE, "")) is None:
            return RedirectResponse("login", 303, HEADERS)
        return _static("index.html")

    async def static(self, request: Request) -> Response:
        return _static(request.path_params["name"])

    async def login(self, request: Request) -> Response:
        """Show the form, or check what it sent, or the code of a link, and set the cookie."""
        code = request.query_params.get("once", "") if request.method != "HEAD" else ""  # as link checkers ask
        if request.method != "POST" and not code:
            return self._form("", 200)
        form = await _form(request) if request.method == "POST" else {}
        valid, opens, namespace = VALID, False, None
        if code:
            valid, opens, said = VALID_BY_LINK, await self._dashboard.opens(code), USED
        elif token := form.get("token", ""):
            opens, said = self._access.is_admin(token), "This is not the admin token."
        else:
            try:
                namespace, said = await self._dashboard.known(form.get("key", ""))
            except DashboardFault as fault:
                said = str(fault)
            opens = namespace is not None
        cookie = self._access.cookie(namespace, valid) if opens else None
        if cookie is None:
            return self._form(said, 403)
        response = RedirectResponse("./", 303, HEADERS)
        secure = request.headers.get("origin", "").startswith("https://")
        response.set_cookie(
            COOKIE, cookie, max_age=valid, path="/_offload/", secure=secure, httponly=True, samesite="strict"
        )
        return response

    def _form(self, said: str, status: int) -> Response:
        operator = WITH_TOKEN if self._access.token else WITH_LINK
        page = _contents()["login.html"].decode().format(said=escape(said), operator=operator)
        return Response(page, status, HEADERS, TYPES["html"])

    async def logout(self, request: Request) -> Response:
        response = RedirectResponse("login", 303, HEADERS)
        response.delete_cookie(COOKIE, path="/_offload/", httponly=True, samesite="strict")
        return response

    # -- data --

    async def answer(self, answer: Callable[[Request, Viewer], Awaitable[Any]], request: Request) -> Response:
        """Answer with JSON, or with an error of ours."""
        try:
            viewer = await self._viewer(request)
            body, status = _json(await answer(request, viewer)), 200
        except DashboardFault as fault:
            body, status = _json({"error": {"message": str(fault)}}), 503
        except ProxyError as error:
            body, status = _json({"error": {"message": error.message}}), error.status
        return Response(body, status, HEADERS, "application/json")

    async def _viewer(self, request: Request) -> Viewer:
        """Return who asks, by a valid cookie or else by bearer token. Raises Unauthorized and DashboardFault."""
        if viewer := self._access.viewer(request.cookies.get(COOKIE, "")):
            return viewer
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._access.is_admin(token):
            return Viewer()
        namespace, _ = await self._dashboard.known(token) if token else (None, "")
        if not namespace:
            raise Unauthorized("Log in at /_offload/login")
        return Viewer(namespace)

    async def read(self, read: _Read, request: Request, viewer: Viewer) -> Any:
        return await self._dashboard.read(lambda reader: read(reader, viewer.namespace, request), viewer)

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
            "logged_in": COOKIE in request.cookies,
            "version": __version__,
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

_Read = Callable[[Reader, str | None, "Request"], Any]
"""Returns what a page shows of a namespace, or of all."""


def _reads(dashboard: Dashboard) -> Mapping[str, _Read]:
    price = dashboard.price

    def request(reader: Reader, own: str | None, asked: Request) -> Row:
        """Return one request with its messages, and with their texts where that is still allowed."""
        id = asked.path_params["id"]
        found = reader.request(int(id), own) if re.fullmatch("[0-9]{1,18}", id) else None
        if found is None:
            raise NotThere("Nothing is kept of this request")
        if found["detail"] and not dashboard.shows_content(found["tenant"]):
            messages = [{**one, "about": ""} for one in found["detail"]["messages"]]
            found["detail"] |= {"messages": messages, "texts": {}, "snapshot": None}
        return found

    def savings(reader: Reader, own: str | None, asked: Request) -> Row:
        period = asked.query_params.get("period", "")
        return savings_page(period if period in PERIODS else "month", time.time(), own, price, reader)

    return {
        "requests": lambda reader, own, asked: reader.requests(own, _wanted(asked)),
        "requests/{id}": request,
        "latency": lambda reader, own, asked: reader.latency(own, _wanted(asked)),
        "names": lambda reader, own, asked: reader.names(own),
        "savings": savings,
        "sessions": lambda reader, own, asked: _priced(reader.sessions(own, _wanted(asked)), price),
        "sessions/{session}": lambda reader, own, asked: reader.session(asked.path_params["session"], own),
    }


def savings_page(period: str, now: float, namespace: str | None, price: Price, reader: Reader) -> Row:
    """Return what a period's requests came to. It begins with a whole minute, hour or day (UTC), as sums do."""
    seconds, span = PERIODS[period]
    since = (now - seconds) // span * span
    sums = reader.sums(since, span, namespace)
    best, worst = reader.extremes(since, namespace)
    long = DAY if seconds > DAY else span  # sums of hours are not kept for two weeks
    earlier = [one for one in reader.course(since - seconds, long, namespace) if one["time"] < since // long * long]
    again = [one for one in sums if one["kind"] == Kind.VERIFY]
    asked = sum(one["requests"] - one["faults"] for one in again)
    same = ("again_tools", "again_exact", "whole_tools", "whole_exact")
    missed = _added((one for one in sums if one["miss"]), ("tenant", "model", "miss"), ("requests", "missed_tokens"))
    return {
        "since": since,
        "now": now,
        "span": span,
        "models": _models(sums, price),
        "course": reader.course(since, span, namespace),
        "before": {name: sum(one[name] for one in earlier) for name in ("tokens_before", "tokens_after")},
        "sessions": reader.losses(since, namespace),
        "best": _priced(best, price),
        "worst": _priced(worst, price),
        "verified": {"asked": asked, **{name: sum(one[name] for one in again) for name in same}},
        "misses": sorted(missed, key=lambda row: -row["missed_tokens"]),
        "groups": compared(reader.groups(since, namespace), sums),
    }


_PLANNED = (Kind.OFFLOADED, Kind.UNTOUCHED)
_MODELS: Mapping[str, tuple[str, Sequence[Kind]]] = {
    "requests": ("requests", (*_PLANNED, Kind.OBSERVED)),
    "faults": ("faults", (*_PLANNED, Kind.OBSERVED)),
    "tokens_before": ("tokens_before", _PLANNED),
    "tokens_after": ("tokens_after", _PLANNED),
    "retrieved_tokens": ("retrieved_tokens", _PLANNED),
    "rewritten": ("requests", (Kind.OFFLOADED,)),
    "billed": ("billed", (Kind.OFFLOADED,)),
    "losses": ("losses", (Kind.OFFLOADED,)),
    "expected": ("cost_before", (Kind.OFFLOADED,)),
    "actual": ("cost_after", (Kind.OFFLOADED,)),
    "summaries": ("cost_after", (Kind.SUMMARY,)),
    "summary_calls": ("requests", (Kind.SUMMARY,)),
    "observed": ("requests", (Kind.OBSERVED,)),
    "observed_before": ("tokens_before", (Kind.OBSERVED,)),
    "observed_after": ("tokens_after", (Kind.OBSERVED,)),
    "observed_cost_before": ("cost_before", (Kind.OBSERVED,)),
    "observed_cost_after": ("cost_after", (Kind.OBSERVED,)),
}
"""What the page says of a tenant's model: the sum of a column over requests of some kinds. Costs are of the input, in
plain input tokens. What we spent ourselves is in the actual cost, and summaries beside it."""


def _models(sums: Iterable[Row], price: Price) -> list[Row]:
    """Return a row for each tenant and model, the largest first."""
    amounts = []
    for one in sums:
        one["billed"] = one["requests"] if one["usage"] == Basis.BILLED else 0
        counted = {name: one[column] if one["kind"] in kinds else 0 for name, (column, kinds) in _MODELS.items()}
        amounts.append({"tenant": one["tenant"], "model": one["model"], **counted})
    rows = _priced(_added(amounts, ("tenant", "model"), tuple(_MODELS)), price)
    for row in rows:
        row["saved"] = row["expected"] - row["actual"] - row["summaries"]
    return sorted(rows, key=lambda row: (-row["expected"], -row["tokens_before"], row["tenant"], row["model"]))


def compared(groups: Iterable[Row], sums: Iterable[Row]) -> list[Row]:
    """Return what conversations really cost in each group of a holdout, by tenant and model.

    Only requests of which upstream said what it counted are in the costs, and summaries count for the planned ones. If
    another model made them, it is not known for which conversations: they count in proportion to the costs.
    """
    found = {(one["tenant"], one["model"], one["holdout"]): {**one, "billed": 0, "cost": 0} for one in groups}
    others = Counter[str]()
    for one in sums:
        summary = one["kind"] == Kind.SUMMARY
        row = found.get((one["tenant"], one["model"], Holdout.PLANNED if summary else one["holdout"]))
        if row and (summary or one["usage"] == Basis.BILLED):
            row["billed"] += 0 if summary else one["requests"]
            row["cost"] += one["cost_before"] if one["holdout"] == Holdout.KEPT else one["cost_after"]
        elif summary:
            others[one["tenant"]] += one["cost_after"]
    for tenant, cost in others.items():
        planned = [row for row in found.values() if (row["tenant"], row["holdout"]) == (tenant, Holdout.PLANNED)]
        whole = sum(row["cost"] for row in planned)
        for row in planned:
            row["cost"] += round(cost * row["cost"] / whole) if whole else 0
    return [found[names] for names in sorted(found)]


def _added(rows: Iterable[Row], keys: Sequence[str], amounts: Sequence[str]) -> list[Row]:
    """Return a row for each combination of keys, with the sums of some amounts."""
    found: dict[tuple[str, ...], Row] = {}
    for one in rows:
        names = {key: one[key] for key in keys}
        row = found.setdefault(tuple(names.values()), {**names, **dict.fromkeys(amounts, 0)})
        for amount in amounts:
            row[amount] += one[amount]
    return [*found.values()]


def _priced(rows: Sequence[Row], price: Price) -> list[Row]:
    """Return these with the money for a million plain input tokens, where it is known."""
    return [{**row, "price": price(row["tenant"], row["model"])} for row in rows]


def _wanted(request: Request) -> Wanted:
    """Return which rows a page asks for. Raises ClientFault."""
    try:
        return msgspec.convert(dict(request.query_params), Wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ClientFault(str(error)) from error


def _json(answer: Any) -> bytes:
    """Return an answer as JSON. Raises DashboardFault."""
    try:
        return msgspec.json.encode(answer)
    except (TypeError, ValueError, RecursionError) as error:  # somebody else wrote it to the file
        raise DashboardFault(f"What the dashboard's file has of it is damaged: {error}") from error


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
    found = (files("proxy.dashboard") / "static").iterdir()
    return {file.name: file.read_bytes() for file in found if file.name.rpartition(".")[2] in TYPES}
