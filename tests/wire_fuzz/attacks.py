"""Makes what attackers write, with pure functions of a seeded `random.Random`, listed in the table
`KINDS`."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import brotli  # type: ignore[import-untyped]
import zstandard

from tests.wire import chunk

LOUD, ROUGH = "loud-key", "rough-key"
"""Keys of two tenants: the first uses the honest client's upstream, the second an upstream that
misbehaves."""
CHAT = "/v1/chat/completions"
OPERATIONS = ("/context_offload", "/context_compact", "/context_compress", "/grep", "/read_file")


class Act(Enum):
    """What an attacker does to a socket besides writing and waiting."""

    HALF_CLOSE = "half-close"
    RESET = "reset"


Step = bytes | float | Act
Steps = list[Step]


@dataclass(frozen=True)
class Case:
    """One attacker's connection."""

    number: int
    kind: str
    steps: Steps
    patience: float
    """Seconds to read after everything is written."""


def case(seed: int, number: int) -> Case:
    """Return the case, which is always the same for the same two numbers."""
    chance = random.Random(f"{seed}/{number}")
    kind = chance.choice(sorted(KINDS))
    steps = KINDS[kind](chance, number)
    if chance.random() < 0.25:
        steps = [mutated(chance, step) if isinstance(step, bytes) else step for step in steps]
    if chance.random() < 0.2:
        steps = cut(chance, steps)
    return Case(number, kind, steps, chance.choice((0.0, 0.02, 0.3, 1.0)))


# Mutations of any bytes


TOKENS = (
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\x00",
    b"\xff",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: keep-alive, upgrade\r\n",
    b"\r\nupgrade: h2c\r\n",
    b"Expect: 100-continue\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b'{"role": "tool", "tool_call_id": "a"}',
    b"\\ud800",
    b"[" * 600,
    b"data: [DONE]\n\n",
    b"ffffffffffffffff\r\n",
)


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return `data` with a few mutations: a slice removed, repeated, moved or overwritten, or a
    token inserted."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        start = chance.randrange(len(data) + 1)
        piece = data[start : start + chance.choice((1, 2, 8, 64, 4096))]
        rest = data[start + len(piece) :]
        match chance.randrange(5):
            case 0:
                data = data[:start] + rest
            case 1:
                data = data[:start] + piece * chance.choice((2, 3, 50)) + rest
            case 2:
                where = chance.randrange(len(rest) + 1)
                data = data[:start] + rest[:where] + piece + rest[where:]
            case 3:
                data = data[:start] + chance.randbytes(len(piece)) + rest
            case _:
                data = data[:start] + chance.choice(TOKENS) + piece + rest
    return data


def cut(chance: random.Random, steps: Sequence[Step]) -> Steps:
    """Return the steps up to a random point, perhaps followed by an end."""
    whole = chance.randrange(len(steps))
    last = steps[whole]
    kept: Steps = list(steps[:whole])
    kept.append(last[: chance.randrange(len(last) + 1)] if isinstance(last, bytes) else last)
    return kept + chance.choice(([], [Act.HALF_CLOSE], [Act.RESET], [0.2]))


def dripped(chance: random.Random, data: bytes) -> Steps:
    """Return `data` in a few pieces with pauses, and heads sometimes byte by byte."""
    size = chance.choice((1, 3, 17, 1000))
    pieces = [data[at : at + size] for at in range(0, min(len(data), 24 * size), size)]
    rest = data[24 * size :]
    steps: Steps = []
    for piece in pieces:
        steps += [piece, 0.002]
    return [*steps, rest]


# Heads


def head(number: int, method: str, target: str, key: str | None, *fields: bytes) -> bytes:
    """Return a head that is correct except for `fields`. `X-Fuzz` tells upstream the case's
    number."""
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: 127.0.0.1", b"X-Fuzz: %d" % number]
    if key is not None:
        lines.append(b"Authorization: Bearer " + key.encode())
    return b"\r\n".join([*lines, *fields]) + b"\r\n\r\n"


