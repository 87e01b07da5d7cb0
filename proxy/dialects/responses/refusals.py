"""Recognises refusals of what the proxy adds to a request."""

from __future__ import annotations

import re

_tools = re.compile(r"\btools?\b|tool_choice|function", re.IGNORECASE)
_READ = 20_000
"""The most bytes that are read, because some vendors quote the whole prompt after their message."""


def refuses_additions(status: int, body: bytes) -> bool:
    """Whether upstream refuses the tools that we added."""
    return status in (400, 422) and _tools.search(body[:_READ].decode("utf-8", "replace")) is not None
