"""Recognises refusals of what the proxy adds to a chat request."""

from __future__ import annotations

import re


def refuses_additions(status: int, body: bytes) -> bool:
    """Whether upstream refuses the tools or the `stream_options` that we added."""
    return (
        status in (400, 422) and re.search(r"\btools?\b|tool_choice|stream_options|function", _text(body)) is not None
    )


def _text(body: bytes) -> str:
    """Return the beginning of the body, because some vendors quote the whole prompt after their message."""
    return body[:20_000].decode("utf-8", "replace")
