"""A scripted upstream on loopback that is as strict as the real one. See `StrictUpstream`.

    with StrictUpstream() as up:
        up.script(calls(("grep", {"pattern": "x"})), text("Done."))
        client = openai.OpenAI(base_url=up.url, api_key="k")

It runs in a thread with its own event loop, so both sync and async tests can use it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.strict import Json, Refused, Rules, Segment, check, parse, prompt_segments


class End(Enum):
    """How a reply can end early."""

    HANG = "hang"
    """Upstream sends nothing more, and the connection stays open."""
    DROP = "drop"
    """Upstream cuts the connection."""


HANG, DROP = End.HANG, End.DROP
Piece = bytes | float | End
"""Bytes to send, seconds to wait, or the end. The reply's head is sent with the first bytes, not before."""


@dataclass
class Recorded:
    """A request as it arrived. `target` is the raw path with its query; header names are in lower case, in order."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    at: float = field(default_factory=time.monotonic)
    refused: Refused | None = None
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the peer went away before the reply was complete."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when this upstream has finished with the request, however it ended."""
    cached_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def is_chat(self) -> bool:
        return self.method == "POST" and self.path.endswith("/chat/completions")

    @cached_property
    def json(self) -> Json:
        """The parsed body. Raises `Refused` if it is not an object."""
        return parse(self.body)

    @property
    def messages(self) -> list[Json]:
        messages: list[Json] = self.json["messages"]
        return messages

    @cached_property
    def raw_messages(self) -> list[bytes]:
        """Every message as the bytes that arrived."""
        return [bytes(raw) for raw in msgspec.json.decode(self.body, type=_RawBody).messages]

    @property
    def tool_names(self) -> list[str]:
        return [tool[tool["type"]]["name"] for tool in self.json.get("tools") or ()]

    def header(self, name: str) -> str | None:
        """Return the first value of this header, or None."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key == wanted), None)


class _RawBody(msgspec.Struct):
    messages: list[msgspec.Raw]


# Replies


Call = tuple[str, Any] | tuple[str, Any, str]
"""Name, arguments (an object, or a string that is sent as it is) and id. Without an id, one is made up."""


@dataclass(frozen=True)
class Message:
    """An assistant message, sent whole or streamed as the request asks. Made by `text`, `calls` and `mixed`."""

    content: str | None = None
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    finish: str | None = None
    """The finish reason. None means tool_calls if there are calls, else stop."""
    split: int = 16
    """Characters in each delta of text or arguments."""
    pause: float = 0.0
    """Seconds between events."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other members of the message, such as `refusal`. A stream has them in its first delta."""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Pieces:
    """A reply given byte for byte."""

    pieces: Iterable[Piece]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("content-type", "text/event-stream"),)


@dataclass(frozen=True)
class Cut:
    """A message cut off after `after` events of a stream, or after so many bytes of a whole reply."""

    message: Message
    after: int
    then: End = HANG


Reply = Message | Pieces | Cut
Responder = Callable[[Recorded], Reply]


def text(content: str, **options: Any) -> Message:
    """Return a reply of text. `options` are `Message`'s other fields."""
    return Message(content, **options)


def calls(*made: Call, **options: Any) -> Message:
    """Return a reply that only calls tools."""
    return Message(None, made, **options)


def mixed(content: str, *made: Call, **options: Any) -> Message:
    """Return a reply with text and calls."""
    return Message(content, made, **options)


