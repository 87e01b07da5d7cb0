"""One tree of errors. A class says whose fault it is and which status a client sees.

Foreign exceptions are translated into these once, where the foreign thing lives (`raise … from`).
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
    UNUSED = "unused"
    """A conversation's summaries are never used: there will be none for a while."""


class ProxyError(Exception):
    """Anything that this proxy says of itself; `message` is meant for the person who reads it."""

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
        """What the reply has besides the usual."""
        return [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]

    def body(self) -> bytes:
        """The reply's body, in the shape of OpenAI's API errors."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})


class ClientFault(ProxyError):
    """The client can mend it."""

    status = 400
    kind = "invalid_request_error"
    fault = Fault.CLIENT


class BadRequest(ClientFault):
    """Not HTTP, or not as it should be."""

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
    """A web page of another site may have sent this, or one whose name was rebound to our address."""

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
    """The request did not come in time; it can be sent again."""

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
    """What this proxy does not speak, such as WebSockets."""

    status = 501
    code = "not_implemented"


class Overloaded(ProxyError):
    """Too much at once, or shutting down: the client may come back after `retry_after` seconds."""

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
        """For the operator, who may know upstream's address: it is logged, and never sent to a client."""


class UpstreamUnreachable(UpstreamFault):
    code = "upstream_unreachable"
    fault = Fault.CONNECT


class UpstreamSilent(UpstreamFault):
    """No first byte, or then none for too long."""

    status = 504
    code = "upstream_timeout"
    fault = Fault.TIMEOUT


class UpstreamBroken(UpstreamFault):
    """The reply stopped in the middle or is not what HTTP or the API allow."""

    code = "upstream_broken"
    fault = Fault.BROKEN


class NoSummary(UpstreamFault):
    """The model's answer was no summary."""

    code = "no_summary"
    fault = Fault.SUMMARY


class StoreFault(ProxyError):
    """The store failed. Chat requests are served all the same; only its own operations show this."""

    status = 503
    code = "store_unavailable"


class UserMistake(Exception):
    """A wrong flag, file or setting: the command line prints the text and exits with 2, no traceback."""


class PolicyError(UserMistake):
    """A policy file that cannot be taken: the text names file, line, key and what was expected."""
