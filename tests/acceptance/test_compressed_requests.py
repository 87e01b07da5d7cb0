"""Compressed bodies, as Codex sends them: planned like any other, and sent on as they came where
nothing changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zstandard

from tests.acceptance.shared import proxy
from tests.dialects.messages.turns import message
from tests.dialects.responses.turns import response
from tests.fake_upstream import Pieces, Recorded, StrictUpstream, whole
from tests.serving import Proxy
from tests.steps import STEP, tool

__all__ = ["proxy"]

Json = dict[str, Any]
BIG = "line of no interest\n" * 80


def _stream(data: bytes) -> bytes:
    """A frame that does not say its size, as a client writes that compresses while it sends."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd": ("zstd", zstandard.compress),
    "zstd stream": ("zstd", _stream),
    "gzip": ("gzip", gzip.compress),
}


def made(api: str, result: str) -> Json:
    steps = [
        entry
        for number, text in enumerate((result, "small", "small"))
        for entry in STEP[api](f"c{number}", text)
    ]
    said = [{"role": "user", "content": "Go."}, *steps]
    asked = {"model": "m", "tools": [tool(api)]}
    return (
        {**asked, "input": said}
        if api == "responses"
        else {**asked, "max_tokens": 1_000, "messages": said}
    )


def _answer(request: Recorded) -> Pieces:
    return whole(response(tools=[]) if request.path.endswith("/responses") else message())


@pytest.fixture(scope="module")
def up() -> Iterator[StrictUpstream]:
    with StrictUpstream() as upstream:
        upstream.respond(_answer)
        yield upstream


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("/responses", name) for name in CODINGS),
        ("/messages", "zstd"),
        ("/messages/count_tokens", "gzip"),
    ],
)
def test_compressed_requests(proxy: Proxy, up: StrictUpstream, path: str, name: str) -> None:
    coding, compress = CODINGS[name]
    for result, moved in (("short", False), (BIG, True)):
        body = compress(json.dumps(made(path.split("/")[1], result)).encode())
        headers = {"x-api-key": "k", "content-encoding": coding}
        assert proxy.post(f"/v1{path}", body, "", **headers).status_code == 200
        sent = up.requests[-1]
        if moved:
            assert sent.header("content-encoding") is None
            assert "(detailed result is stored in" in sent.body.decode()
        else:
            assert (sent.header("content-encoding"), sent.body) == (coding, body)