def sized(number: int, target: str, key: str | None, body: bytes, *fields: bytes) -> bytes:
    """Return a whole POST request."""
    json_type = b"Content-Type: application/json"
    return (
        head(number, "POST", target, key, json_type, *fields, b"Content-Length: %d" % len(body))
        + body
    )


def some_key(chance: random.Random) -> str | None:
    return chance.choice((LOUD, LOUD, LOUD, ROUGH, f"junk-{chance.randrange(50)}", None))


def request_line(chance: random.Random, number: int) -> Steps:
    method = chance.choice(
        ("GET", "get", "POST", "HEAD", "OPTIONS", "CONNECT", "PRI", "TRACE", "BREW", "", "P OST")
    )
    target = chance.choice(
        (
            CHAT,
            "/health",
            "*",
            "/",
            "//",
            "/v1/../health",
            "/%00",
            "/%zz",
            "/v1/models?" + "a" * 9000,
            "/\xe4\xff",
            "",
        )
    )
    target = chance.choice((target, f"http://other{target}", f"{target}#x", f"{target} x"))
    version = chance.choice(
        ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/11", "HTTP/1.1 ", "", "http/1.1")
    )
    ends = chance.choice((b"\r\n", b"\n", b"\r", b"\r\r\n"))
    line = f"{method} {target} {version}".encode("latin-1")
    fields = [b"Host: 127.0.0.1", b"Authorization: Bearer loud-key", b"X-Fuzz: %d" % number]
    return [ends.join([line, *fields, b"", b""])]


FIELDS = (
    b"Content-Length: 3",
    b"Content-Length: 3, 3",
    b"Content-Length: 03",
    b"Content-Length: +3",
    b"Content-Length: -3",
    b"Content-Length: 3\r\nContent-Length: 4",
    b"Content-Length: 99999999999999999999999999",
    b"Content-Length: 0x3",
    b"Content-Length:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\tchunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding: xchunked",
    b"Upgrade: h2c\r\nConnection: upgrade, http2-settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Upgrade: h2c",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Expect: 100-continue",
    b"Expect: 200-maybe",
    b"Connection: close",
    b"Connection: keep-alive, x-fuzz, authorization",
    b"Connection: content-length",
    b"Host: another",
    b"Host:",
    b"X-Folded: a\r\n b",
    b"X Space: a",
    b"X-Nul: a\x00b",
    b"X-Bare: a\rb",
    b"X-High: \xff\xfe",
    b": empty",
    b"noColon",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br, gzip, deflate, zstd, gzip",
    b"Content-Encoding: nonsense",
    b"Accept-Encoding: gzip;q=0",
    b"Authorization: Bearer rough-key",
    b"Authorization: Basic Og==",
    b"Cookie: " + b"c" * 7000,
    b"X-Offload: off",
    b"Content-Type: text/plain; charset=utf-7",
    b"Range: bytes=0-0,1-1",
    b"Trailer: content-length",
    b"TE: trailers",
    b"Max-Forwards: 0",
    b"X-Forwarded-For: 127.0.0.1",
    b"Origin: https://elsewhere.example",
    b"Sec-Fetch-Site: cross-site",
)


def fields(chance: random.Random, number: int) -> Steps:
    """Send fields that contradict each other, followed by bodies of either framing."""
    chosen = chance.sample(FIELDS, chance.randint(1, 4))
    target = chance.choice((CHAT, CHAT, "/v1/models", "/v1/embeddings", "/health", *OPERATIONS))
    begun = head(
        number, chance.choice(("POST", "POST", "GET", "PUT")), target, some_key(chance), *chosen
    )
    inner = head(number, "GET", "/v1/smuggled", LOUD)
    body = chance.choice(
        (b"", b"abc", b"0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n", b"0\r\n\r\n" + inner, b"abc" + inner)
    )
    return [begun + body] if chance.random() < 0.6 else [begun, 0.01, body]


