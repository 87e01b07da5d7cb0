"""The tree of errors. A class says whose fault it is, and which status and code a client sees.

Below `ProxyError` is what the proxy replies with. `UserMistake` ends the command line with exit
code 2. `ClientGone`, `Refusal` and `Failed` are defined in `proxy.requests`, beside the work that
they end: nothing is replied with them.

`proxy.plan` and `proxy.dialects` know of nobody's fault: they raise ValueErrors about a value, as
`int` does. The code that calls a foreign library translates its exceptions into these, once (`raise
… from`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Fault(StrEnum):
    """Whose fault it is that a request went wrong, as metrics and the log show it. Empty:
    nobody's."""

    NONE = ""
    CLIENT = "client"
    CLIENT_GONE = "client_gone"  # the client hung up
    PROXY = "proxy"
    CONNECT = "connect"  # upstream could not be reached
    TIMEOUT = "timeout"  # upstream sent nothing for too long
    BROKEN = "broken"  # upstream's reply stopped within, or cannot be used
    PROTOCOL = "protocol"  # any other fault of upstream's
    OVERLOADED = "overloaded"  # the tenant has too much under way, and the request was not begun
    SUMMARY = "summary"  # the model's answer was no summary


class OffloadError(Exception):
    """Any error of this proxy."""


class UserMistake(OffloadError):
    """A wrong flag, file or setting. The command line prints the text without a traceback and exits
    with 2."""


class PolicyError(UserMistake):
    """A policy file that cannot be used. The text names file, line, key and what was expected."""


class ProxyError(OffloadError):
    """An error that the proxy replies with. `message` is for the person who reads it."""

    status = 500
    kind = "server_error"
    fault = Fault.PROXY
    code: str | None = None
    extra: tuple[tuple[bytes, bytes], ...] = ()  # headers of the reply

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after  # seconds, sent as `Retry-After`

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The reply's headers besides the usual ones."""
        return (
            [*self.extra]
            if self.retry_after is None
            else [*self.extra, (b"retry-after", b"%d" % self.retry_after)]
        )

    def body(self) -> bytes:
        """The reply's body, in the shape of OpenAI's API errors."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})


# -- the client can correct it ---------------------------------------------------------------------


class ClientFault(ProxyError):
    status = 400
    kind = "invalid_request_error"
    fault = Fault.CLIENT


class BadRequest(ClientFault):
    """It is not valid HTTP."""

    code = "invalid_http"


class BadEncoding(ClientFault):
    code = "invalid_content_encoding"


class DashboardFault(ProxyError):
    """The dashboard's file cannot be used. The text says why, and what to do. Requests go on."""

    status = 503


class Unauthorized(ClientFault):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ClientFault):
    status = 403
    kind = "permission_error"
    code = "path_not_allowed"


class ForeignSite(Forbidden):
    """A web page of another site may have sent this, or a page whose host name was rebound to our
    address."""

    code = "origin_not_allowed"


class NotThere(ClientFault):
    status = 404
    code = "not_found"


class MethodNotAllowed(ClientFault):
    status = 405
    code = "method_not_allowed"
    extra = ((b"allow", b"POST"),)


class RequestTimeout(ClientFault):
    """It did not arrive in time. It can be sent again."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(ClientFault):
    status = 413
    code = "request_too_large"


class UpgradeRefused(ClientFault):
    """An upgrade to WebSocket. Clients that know this status go on over plain HTTP."""

    status = 426
    code = "upgrade_refused"
    extra = ((b"upgrade", b"HTTP/1.1"),)


class HeadTooLarge(ClientFault):
    status = 431
    code = "request_head_too_large"


class Unsupported(ClientFault):
    """A part of HTTP that this proxy does not have, such as tunnels."""

    status = 501
    code = "not_implemented"


# -- ours ------------------------------------------------------------------------------------------


class Overloaded(ProxyError):
    """Too much at once, or the proxy is shutting down. The client may try again after `retry_after`
    seconds."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"


class StoreFault(ProxyError):
    """The store failed. Chat requests are served anyway: only operations that need the store reply
    with this."""

    status = 503
    code = "store_unavailable"


class StoreFull(StoreFault):
    """The store has no room for a record."""


class StoreBusy(StoreFault):
    """Too much of one namespace waits for the store, which works."""


# -- upstream's ------------------------------------------------------------------------------------


class UpstreamFault(ProxyError):
    status = 502
    kind = "upstream_error"
    code = "upstream_error"
    fault = Fault.PROTOCOL

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        # for the operator's log. It may have upstream's address, so no client gets it.
        self.detail = detail


class UpstreamUnreachable(UpstreamFault):
    code = "upstream_unreachable"
    fault = Fault.CONNECT


class UpstreamSilent(UpstreamFault):
    """The first byte did not arrive in time, or the reply stopped for too long."""

    status = 504
    code = "upstream_timeout"
    fault = Fault.TIMEOUT


class UpstreamBroken(UpstreamFault):
    """The reply ended early, or breaks the rules of HTTP or of the API."""

    code = "upstream_broken"
    fault = Fault.BROKEN


class NoSummary(UpstreamFault):
    """The model's answer is not a summary."""

    code = "no_summary"
    fault = Fault.SUMMARY
