"""Upstream's replies to attackers: well-behaved on the port that the honest client shares, anything
on the other.

A scripted reply is a list of bytes and pauses. A connection ends after a reply whose framing cannot
be trusted.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from tests.wire import Message, chunk
from tests.wire_fuzz.attacks import PATTERNS, RESULT, compressed, mutated

Piece = bytes | float
NAMES = {"id": "chatcmpl-1", "created": 1_760_000_000, "model": "m"}
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes, *fields: bytes, status: bytes = b"200 OK") -> bytes:
    """Return a reply with a length."""
    lines = [
        b"HTTP/1.1 " + status,
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        *fields,
    ]
    return b"\r\n".join([*lines, b"", b""]) + body


def completion(message: dict[str, Any]) -> bytes:
    ends = "tool_calls" if "tool_calls" in message else "stop"
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, **message},
        "finish_reason": ends,
    }
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    return json.dumps(
        {**NAMES, "object": "chat.completion", "choices": [choice], "usage": usage}
    ).encode()


def events(message: dict[str, Any]) -> list[bytes]:
    """Return the message as SSE: text word by word, and each call's arguments in pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word + " "} for word in (message.get("content") or "").split()]
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        opening = {"name": call["function"]["name"], "arguments": ""}
        deltas.append(
            {
                "tool_calls": [
                    {"index": index, "id": call["id"], "type": "function", "function": opening}
                ]
            }
        )
        for at in range(0, len(arguments), 9):
            deltas.append(
                {
                    "tool_calls": [
                        {"index": index, "function": {"arguments": arguments[at : at + 9]}}
                    ]
                }
            )
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    ends = "tool_calls" if "tool_calls" in message else "stop"
    choices.append({"index": 0, "delta": {}, "finish_reason": ends})
    made = [
        json.dumps({**NAMES, "object": "chat.completion.chunk", "choices": [choice]})
        for choice in choices
    ]
    return [f"data: {one}\n\n".encode() for one in [*made, "[DONE]"]]


def call(name: str, arguments: Any, identity: str = "call_ours") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