def large_heads(chance: random.Random, number: int) -> Steps:
    begun = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Fuzz: {number}\r\n".encode()
    match chance.randrange(4):
        case 0:
            return [
                begun,
                *(b"X-%d: y\r\n" % n * 100 for n in range(chance.choice((2, 30)))),
                b"\r\n",
            ]
        case 1:
            return [begun + b"X-Long: ", *[b"z" * 65536] * chance.choice((1, 16)), b"\r\n\r\n"]
        case 2:
            return [f"GET /{'u' * chance.choice((8000, 200_000))} HTTP/1.1\r\n\r\n".encode()]
        case _:
            return [b"\r\n" * chance.choice((10, 20_000)), sized(number, CHAT, LOUD, chat(chance))]


# Framing


def chunked(chance: random.Random, number: int) -> Steps:
    body = chat(chance)
    size = chance.choice((1, 7, 1000))
    pieces = [body[at : at + size] for at in range(0, min(len(body), 100 * size), size)] + [
        body[100 * size :]
    ]
    framed = [chunk(piece) for piece in pieces if piece]
    spoiled = (
        b"",
        b'5;ext="' + b"q" * chance.choice((1, 20_000)) + b'"\r\nhello\r\n',
        b"ffffffffffffffffff\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5\nhello\n",
        b"5\r\nhelloXX",
        b"5;\r\nhello\r\n",
        b"zz\r\n",
        b"3\r\nab\r\n",
    )
    if chance.random() < 0.6:
        framed.insert(chance.randrange(len(framed) + 1), chance.choice(spoiled))
    trailers = chance.choice(
        (b"", b"X-T: 1\r\n", b"Content-Length: 9\r\n", b"T: x\r\n" * 3000, b"upgrade: h2c\r\n")
    )
    ends = chance.choice((b"0\r\n" + trailers + b"\r\n", b"0\r\n", b"", b"000000\r\n\r\n"))
    target = chance.choice((CHAT, CHAT, "/v1/embeddings", "/grep"))
    begun = head(number, "POST", target, some_key(chance), b"Transfer-Encoding: chunked")
    return (
        [begun, *framed, ends]
        if chance.random() < 0.5
        else dripped(chance, begun + b"".join(framed) + ends)
    )


def pipelined(chance: random.Random, number: int) -> Steps:
    """Send several requests at once, some of which end the connection, or should."""
    requests = [
        sized(number, CHAT, LOUD, chat(chance)),
        sized(number, CHAT, "junk-1", chat(chance)),
        sized(number, "/grep", LOUD, b'{"pattern": "a", "path": "/"}'),
        sized(number, "/grep", "junk-1", b'{"pattern": "a"}'),
        head(number, "GET", "/health", None),
        head(number, "HEAD", "/health", None),
        head(number, "GET", "/v1/models", LOUD),
        head(number, "POST", CHAT, LOUD, b"Content-Length: 9000000"),
        sized(number, CHAT, LOUD, chat(chance), b"Connection: close"),
        sized(number, CHAT, LOUD, chat(chance), b"Upgrade: h2c", b"Connection: Upgrade"),
        b"\r\n",
        b"garbage\r\n\r\n",
    ]
    chosen = chance.choices(requests, k=chance.choice((2, 5, 40)))
    return [b"".join(chosen)] if chance.random() < 0.5 else list(chosen)


def early(chance: random.Random, number: int) -> Steps:
    """Send a body that continues after the proxy has refused it."""
    refused = [
        head(
            number, "POST", chance.choice((CHAT, *OPERATIONS)), "junk-9", b"Content-Length: 200000"
        ),
        head(number, "POST", CHAT, LOUD, b"Content-Length: 99000000"),
        head(number, "POST", CHAT, "junk-9", b"Transfer-Encoding: chunked"),
        head(number, "POST", "/grep", None, b"Content-Length: 200000", b"Expect: 100-continue"),
    ]
    inside = (
        b"\r\nupgrade: h2c\r\n",
        head(number, "GET", "/health", None),
        b"h2c\r\n\r\n",
        b"0\r\n\r\n",
        b"\x00" * 999,
    )
    pieces: Steps = [chance.choice(refused), chance.choice((0.0, 0.02))]
    for _ in range(chance.choice((1, 4, 20))):
        pieces += [
            b"x" * chance.choice((10, 20_000)) + chance.choice(inside),
            chance.choice((0.0, 0.005)),
        ]
    return pieces


