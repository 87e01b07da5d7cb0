"""What every operation replies."""

from __future__ import annotations

import json

from msgspec import Raw

from proxy.errors import NotThere, ProxyError
from proxy.operations.call import OperationReply, refusal

OWN = Raw(b'{"role" : "user", "n": 1.0, "content": "\\ud83d"}')


def test_messages_keep_their_bytes_whatever_text_is_beside_them() -> None:
    body = OperationReply("\ud83d", [OWN], {"chat_id": "\udc00", "n": 1}).body()
    assert bytes(OWN) in body
    assert json.loads(body) == {
        "success": True,
        "answer": "\ud83d",
        "messages": [json.loads(bytes(OWN))],
        "metadata": {"chat_id": "\udc00", "n": 1},
    }


def test_a_refusal_hands_the_messages_back() -> None:
    body = refusal([OWN])(NotThere("no such file"))
    assert bytes(OWN) in body
    told = json.loads(body)
    assert (told["success"], told["answer"], told["metadata"]) == (False, "no such file", {"error": "not_found"})
    assert json.loads(refusal()(ProxyError("a bug")))["messages"] == []
