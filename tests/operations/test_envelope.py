"""What every operation replies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from proxy import rawjson
from proxy.errors import NotThere, ProxyError
from proxy.operations import envelope
from proxy.operations.envelope import OperationReply, refusal

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


@pytest.mark.parametrize("text", ["", 'a"\n', "é\ud83d\U0001f600"])
@pytest.mark.parametrize("size", [1, 2, 1 << 20])
def test_long_texts_are_encoded_in_pieces(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    encode = rawjson.encode
    monkeypatch.setattr(envelope, "PIECE", size)
    monkeypatch.setattr(rawjson, "encode", lambda value: encoded.append(value) or encode(value))
    metadata: dict[str, Any] = {"write_file_dict": {"/s/a": text * 3, "/s/b": ""}, "matches": [{"n": 1}], "none": {}}
    told = json.loads(OperationReply(text * 3, metadata=metadata).body())
    assert (told["answer"], told["metadata"]) == (text * 3, metadata)
    texts = [value for value in encoded if isinstance(value, str) and value not in ("write_file_dict", "matches")]
    assert all(len(value) <= max(size, len("/s/a")) for value in texts)


def test_a_refusal_hands_the_messages_back() -> None:
    body = refusal([OWN])(NotThere("no such file"))
    assert bytes(OWN) in body
    told = json.loads(body)
    assert (told["success"], told["answer"], told["metadata"]) == (False, "no such file", {"error": "not_found"})
    assert json.loads(refusal()(ProxyError("a bug")))["messages"] == []