def slow(chance: random.Random, number: int) -> Steps:
    """Send head and body slowly, or stop partway."""
    return dripped(
        chance,
        sized(number, chance.choice((CHAT, "/grep", "/v1/files")), some_key(chance), chat(chance)),
    )


# Bodies


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def called(arguments: str, result: Any, identity: str = "a") -> list[Any]:
    function = {"name": "fetch", "arguments": arguments}
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": identity, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": identity, "content": result},
    ]


RESULT = "".join(f"line {line}: the code is {line * 7919 % 104729}\n" for line in range(120))


def chat(chance: random.Random) -> bytes:
    """Return a valid chat request: a short one, or one with results that the proxy moves."""
    messages: list[Any] = [user(f"question {chance.randrange(1000)}")]
    for turn in range(chance.choice((0, 0, 1, 4))):
        messages += called('{"n": 1}', RESULT * chance.choice((1, 3)), f"call_{turn}")
        messages += [{"role": "assistant", "content": "I see."}, user("And now?")]
    tool = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": messages, "tools": [tool], "stream": chance.random() < 0.5}
    return json.dumps(body).encode()


DEEP = 5_000


def odd_values(chance: random.Random) -> list[bytes]:
    """Return JSON values, some of them invalid."""
    many = chance.choice((10, 3_000))
    return [
        b"null",
        b"{}",
        b"[]",
        b'"\\ud800"',
        b'"\\udc00\\ud800 ' + b"x" * 2000 + b'"',
        b'"' + b"=" * 30_000 + b'"',
        b'"' + b"<think>" * 3_000 + b'"',
        b'"' + b"a\\u0000\\n" * 2_000 + b'"',
        b'"\xff\xfe"',
        b'"\xe2\x80\xa8"',
        b"1e999",
        b"-0",
        b"9" * 5_000,
        b"0." + b"1" * 5_000,
        b"NaN",
        b"tru",
        b"[" * DEEP + b"]" * DEEP,
        b"[" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b"[" + b",".join([b"{}"] * many) + b"]",
        b"[" + b",".join([json.dumps(user("x")).encode()] * many) + b"]",
        json.dumps(
            [*called("{", RESULT), *called("[" * 900, [{"type": "text", "text": RESULT}])]
        ).encode(),
        json.dumps(called("{}", RESULT * 8) * 2).encode(),
        json.dumps(
            [user([{"type": "text", "text": 3}]), {"role": "tool"}, 3, None, "x", []]
        ).encode(),
        json.dumps([{"type": "function", "function": {"name": "grep"}}] * many).encode(),
        b'{"role": "user", "role": "tool", "content": 1, "content": "x"}',
    ]


MEMBERS = (
    b"messages",
    b"tools",
    b"model",
    b"stream",
    b"n",
    b"max_tokens",
    b"tool_choice",
    b"stream_options",
    b"stop",
)


