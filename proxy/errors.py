"""The tree of errors. A class says whose fault it is, and which status a client sees.

* OffloadError
  x ProxyError                  500  a reply of the proxy's own
    + ClientFault               400  the client can correct it
      - BadRequest              400
      - Unauthorized            401
      - Forbidden               403
        · ForeignSite           403
      - NotThere                404
      - MethodNotAllowed        405
      - RequestTimeout          408
      - BodyTooLarge            413
      - HeadTooLarge            431
      - BadEncoding             400
      - Unsupported             501
      - UpgradeRefused          426
    + Overloaded                503
    + UpstreamFault             502  upstream failed
      - UpstreamUnreachable     502
      - UpstreamSilent          504
      - UpstreamBroken          502
      - NoSummary               502
    + StoreFault                503  the store failed
      - NamespaceFault          503
  x DashboardFault                   the dashboard's file cannot be used; its pages say so, and requests go on
  x UserMistake                      the command line prints it and exits with 2
    + PolicyError
      - UnreadablePolicy
  x ClientGone                       the client hung up: nobody is left to reply to
  x Refusal                          upstream answered with an error, which the client gets unchanged
  x Failed                           no summary was made
    + Refused                        upstream refused the form of the call

The last three are defined beside the work that they end, in `proxy.requests`. They have no status, because the proxy
does not reply with them.

Some exceptions are outside of the tree. `proxy.plan` and `proxy.dialects` know of no requests and nobody's fault: they
raise ValueErrors about a value (`NotJson`, `TooManyElements`, `Unplannable`, `TooLarge`, `TooSlow`, `LineTooLong`,
`BadName`, `Unusable`, `Useless`, `Broken`), as `int` does, and `WrongState`, a RuntimeError, for a bug in the caller.
`NotRegular` is an OSError, because its callers handle it together with all others of that kind. `TooLong` and the
private exceptions never leave their module.

The code that calls a foreign library translates its exceptions into these, once (`raise … from`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Fault(StrEnum):
    """Whose fault it is that a request went wrong, as metrics and the log show it. Empty: nobody's."""

    NONE = ""
    CLIENT = "client"
    CLIENT_GONE = "client_gone"
    """The client hung up."""
    PROXY = "proxy"
    CONNECT = "connect"
    """Upstream could not be reached."""
    TIMEOUT = "timeout"
    """Upstream sent nothing for too long."""
    BROKEN = "broken"
    """Upstream's reply stopped within, or cannot be used."""
    PROTOCOL = "protocol"
    """Any other fault of upstream's."""
    OVERLOADED = "overloaded"
    """The tenant has too much under way, and the request was not begun."""
    SUMMARY = "summary"
    """The model's answer was no summary."""


class OffloadError(Exception):
    """Any error of this proxy."""


class ProxyError(OffloadError):
    """An error that the proxy replies with. `message` is for the person who reads it."""

    status = 500
    kind = "server_error"
    code: str | None = None
    fault = Fault.PROXY

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        """Seconds, sent as `Retry-After`."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The reply's headers besides the usual ones."""
        return [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]

    def body(self) -> bytes:
        """The reply's body, in the shape of OpenAI's API errors."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})


class ClientFault(ProxyError):
    """The client can correct it."""

    status = 400
    kind = "invalid_request_error"
    fault = Fault.CLIENT


class BadRequest(ClientFault):
    """The request is not valid HTTP."""

    code = "invalid_http"


class Unauthorized(ClientFault):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ClientFault):
    status = 403
    kind = "permission_error"
    code = "path_not_allowed"


class ForeignSite(Forbidden):
    """A web page of another site may have sent this, or a page whose host name was rebound to our address."""

    code = "origin_not_allowed"


class NotThere(ClientFault):
    """No file or directory of this name."""

    status = 404
    code = "not_found"


class MethodNotAllowed(ClientFault):
    status = 405
    code = "method_not_allowed"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"allow", b"POST")]


class RequestTimeout(ClientFault):
    """The request did not arrive in time. It can be sent again."""

    status = 408
    code = "request_timeout"


class HeadTooLarge(ClientFault):
    status = 431
    code = "request_head_too_large"


class BodyTooLarge(ClientFault):
    status = 413
    code = "request_too_large"


class BadEncoding(ClientFault):
    """A `Content-Encoding` that cannot be decoded."""

    code = "invalid_content_encoding"


class Unsupported(ClientFault):
    """A feature that this proxy does not have, such as WebSocket outside of the model APIs."""

    status = 501
    code = "not_implemented"


class UpgradeRefused(ClientFault):
    """An upgrade to WebSocket for an API that we serve over plain HTTP. Clients that know this status go on with it."""

    status = 426
    code = "upgrade_refused"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"upgrade", b"HTTP/1.1")]


class Overloaded(ProxyError):
    """Too much at once, or the proxy is shutting down. The client may try again after `retry_after` seconds."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"


class UpstreamFault(ProxyError):
    """Upstream did not do its part."""

    status = 502
    kind = "upstream_error"
    code = "upstream_error"
    fault = Fault.PROTOCOL

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail
        """For the operator, who may know upstream's address. It is logged and never sent to a client."""


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


class StoreFault(ProxyError):
    """The store failed. Chat requests are served anyway: only operations that need the store reply with this."""

    status = 503
    code = "store_unavailable"


class NamespaceFault(StoreFault):
    """The store failed for one namespace. For the others it may work."""


class DashboardFault(OffloadError):
    """The dashboard's file cannot be used. The text says why, and what to do."""


class UserMistake(OffloadError):
    """A wrong flag, file or setting. The command line prints the text without a traceback and exits with 2."""


class PolicyError(UserMistake):
    """A policy file that cannot be used. The text names file, line, key and what was expected."""


class UnreadablePolicy(PolicyError):
    """A file of policies could not be read, for a reason that may pass."""
