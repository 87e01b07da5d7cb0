"""Refusals of what the proxy adds."""

from __future__ import annotations

import pytest

from proxy.dialects.chat.additions import refuses_additions


@pytest.mark.parametrize(
    ("status", "body", "refuses"),
    [
        (400, b'{"error":{"message":"This model does not support tools."}}', True),
        (422, b'{"detail":[{"loc":["body","stream_options"],"msg":"extra fields not permitted"}]}', True),
        (400, b'{"error":{"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice"}}', True),
        (400, b'{"error":{"message":"invalid temperature"}}', False),
        (404, b'{"error":{"message":"no tools here"}}', False),
    ],
)
def test_who_refuses_our_additions(status: int, body: bytes, refuses: bool) -> None:
    assert refuses_additions(status, body) is refuses