def odd_json(chance: random.Random, names: Sequence[bytes]) -> bytes:
    """Return an object with odd, repeated or too many members, or a value that is not an object."""
    values = odd_values(chance)
    if chance.random() < 0.1:
        return chance.choice(values)
    right = {
        b"model": b'"m"',
        b"messages": json.dumps([user("x"), *called("{}", RESULT), user("y")]).encode(),
    }
    members = [(name, right.get(name, b"null")) for name in chance.sample(names, len(names) // 2)]
    members += [
        (chance.choice(names), chance.choice(values)) for _ in range(chance.choice((1, 1, 2, 30)))
    ]
    chance.shuffle(members)
    return b"{" + b",".join(b'"%b": %b' % member for member in members) + b"}"


def bodies(chance: random.Random, number: int) -> Steps:
    return [sized(number, CHAT, some_key(chance), odd_json(chance, MEMBERS))]


PARAMETERS = (
    b"messages store_dir context_manage_mode max_total_tokens max_tool_message_tokens keep_recent_count chat_id model "
    b"group_token_threshold preview_char_length pattern path glob file_path absolute_path offset limit"
).split()
PATTERNS = (
    "a",
    "(?:.{0,99}m){9}zq",
    "(a*)*b",
    "\\p{Greek}+",
    "[",
    "(?i)" + "é" * 900,
    "\ud800",
    "",
    ".*" * 200,
)


def operations(chance: random.Random, number: int) -> Steps:
    target = chance.choice(OPERATIONS)
    key = some_key(chance)
    if chance.random() < 0.5:
        return [sized(number, target, key, odd_json(chance, PARAMETERS))]
    asked = {
        "messages": [user("x"), *called("{}", RESULT * chance.choice((1, 20))), user("y")],
        "store_dir": chance.choice(("/s", "/../..", "s\x00", "/" + "d" * 400, "")),
        "max_total_tokens": chance.choice((0, 100, -1, 1e300)),
        "pattern": chance.choice(PATTERNS),
        "path": chance.choice(("/s", "/", "..")),
        "glob": chance.choice(("*", "**/*", "[", "{a,b}" * 50, "*" * 200)),
        "absolute_path": chance.choice(("/s/x.txt", "/etc/passwd", "/s/../../x")),
        "offset": chance.choice((0, -1, 10**30)),
        "limit": chance.choice((1, 0, 10**30)),
    }
    wanted = {
        "/grep": ("pattern", "path", "glob"),
        "/read_file": ("absolute_path", "offset", "limit"),
    }.get(target, ("messages", "store_dir", "max_total_tokens"))
    body = json.dumps({name: asked[name] for name in wanted}).encode()
    return [sized(number, target, key, body)]


def compressed(chance: random.Random, data: bytes, name: str) -> bytes:
    """Return `data` in this coding, written in one of the possible ways."""
    match name:
        case "gzip":
            at = chance.randrange(len(data) + 1)
            members = (gzip.compress(data[:at], mtime=0), gzip.compress(data[at:], mtime=0))
            return chance.choice(
                (b"", gzip.compress(b"", mtime=0) * chance.choice((1, 2_000)))
            ).join(members)
        case "deflate":
            raw = zlib.compressobj(chance.choice((0, 9)), zlib.DEFLATED, chance.choice((-15, 15)))
            return raw.compress(data) + raw.flush()
        case "br":
            return bytes(brotli.compress(data, quality=1))
        case _:
            frames = [zstandard.compress(data), zstandard.compress(b"")]
            return b"".join(chance.choice((frames[:1], frames, frames[::-1])))


CODINGS = ("gzip", "deflate", "br", "zstd")
BOMB = 12 << 20
"""Bytes of a decompressed bomb: three times what the server accepts."""


def codings(chance: random.Random, number: int) -> Steps:
    """Send compressed bodies: layered, cut, damaged, followed by other bytes, or bombs."""
    data = chance.choice((chat(chance), chat(chance), b"", b"\x00" * BOMB))
    names = chance.choices(CODINGS, k=chance.choice((1, 1, 1, 2, 4, 6)))
    for name in names:
        data = compressed(chance, data, name)
    match chance.randrange(5):
        case 0:
            data = data[: chance.randrange(len(data) + 1)]
        case 1:
            data = mutated(chance, data)
        case 2:
            data += chance.choice((b"junk", b"\x00" * 100, data))
    said = names if chance.random() < 0.9 else chance.choices(CODINGS, k=2)
    field = b"Content-Encoding: " + ", ".join(said).encode()
    return [
        sized(
            number,
            chance.choice((CHAT, CHAT, CHAT, "/grep", "/v1/embeddings")),
            some_key(chance),
            data,
            field,
        )
    ]


# The rest


def relayed(chance: random.Random, number: int) -> Steps:
    method = chance.choice(("GET", "PUT", "DELETE", "PATCH", "POST", "HEAD", "OPTIONS"))
    target = chance.choice(
        ("/v1/models", "/v1/files", "/v1/responses", "/v1/a%2fb?x=%00", "/favicon.ico")
    )
    body = chance.choice((b"", b"x", chance.randbytes(chance.choice((100, 200_000)))))
    ends: Iterable[bytes] = (b"Content-Length: %d" % len(body),) if body else ()
    return [head(number, method, target, some_key(chance), *ends) + body]


def health(chance: random.Random, number: int) -> Steps:
    target = chance.choice(
        (
            "/health",
            "/health?deep=1",
            "/health/",
            "/metrics",
            "/_offload/",
            "/openapi.json",
            "/%68ealth",
        )
    )
    body = chance.choice((b"", b"x" * 10, b"x" * 300_000))
    begun = head(
        number,
        chance.choice(("GET", "HEAD", "POST", "PUT")),
        target,
        None,
        b"Content-Length: %d" % len(body),
    )
    return [begun + body]


def replies(chance: random.Random, number: int) -> Steps:
    """Send a valid request to the upstream that misbehaves."""
    extra = chance.choice(((), (b"Accept-Encoding: gzip, br, zstd",), (b"Connection: close",)))
    if chance.random() < 0.2:
        return [head(number, "GET", "/v1/models", ROUGH, *extra)]
    return [sized(number, CHAT, ROUGH, chat(chance), *extra), chance.choice((0.0, 0.3))]


def leaving(chance: random.Random, number: int) -> Steps:
    """Send a valid request, and leave before the reply ends."""
    asked = sized(number, CHAT, chance.choice((LOUD, ROUGH)), chat(chance))
    return [asked, chance.choice((0.0, 0.01, 0.1)), chance.choice((Act.RESET, Act.HALF_CLOSE))]


def garbage(chance: random.Random, number: int) -> Steps:
    return [
        chance.choice(
            (
                chance.randbytes(2000),
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"",
            )
        )
    ]


Maker = Callable[[random.Random, int], Steps]

KINDS: dict[str, Maker] = {
    "bodies": bodies,
    "chunked": chunked,
    "codings": codings,
    "early": early,
    "fields": fields,
    "garbage": garbage,
    "health": health,
    "large heads": large_heads,
    "leaving": leaving,
    "operations": operations,
    "pipelined": pipelined,
    "relayed": relayed,
    "replies": replies,
    "request line": request_line,
    "slow": slow,
}


def through_a_front(chance: random.Random, number: int) -> Steps:
    """Send a request as a front such as nginx passes it on: whole and correctly framed, with any
    body."""
    key = chance.choice((LOUD, "junk-3", "junk-4", None))
    target = chance.choice((CHAT, CHAT, "/v1/embeddings", *OPERATIONS))
    inside = (
        b"\r\nupgrade: h2c\r\n",
        b"\r\n\r\n",
        head(number, "GET", "/v1/smuggled", LOUD),
        b"h2c",
        b"0\r\n\r\n",
    )
    body = b"".join(
        b"x" * chance.choice((1, 50, 30_000)) + chance.choice(inside)
        for _ in range(chance.choice((1, 5)))
    )
    body = chance.choice(
        (
            body,
            chat(chance),
            odd_json(chance, MEMBERS),
            b"x" * (5 << 20) if chance.random() < 0.1 else b"",
        )
    )
    whole = sized(number, target, key, body, *chance.choice(((), (b"Content-Encoding: gzip",))))
    ends = whole.index(b"\r\n\r\n") + 4
    rest, size = whole[ends:], chance.choice((100, 70_000, 1 << 20))
    steps: Steps = [whole[:ends], chance.choice((0.0, 0.01))]
    for at in range(0, len(rest), max(size, len(rest) // 5)):
        steps += [rest[at : at + max(size, len(rest) // 5)], chance.choice((0.0, 0.003))]
    return steps
