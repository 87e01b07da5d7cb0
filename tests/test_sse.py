"""Events out of bytes: whole, byte by byte, and cut at every offset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import sse
from proxy.sse import EventDecoder, ServerSentEvent, TooLarge

Read = list[tuple[bytes | None, bytes | None]]

CASES: dict[str, tuple[bytes, Read]] = {
    "nothing": (b"", []),
    "one": (b'data: {"a":1}\n\n', [(b'{"a":1}', None)]),
    "two": (b"data: 1\n\ndata: 2\n\n", [(b"1", None), (b"2", None)]),
    "no space": (b"data:1\n\n", [(b"1", None)]),
    "only one space is taken": (b"data:  1\n\n", [(b" 1", None)]),
    "CRLF": (b"data: 1\r\n\r\ndata: 2\r\n\r\n", [(b"1", None), (b"2", None)]),
    "CR": (b"data: 1\r\rdata: 2\r\r", [(b"1", None), (b"2", None)]),
    "mixed ends": (
        b"data: 1\r\n\ndata: 2\n\r\ndata: 3\n\rdata: 4\r\n\r",
        [(b"%d" % n, None) for n in (1, 2, 3, 4)],
    ),
    "U+2028, U+0085 and form feed end no line": (
        'data: "a\u2028b\u0085c\fd"\n\n'.encode(),
        [('"a\u2028b\u0085c\fd"'.encode(), None)],
    ),
    "BOM": (b"\xef\xbb\xbfdata: 1\n\ndata: 2\n\n", [(b"1", None), (b"2", None)]),
    "BOM at the start only": (b"data: 1\n\n\xef\xbb\xbfdata: 2\n\n", [(b"1", None), (None, None)]),
    "comment": (b": hi\n\ndata: 1\n\n", [(None, None), (b"1", None)]),
    "comment within": (b": hi\ndata: 1\n\n", [(b"1", None)]),
    "lines of data": (b"data: 1\ndata:\ndata: 3\n\n", [(b"1\n\n3", None)]),
    "data without a colon": (b"data\n\n", [(b"", None)]),
    "named": (b"event: error\ndata: 1\n\n", [(b"1", b"error")]),
    "name behind": (b"data: 1\r\nevent:error\r\nid: 7\r\nretry: 9\r\n\r\n", [(b"1", b"error")]),
    "unknown field": (b"database: 1\n\n", [(None, None)]),
    "more empty lines": (
        b"\n\ndata: 1\n\n\n\n\ndata: 2\n\n",
        [(None, None), (b"1", None), (None, None), (b"2", None)],
    ),
    "no end": (b"data: 1\n\ndata: 2", [(b"1", None), (b"2", None)]),
    "half an end": (b"data: 1\n\ndata: 2\n", [(b"1", None), (b"2", None)]),
    "an end that could go on": (b"data: 1\r\n\r", [(b"1", None)]),
}


def read(*pieces: bytes) -> list[ServerSentEvent]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)] + decoder.flush()


@pytest.mark.parametrize(("raw", "expected"), CASES.values(), ids=CASES.keys())
def test_events_are_decoded_with_their_bytes(raw: bytes, expected: Read) -> None:
    events = read(raw)
    assert [(event.data, event.name) for event in events] == expected
    assert b"".join(event.raw for event in events) == raw
    assert read(*(raw[at : at + 1] for at in range(len(raw)))) == events
    for cut in range(len(raw)):
        assert read(raw[:cut], raw[cut:]) == events


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
def test_an_event_is_returned_as_soon_as_it_ends(end: bytes) -> None:
    assert [event.data for event in EventDecoder().feed(b"data: 1" + end)] == [b"1"]


@given(
    st.lists(st.sampled_from([b"\r", b"\n", b"data: x", b"event: y", b":", b"\xef\xbb\xbf"])),
    st.data(),
)
def test_events_do_not_depend_on_how_the_bytes_are_cut(
    tokens: list[bytes], data: st.DataObject
) -> None:
    raw = b"".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    events = read(
        *(raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True))
    )
    assert events == read(raw)
    assert b"".join(event.raw for event in events) == raw


def test_an_endless_event_is_refused() -> None:
    decoder = EventDecoder()
    assert len(decoder.feed(b"data: 1\n\n" * 500)) == 500
    for _ in range(sse.LIMIT >> 20):
        assert decoder.feed(b"x" * (1 << 20)) == []
    with pytest.raises(TooLarge):
        decoder.feed(b"x")


def test_encoded_events_decode_to_the_same_data() -> None:
    raw = sse.encode(b"1") + sse.encode(b"2", b"error") + sse.comment(b"hi")
    assert [(event.data, event.name) for event in read(raw)] == [
        (b"1", None),
        (b"2", b"error"),
        (None, None),
    ]