def error(status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Pieces:
    """Return an error reply, by default with a body in OpenAI's shape."""
    if body is None:
        body = {"error": {"message": f"scripted {status}", "type": "server_error", "param": None, "code": None}}
    return whole(body, status, headers)


def whole(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Pieces:
    """Return a reply of this JSON, even if the request asks for a stream. Bytes are sent as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    described = (("content-type", "application/json"), ("content-length", str(len(raw))))
    return Pieces([raw], status, (*described, *(headers or {}).items()))


def pieces(*made: Piece, status: int = 200, headers: Mapping[str, str] | None = None) -> Pieces:
    """Return a reply of these pieces, as SSE unless `headers` say otherwise."""
    return Pieces(made, status, tuple((headers or {"content-type": "text/event-stream"}).items()))


def hang() -> Pieces:
    """Return a reply of which not even the head is sent."""
    return pieces(HANG)


def drop() -> Pieces:
    """Return a reply that cuts the connection before the first byte."""
    return pieces(DROP)


def endless(piece: bytes | None = None, pause: float = 0.001) -> Pieces:
    """Return a stream that never ends, by default of content deltas."""
    if piece is None:
        piece = _event(_chunk({"id": "chatcmpl-endless", "created": 0, "model": "endless"}, {"content": "more "}))
    return Pieces(itertools.cycle((piece, pause)))


# The server


class StrictUpstream:
    """OpenAI's chat completions on a loopback port, scripted. `url` ends in /v1.

    `strict` checks requests to `…/chat/completions`. A refused one gets 400 and uses no reply of the script. Any other
    request goes to the responder, or gets 404 if there is none. Leaving the block raises if a request was refused
    (unless `expect_refusals`), if the script ran out, or if the responder raised.
    """

    def __init__(self, rules: Rules | None = None, *, expect_refusals: bool = False, ssl: Json | None = None) -> None:
        self.rules = rules or Rules()
        self.requests: list[Recorded] = []
        self.faults: list[BaseException] = []
        self.expect_refusals = expect_refusals
        self._replies: deque[Reply] = deque()
        self._responder: Responder | None = None
        self._cache = PrefixCache()
        self._ids = itertools.count(1)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"{'https' if ssl else 'http'}://127.0.0.1:{self.port}/v1"
        quiet: Json = {"log_config": None, "access_log": False, "lifespan": "off", "proxy_headers": False}
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, http=_Protocol, interface="asgi3", **quiet, **(ssl or {}))
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), name="upstream", daemon=True)

    def script(self, *replies: Reply) -> None:
        """Answer the next chat requests with these, in the order in which the requests arrive."""
        self._replies.extend(replies)

    def respond(self, responder: Responder) -> None:
        """Call `responder`, in the server's thread, when the script is empty and for paths other than chat."""
        self._responder = responder

    @property
    def chats(self) -> list[Recorded]:
        """The chat requests that were accepted."""
        return [request for request in self.requests if request.is_chat and request.refused is None]

    @property
    def refusals(self) -> list[Refused]:
        return [request.refused for request in self.requests if request.refused is not None]

    @property
    def unused(self) -> int:
        """The number of scripted replies not used yet."""
        return len(self._replies)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._listener.close()
        if raised is None:
            self._raise_faults()

    def begin_anew(self) -> None:
        """Forget all requests and scripted replies, for the next test. Raises as leaving the block does."""
        self._raise_faults()
        self.requests.clear()
        self._replies.clear()

    def _raise_faults(self) -> None:
        if self.faults:
            raise self.faults[0]
        if self.refusals and not self.expect_refusals:
            raise AssertionError(f"upstream refused {len(self.refusals)}: {self.refusals[0].message}")

    async def _app(self, scope: Json, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        request = await _read(scope, receive)
        self.requests.append(request)
        leaving = asyncio.create_task(_leave(request, receive))
        answering = asyncio.create_task(_answer(self._reply(request), send, scope["extensions"]["transport"]))
        try:
            await asyncio.wait((leaving, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
            request.done.set()

    def _reply(self, request: Recorded) -> Pieces:
        try:
            if request.is_chat:
                check(request.json, self.rules)
                self._account(request)
            return self._render(self._next(request), request)
        except Refused as refused:
            request.refused = refused
            return whole(refused.body(), refused.status)
        except Exception as fault:  # noqa: BLE001 - a test's own fault: the thread tells the test when it ends
            self.faults.append(fault)
            return error(500)

    def _next(self, request: Recorded) -> Reply:
        if request.is_chat and self._replies:
            return self._replies.popleft()
        if self._responder is not None:
            return self._responder(request)
        if request.is_chat:
            raise AssertionError(f"the script is used up at request {len(self.requests)}")
        return error(404)

    def _account(self, request: Recorded) -> None:
        segments = prompt_segments(request.json, self.rules.count)
        request.prompt_tokens = sum(segment.tokens for segment in segments)
        request.cached_tokens = self._cache.visit(request.json["model"], segments)

    def _render(self, reply: Reply, request: Recorded) -> Pieces:
        if isinstance(reply, Pieces):
            return reply
        cut = reply if isinstance(reply, Cut) else None
        message = reply.message if isinstance(reply, Cut) else reply
        if not request.json.get("stream"):
            return self._whole(message, request, cut)
        events = list(self._events(message, request))
        ending: list[Piece] = [*events[: cut.after], cut.then] if cut else list(events)
        paused = [piece for event in ending for piece in (event, message.pause)] if message.pause else ending
        return Pieces(paused, headers=(("content-type", "text/event-stream; charset=utf-8"), *message.headers))

    def _whole(self, message: Message, request: Recorded, cut: Cut | None) -> Pieces:
        choice = {
            "index": 0,
            "message": {"role": "assistant", **_members(message, self._calls(message))},
            "logprobs": None,
            "finish_reason": _finish(message),
        }
        body = self._head(request) | {"object": "chat.completion", "choices": [choice]}
        reply = whole(body | {"usage": self._usage(message, request)})
        reply = replace(reply, headers=(*reply.headers, *message.headers))
        if cut is None:
            return reply
        raw = b"".join(piece for piece in reply.pieces if isinstance(piece, bytes))
        return replace(reply, pieces=[raw[: cut.after], cut.then])

    def _events(self, message: Message, request: Recorded) -> Iterator[bytes]:
        head = self._head(request)
        with_usage = bool((request.json.get("stream_options") or {}).get("include_usage"))
        null_usage = {"usage": None} if with_usage else {}
        for delta in _deltas(message, self._calls(message)):
            yield _event(_chunk(head, delta) | null_usage)
        yield _event(_chunk(head, {}, _finish(message)) | null_usage)
        if with_usage:
            yield _event(_chunk(head, None) | {"usage": self._usage(message, request)})
        yield b"data: [DONE]\n\n"

    def _head(self, request: Recorded) -> Json:
        return {
            "id": f"chatcmpl-{next(self._ids)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.json["model"],
            "system_fingerprint": "fp_scripted",
        }

    def _calls(self, message: Message) -> list[Json]:
        return [_call(call, f"call_{next(self._ids)}") for call in message.calls]

    def _usage(self, message: Message, request: Recorded) -> Json:
        said = "".join((message.reasoning or "", message.content or ""))
        said += "".join(name + _arguments(arguments) for name, arguments, *_ in message.calls)
        completion = self.rules.count(said)
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": request.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.rules.count(message.reasoning or "")},
        }


class PrefixCache:
    """Keeps the seen prompts as a trie of segments, and tells how much of the next one a prefix cache would have."""

    def __init__(self) -> None:
        self._roots: dict[str, dict[str, Any]] = {}

    def visit(self, model: str, segments: Sequence[Segment]) -> int:
        """Return the tokens of the longest prefix that an earlier request to `model` had, and remember this one."""
        node = self._roots.setdefault(model, {})
        cached, hitting = 0, True
        for segment in segments:
            if hitting and segment.text not in node:
                cached, hitting = cached + _shared(segment, node), False
            cached += segment.tokens if hitting else 0
            node = node.setdefault(segment.text, {})
        return cached


def _shared(segment: Segment, seen: Iterable[str]) -> int:
    """Return the tokens of the longest prefix that `segment` shares with one of `seen`."""
    shared = max((_common(segment.text, other) for other in seen), default=0)
    return segment.tokens * shared // len(segment.text)


def _common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


# HTTP


class _Protocol(HttpToolsProtocol):
    """Gives the application its connection, so that it can cut it, which ASGI has no message for."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"transport": self.transport}  # type: ignore[dict-item]


async def _read(scope: Json, receive: Callable[..., Any]) -> Recorded:
    body = bytearray()
    while True:
        event = await receive()
        body += event.get("body", b"")
        if not event.get("more_body"):
            break
    query = scope["query_string"]
    target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
    return Recorded(scope["method"], target, list(scope["headers"]), bytes(body))


async def _leave(request: Recorded, receive: Callable[..., Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.left.set()


async def _answer(reply: Pieces, send: Callable[..., Any], transport: asyncio.Transport) -> None:
    started = False
    async for piece in _paced(reply.pieces):
        if piece is DROP:
            transport.abort()
            return
        if not started:
            await send({"type": "http.response.start", "status": reply.status, "headers": _raw_headers(reply.headers)})
            started = True
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if not started:
        await send({"type": "http.response.start", "status": reply.status, "headers": _raw_headers(reply.headers)})
    await send({"type": "http.response.body", "body": b""})


async def _paced(made: Iterable[Piece]) -> AsyncIterator[bytes | End]:
    """Yield the bytes and the cut, each at its time. A hang lasts until the reader gives up."""
    for piece in made:
        if isinstance(piece, float | int):
            await asyncio.sleep(piece)
        elif piece is HANG:
            await asyncio.Event().wait()
        else:
            yield piece


def _raw_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


# Chat completions' shapes


def _finish(message: Message) -> str:
    return message.finish or ("tool_calls" if message.calls else "stop")


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call(call: Call, new_id: str) -> Json:
    name, arguments, *given = call
    function = {"name": name, "arguments": _arguments(arguments)}
    return {"id": given[0] if given else new_id, "type": "function", "function": function}


def _members(message: Message, made: list[Json]) -> Json:
    members: Json = {"content": message.content, "refusal": None, **message.extra}
    if message.reasoning is not None:
        members["reasoning_content"] = message.reasoning
    return members | ({"tool_calls": made} if made else {})


def _deltas(message: Message, made: list[Json]) -> Iterator[Json]:
    yield {"role": "assistant", "content": None if message.content is None else "", "refusal": None, **message.extra}
    for part in _split(message.reasoning or "", message.split):
        yield {"reasoning_content": part}
    for part in _split(message.content or "", message.split):
        yield {"content": part}
    for index, call in enumerate(made):
        opening = call | {"function": call["function"] | {"arguments": ""}}
        yield {"tool_calls": [{"index": index, **opening}]}
        for part in _split(call["function"]["arguments"], message.split):
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


def _split(value: str, size: int) -> list[str]:
    return [value[start : start + size] for start in range(0, len(value), size)]


def _chunk(head: Json, delta: Json | None, finish: str | None = None) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return head | {"choices": [] if delta is None else [choice]}


def _event(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
