"""Why a chat request goes upstream as it came, without a plan. Metrics and the log show these values."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Empty for a request that was planned, be it that there was nothing to do."""

    NONE = ""
    OFF = "off"
    """The policy's mode for this model."""
    HEADER = "header"
    """The client asked for it with `x-offload: off`."""
    ENCODING = "encoding"
    """The body cannot be decompressed, or is too large then."""
    INVALID = "invalid"
    """The body is not JSON, or not a chat that the API takes: upstream says so better than we could."""
    TOO_MANY_MESSAGES = "too_many_messages"
    TOO_MANY_TOOLS = "too_many_tools"
    TOO_MANY_MEMBERS = "too_many_members"
    FIELD = "field"
    """Our tools do not go with one of the request's fields, which the log names as `obstacle`."""
    BUSY = "busy"
    """It was only to be observed, and the proxy had too much to do to plan it."""
    TOOLS_REFUSED = "tools_refused"
    """Upstream refuses our tools for this model."""
    REFUSED = "refused"
    """Upstream refused the request as we changed it, for another reason."""