def asked_of(message: Message) -> dict[str, Any]:
    """Return the request's JSON, or an empty object."""
    try:
        body = json.loads(message.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def fitting(message: Message, said: dict[str, Any]) -> list[Piece]:
    """Return `said` as the request wants it: whole, or streamed event by event."""
    if message.line.startswith(b"HEAD "):
        return [whole(completion(said)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"]
    if asked_of(message).get("stream") is not True:
        return [whole(completion(said))]
    return [EVENTS, *(chunk(event) for event in events(said)), b"0\r\n\r\n"]


def well_behaved(chance: random.Random, message: Message) -> list[Piece]:
    """Return text, sometimes slowly, or calls of the proxy's tools if the request offers them."""
    match asked_of(message).get("messages"):
        case [*_, {"role": "tool"}]:
            answered = True
        case _:
            answered = False
    if b'"grep"' in message.body and not (answered and chance.random() < 0.8):
        return fitting(message, {"tool_calls": odd_calls(chance)})
    reply = fitting(message, {"content": "Said to somebody."})
    return [chance.choice((0.05, 0.3)), *reply] if chance.random() < 0.2 else reply


def odd_calls(chance: random.Random) -> list[dict[str, Any]]:
    """Return calls of grep and read_file, both as models make them and malformed."""
    paths = ("/context_store/a.txt", "/context_store/../x", "", 3, None, "\ud800", "/" * 3000)
    odd = (
        "",
        "{",
        "[]",
        "null",
        '{"pattern": ' + "[" * 2000,
        '{"pattern": "a", "pattern": 3}',
        "x" * 20_000,
    )
    made = []
    for number in range(chance.choice((1, 1, 2, 12))):
        arguments: Any = chance.choice(
            (
                {"pattern": chance.choice(PATTERNS)},
                {"pattern": "code is 1", "path": chance.choice(paths)},
                {
                    "path": chance.choice(paths),
                    "offset": chance.choice((0, -5, 10**25, "1")),
                    "limit": 3,
                },
                chance.choice(odd),
            )
        )
        made.append(
            call(
                chance.choice(("grep", "read_file")),
                arguments,
                chance.choice((f"c{number}", "same", "")),
            )
        )
    return made


# An upstream that misbehaves


def broken_framing(chance: random.Random) -> list[Piece]:
    body = completion({"content": "x"})
    event = chunk(events({"content": "a b c"})[0])
    broken: list[list[Piece]] = [
        [EVENTS, event, b"zz\r\n"],
        [EVENTS, event, b"ffffffffffffffffff\r\n"],
        [EVENTS, event, b"5\r\nhelloXX5\r\n"],
        [EVENTS, event],
        [EVENTS, event, b"0\r\nX-Trailer: 1\r\nContent-Length: 5\r\n\r\n"],
        [EVENTS, event, b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"],
        [whole(body) + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"],
        [whole(body)[:-20]],
        [whole(body, b"Content-Length: 3")],
        [whole(body, b"Transfer-Encoding: chunked")],
        [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
            + chunk(gzip.compress(body))
            + b"0\r\n\r\n"
        ],
        [b"HTTP/1.0 200 OK\r\n\r\n" + body],
        [b"HTTP/1.1 200 OK\r\n\r\n" + body],
        [body],
        [b""],
        [0.5],
    ]
    return chance.choice(broken)


def broken_heads(chance: random.Random) -> list[Piece]:
    body = completion({"content": "x"})
    fields = (
        b"X-Control: a\x01b",
        b"X-Nul: a\x00b",
        b"X-Bare: a\rb",
        b"X-High: \xff\xfe\xe9",
        b"X Space: 1",
        b"X-Folded: a\r\n b",
        b": nameless",
        b"Set-Cookie: a=1\r\nSet-Cookie: b=2",
        b"X-Long: " + b"l" * chance.choice((7_000, 70_000, 700_000)),
        b"\r\n".join(b"X-%d: 1" % n for n in range(chance.choice((90, 5_000)))),
        b"Content-Encoding: nonsense",
        b"Content-Type: text/event-stream",
        b"Connection: upgrade\r\nUpgrade: h2c",
        b"Retry-After: \x7f",
        b"Location: http://\xff/",
    )
    statuses = (
        b"200 OK",
        b"99 X",
        b"1000 X",
        b"204 No",
        b"304 Not",
        b"101 Switching",
        b"200 \x01\xff",
        b"429 Slow",
        b"600 X",
    )
    reply = whole(body, chance.choice(fields), status=chance.choice(statuses))
    return [
        chance.choice((b"", b"HTTP/1.1 100 Continue\r\n\r\n" * chance.choice((1, 500)), b"\r\n"))
        + reply
    ]


def broken_codings(chance: random.Random) -> list[Piece]:
    name = chance.choice(("gzip", "deflate", "br", "zstd"))
    said = (
        b"".join(events({"content": "a b c"}))
        if chance.random() < 0.5
        else completion({"content": "x"})
    )
    data = compressed(chance, chance.choice((said, said, b"\x00" * (8 << 20))), name)
    data = chance.choice(
        (data, data[: len(data) // 2], mutated(chance, data), data + b"junk", said)
    )
    kind = b"Content-Type: text/event-stream" if said.startswith(b"data") else b"X-Kind: whole"
    return [whole(data, b"Content-Encoding: " + name.encode(), kind)]


def odd_events(chance: random.Random) -> list[Piece]:
    """Return SSE of every shape: line ends, comments, giants, cut characters, no end, or bytes
    after the end."""
    made = events({"content": "a \u2028 b é", "tool_calls": odd_calls(chance)})
    piece = json.dumps(
        {**NAMES, "choices": [{"index": 0, "delta": {"tool_calls": [nameless(chance)]}}]}
    ).encode()
    extra = (
        b": comment\n\n",
        b"event: ping\ndata: {}\n\n",
        b"data\n\n",
        b"data:\n\n",
        b"id: 1\nretry: 0\n\n",
        b"data: {\n\n",
        b"data: null\n\ndata: []\n\ndata: 3\n\n",
        b"data: " + b"[" * 3_000 + b"\n\n",
        b"data: " + b"x" * 300_000 + b"\n\n",
        b'data: {"error": {"message": "no"}}\n\n',
        b'data: {"choices": [{"index": 7, "delta": null}], "usage": "x"}\n\n',
        b"data: " + piece + b"\n\n",
        b"data: " + piece + b"\n\n",
        b"\xef\xbb\xbf",
        b"\r\r\n\n\r",
        b"data: [DONE]\n\n",
        b'data: {"choices": [{"index": 0, "delta": {"content": "\\ud800"}}]}\n\n',
    )
    for _ in range(chance.choice((1, 3, 10))):
        made.insert(
            chance.randrange(len(made) + 1), chance.choice(extra) * chance.choice((1, 1, 200))
        )
    said = b"".join(made)
    said = chance.choice(
        (said, said.replace(b"\n", b"\r\n"), said.replace(b"\n", b"\r"), mutated(chance, said))
    )
    size = chance.choice((len(said), 1_000, 5)) or 1
    cuts = [said[at : at + size] for at in range(0, min(len(said), 300 * size), size)]
    return [EVENTS, b"".join(chunk(part) for part in cuts if part), b"0\r\n\r\n"]


def nameless(chance: random.Random) -> dict[str, Any]:
    """Return a piece of a call as some servers send it: without an id or an index, or with the name
    repeated."""
    entry: dict[str, Any] = {"function": {"name": "grep", "arguments": "a"}}
    more: tuple[dict[str, Any], ...] = (
        {},
        {"index": 0},
        {"index": -1},
        {"index": 10**12},
        {"index": "0"},
        {"id": "", "index": 0},
        {"id": None},
    )
    return {**entry, **chance.choice(more)}


def odd_wholes(chance: random.Random) -> list[Piece]:
    bodies = (
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": {"tool_calls": [{}]}}]}',
        b'{"choices": {"0": 1}, "usage": []}',
        b'{"choices": [' + b"[" * 5_000,
        b"<html>" + b"x" * 50_000,
        completion({"content": "<think>" * 2_000}),
        completion({"content": "<state_snapshot>" * 500 + RESULT}),
        completion({"tool_calls": [call("grep", "{")] * 300}),
        completion({"tool_calls": "no"}),
        mutated(chance, completion({"content": "x", "tool_calls": odd_calls(chance)})),
    )
    status = chance.choice(
        (
            b"200 OK",
            b"200 OK",
            b"400 Bad",
            b"401 No",
            b"404 Not",
            b"429 Slow",
            b"500 Bad",
            b"503 Away",
        )
    )
    return [whole(chance.choice(bodies), status=status)]


def flipped(chance: random.Random, message: Message) -> list[Piece]:
    said = {"content": "x", "tool_calls": odd_calls(chance)}
    pieces = b"".join(piece for piece in fitting(message, said) if isinstance(piece, bytes))
    return [mutated(chance, pieces)]


ODD: dict[str, Callable[[random.Random], list[Piece]]] = {
    "codings": broken_codings,
    "events": odd_events,
    "framing": broken_framing,
    "heads": broken_heads,
    "wholes": odd_wholes,
}


def misbehaving(chance: random.Random, message: Message) -> list[Piece]:
    """Return any of the odd replies, or a correct one that is mutated, cut or slow."""
    kind = chance.choice([*sorted(ODD), "flipped"])
    pieces = flipped(chance, message) if kind == "flipped" else ODD[kind](chance)
    if chance.random() < 0.2:
        pieces = [part for piece in pieces for part in (0.02, piece)]
    return pieces
