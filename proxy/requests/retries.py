"""When a follow-up request is sent again, because the client's reply depends on it."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from proxy.upstream.headers import Headers

RETRIES = 2
LONGEST_RETRY = 30.0
"""Most seconds of a `Retry-After` that we wait, because the client's reply stays open meanwhile."""
FIRST_RETRY = 0.5
"""Seconds before the first retry if upstream does not say. They double for each further retry."""


def is_passing(status: int) -> bool:
    return status == 429 or status >= 500


def pause(headers: Headers, attempt: int) -> float:
    """Return the seconds until the next try: as upstream says, or else doubled each time."""
    said = headers.get(b"retry-after").decode("latin-1")
    seconds = _retry_after(said)
    return FIRST_RETRY * 2**attempt if seconds is None else min(max(seconds, 0.0), LONGEST_RETRY)


def _retry_after(said: str) -> float | None:
    """Return the seconds of a `Retry-After`, which may be a date (RFC 9110, 10.2.3), or None if it is invalid."""
    if said.replace(".", "", 1).isdecimal():
        return float(said)
    try:
        return (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
