"""Which dialect serves which request."""

from __future__ import annotations

from pathlib import Path

import pytest

import proxy.dialects
from proxy.dialects import DIALECTS, for_request


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", b"/v1/chat/completions", "chat"),
        ("POST", b"/openai/deployments/d/chat/completions", "chat"),
        ("GET", b"/v1/chat/completions", ""),
        ("POST", b"/v1/chat/completions/1", ""),
        ("POST", b"/v1/responses", "responses"),
        ("POST", b"/backend-api/codex/responses", "responses"),
        ("GET", b"/v1/responses", ""),
        ("POST", b"/v1/responses/compact", "responses"),
        ("POST", b"/v1/responses/resp_1/cancel", ""),
        ("POST", b"/v1/responses/input_tokens", ""),
        ("POST", b"/v1/messages", "messages"),
        ("POST", b"/v1/v1/messages", "messages"),
        ("POST", b"/v1/messages/count_tokens", "messages"),
        ("POST", b"/v1/messages/batches", ""),
        ("POST", b"/v1/threads/thread_1/messages", ""),
        ("POST", b"/v1/threads/thread_1/messages/count_tokens", ""),
        ("GET", b"/v1/messages", ""),
        ("POST", b"/v1/chat/completions/", "chat"),
        ("POST", b"/v1/responses/", "responses"),
        ("POST", b"/v1/messages/", "messages"),
        ("POST", b"/v1/chat/completions//", ""),
        ("POST", b"/", ""),
        ("POST", b"/v1/embeddings", ""),
        ("GET", b"/v1/models", ""),
    ],
)
def test_which_dialect_serves_a_request(method: str, path: bytes, name: str) -> None:
    dialect = for_request(method, path)
    assert (dialect.name if dialect else "") == name


def test_each_folder_is_registered_under_its_name() -> None:
    folders = {
        path.parent.name for path in Path(proxy.dialects.__file__).parent.glob("*/__init__.py")
    }
    assert {dialect.name for dialect in DIALECTS} == folders
