"""What is kept of a reply that passes."""

from __future__ import annotations

import gzip
from typing import Any, cast

import pytest

from proxy.requests.relay import ENDING, ReplyEnds
from proxy.upstream.headers import Headers


class Replied:
    """As much of a reply as matters here."""

    def __init__(self, coding: bytes = b"") -> None:
        self.headers = Headers([(b"content-encoding", coding)] if coding else [])


def ends(chunks: list[bytes], coding: bytes = b"", most: int = 0) -> ReplyEnds:
    found = ReplyEnds(cast(Any, Replied(coding)), most)
    for chunk in chunks:
        found.take(chunk)
    return found


@pytest.mark.parametrize("size", [1, 100, ENDING, 3 * ENDING])
def test_both_ends_of_a_reply_are_kept_whatever_its_pieces(size: int) -> None:
    whole = b"".join(b"%d," % number for number in range(9_000))
    found = ends([whole[at : at + size] for at in range(0, len(whole), size)])
    assert found.both == whole[:ENDING] + b"\n" + whole[-ENDING:]
    assert sum(map(len, found._latest)) <= 5 * ENDING
    packed = gzip.compress(whole)
    found = ends([packed[at : at + size] for at in range(0, len(packed), size)], b"gzip")
    assert found.both == whole[:ENDING] + b"\n" + whole[-ENDING:]


def test_a_reply_that_cannot_be_read_has_no_ends() -> None:
    found = ends([b"data: 1\n\n", gzip.compress(b"x")[:-4], b"no gzip"], b"gzip")
    assert found.both == b"\n"


def test_a_whole_reply_is_kept_up_to_its_limit() -> None:
    assert ends([b"12", b"34"], most=4).all == b"1234"
    assert ends([b"12", b"345"], most=4).all == b""
