"""Which dialect serves which request."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import proxy.dialects
from proxy.dialects import DIALECTS, Dialect, for_request
from proxy.plan.message import Reading
from proxy.plan.turn import Unplannable
from proxy.policy import Offload


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
        ("POST", b"/v1/embeddings", ""),
        ("GET", b"/v1/models", ""),
    ],
)
def test_which_dialect_serves_a_request(method: str, path: bytes, name: str) -> None:
    dialect = for_request(method, path)
    assert (dialect.name if dialect else "") == name


def test_each_folder_is_registered_under_its_name() -> None:
    folders = {path.parent.name for path in Path(proxy.dialects.__file__).parent.glob("*/__init__.py")}
    assert {dialect.name for dialect in DIALECTS} == folders


BODY = b'{"model":"m","%b":1,"max_tokens":9,"messages":[{"role":"user","content":"x"}],"input":"x","tools":[]}'


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_members_whose_names_are_no_text_are_left_to_upstream(dialect: Dialect) -> None:
    assert "añb" in dialect.parse(BODY % "añb".encode()).members
    for name in (b"a\xff", b"\xed\xa0\x80", b"\xc3"):
        with pytest.raises(Unplannable):
            dialect.parse(BODY % name)


ENTRIES = {
    "chat": [b'{"role":"%b","content":"x"}', b'{"role":"tool","tool_call_id":"%b","content":"x"}'],
    "messages": [b'{"role":"%b","content":"x"}', b'{"role":"user","content":[{"type":"%b","text":"x"}]}'],
    "responses": [b'{"type":"message","role":"%b","content":"x"}', b'{"type":"%b","output":"x"}'],
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_entries_with_bytes_that_are_no_text_never_raise_anything_else(dialect: Dialect) -> None:
    """They are measured as a whole, or the whole request is left to upstream."""
    for form in (*ENTRIES[dialect.name], b'{"%b":1,"role":"user","content":"x"}', b'{"role":"user","content":"%b"}'):
        try:
            assert dialect.read(msgspec.Raw(form % b"\x9e"), Reading.of(Offload()), len).tokens
        except Unplannable:
            continue
