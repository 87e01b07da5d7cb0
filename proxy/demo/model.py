"""A scripted stand-in for a model, and the upstream on loopback that serves it.

It decides only by the messages that reach it. So if the proxy takes a text away and does not give it back, the answers
show it. The upstream is strict about pairs of calls and results, as the real API is.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from posixpath import basename, dirname
from types import TracebackType
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
Count = Callable[[str], int]

TASK = """\
Find out how Python's standard library is written. Read these modules from the first to the last line, a page at a \
time: {modules}. Note on each page what it defines."""
QUESTION = "Quote the one line of `{path}` that begins with `{begins}`, exactly, and say nothing else."
FRAME = 4
"""Tokens of a message besides its text."""

_asked = re.compile(r"Quote the one line of `(?P<path>[^`]+)` that begins with `(?P<begins>[^`]+)`")
_page = re.compile(r"(?P<path>[\w./]+\.py), lines (?P<first>\d+)-(?P<last>\d+) of (?P<of>\d+)")
_reference = re.compile(r"\(detailed result is stored in (?P<file>[^;)\s]+)")
_definition = re.compile(r"^(?:class|def|async def) (\w+)", re.MULTILINE)
_found = re.compile(r"^File: (?P<file>\S+).*\n(?:\d+- .*\n)*(?P<line>\d+): ", re.MULTILINE)


class Said(NamedTuple):
    """A reply: its text, and the tool that it calls with which arguments."""

    text: str
    tool: str = ""
    arguments: Json | None = None


class Page(NamedTuple):
    """A page that was read, as far as the messages still show it. `file`: where a reference says that it was moved."""

    path: str
    last: int
    of: int
    text: str
    file: str


def text_of(message: Json) -> str:
    """A message's text, whichever form its content has."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def moved_to(message: Json) -> str:
    """The file to which a tool result was moved; empty if it was not."""
    found = _reference.search(text_of(message)) if message["role"] == "tool" else None
    return found["file"] if found else ""


def reply(messages: Sequence[Json], tools: Sequence[str]) -> Said:
    """The scripted model's reply to these messages. It may call the tools with these names."""
    request = next(message for message in reversed(messages) if message["role"] == "user")
    pages = list(_pages(messages))
    if asked := _asked.search(text_of(request)):
        turn = messages[messages.index(request) + 1 :]
        return _answer(asked["path"], asked["begins"], turn, pages, tools)
    return _read_on(messages, pages)


def _pages(messages: Sequence[Json]) -> Iterator[Page]:
    """The pages that tool results show, whole or moved."""
    for message in messages:
        text = text_of(message)
        if message["role"] == "tool" and (found := _page.match(text)):
            yield Page(found["path"], int(found["last"]), int(found["of"]), text, moved_to(message))


def _read_on(messages: Sequence[Json], pages: Sequence[Page]) -> Said:
    """Note what the last page defines, and read the next one of the named modules."""
    seen = text_of(messages[-1])
    names = _definition.findall(seen)
    note = f"{len(names)} definitions, from {names[0]} to {names[-1]}. " if names else ""
    task = next(text_of(message) for message in messages if message["role"] == "user")
    for path in re.findall(r"`([^`]+\.py)`", task):
        read = max((page for page in pages if page.path == path), key=lambda page: page.last, default=None)
        if read is None or read.last < read.of:
            return Said(note, "read_source", {"path": path, "first": read.last + 1 if read else 1})
    return Said(f"{note}That was the last page: I have read all of them.")


def _answer(path: str, begins: str, turn: Sequence[Json], pages: Sequence[Page], tools: Sequence[str]) -> Said:
    """Quote the line from a page in sight, or search the moved pages, open the hit and quote what came back."""
    mine = [page for page in pages if page.path == path]
    files = [page.file for page in mine if page.file]
    if not turn:
        for line in (line for page in mine if not page.file for line in page.text.splitlines()):
            if line.startswith(begins):
                return Said(line)
        if not files or not (grep := _named("grep", tools)):
            return Said(f"I have no text of {path} any more.")
        return Said("", grep, {"pattern": "^" + re.escape(begins), "path": dirname(files[0])})
    last, called = text_of(turn[-1]), turn[-2]["tool_calls"][0]["function"]
    if called["name"].endswith("read_file"):
        return Said(last.partition("\n")[0])
    hits = list(_found.finditer(last))
    hit = next((hit for hit in hits if hit["file"] in map(basename, files)), hits[0] if hits else None)
    if hit is None:
        return Said("I cannot find that line any more.")
    place = {"path": f"{json.loads(called['arguments'])['path']}/{hit['file']}", "offset": int(hit["line"]), "limit": 1}
    return Said("", _named("read_file", tools), place)


def _named(tool: str, tools: Sequence[str]) -> str:
    """The name of one of the proxy's tools in this request; empty if it lacks it."""
    return next((name for name in tools if name in (tool, f"offload_{tool}")), "")


# The upstream


class Sent(NamedTuple):
    """A request as it reached the upstream. `pieces`: its tools and messages, each with its tokens."""

    messages: list[Json]
    pieces: list[tuple[str, int]]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)

    def shares(self, other: Sent) -> int:
        """Tokens of the pieces with which both requests begin, as a provider's prompt cache needs it."""
        shared = 0
        for (one, tokens), (two, _) in zip(self.pieces, other.pieces, strict=False):
            if one != two:
                break
            shared += tokens
        return shared


def message_tokens(message: Json, count: Count) -> int:
    """Text, each call's name and arguments, and the frame."""
    calls = [part for call in message.get("tool_calls") or () for part in call["function"].values()]
    return FRAME + sum(map(count, [text_of(message), *calls]))


def unpaired(messages: Sequence[Json]) -> str:
    """Why OpenAI would refuse these messages; empty if results directly follow the calls that they answer."""
    waiting: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return f"{message['tool_call_id']} is a result of no call"
            waiting.remove(message["tool_call_id"])
        elif waiting:
            break
        else:
            waiting = {call["id"] for call in message.get("tool_calls") or ()}
    return f"these calls have no result: {', '.join(sorted(waiting))}" if waiting else ""


class ScriptedUpstream:
    """Serves chat completions in a thread for the block. `refused`: why it refused requests."""

    def __init__(self, count: Count) -> None:
        self.requests: list[Sent] = []
        self.refused: list[str] = []
        self._count = count
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)
        self._listener.close()

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if fault := unpaired(body["messages"]):
            self.refused.append(fault)
            return JSONResponse({"error": {"message": fault, "type": "invalid_request_error"}}, status_code=400)
        tools = body.get("tools") or []
        said = reply(body["messages"], [tool["function"]["name"] for tool in tools])
        pieces = [(json.dumps(one), message_tokens(one, self._count)) for one in body["messages"]]
        sent = Sent(body["messages"], [(json.dumps(tools), self._count(json.dumps(tools))), *pieces])
        cached = max((earlier.shares(sent) for earlier in self.requests), default=0)
        completion = self._count(said.text) + FRAME
        usage: Json = {"prompt_tokens": sent.tokens, "completion_tokens": completion}
        usage |= {"total_tokens": sent.tokens + completion, "prompt_tokens_details": {"cached_tokens": cached}}
        number = len(self.requests)
        self.requests.append(sent)
        message: Json = {"role": "assistant", "content": said.text}
        if said.tool:
            function = {"name": said.tool, "arguments": json.dumps(said.arguments or {})}
            message["tool_calls"] = [{"index": 0, "id": f"call_{number}", "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "tool_calls" if said.tool else "stop"}
        head = {"id": f"chatcmpl-{number}", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            whole = {"object": "chat.completion", "choices": [choice | {"message": message}], "usage": usage}
            return JSONResponse(head | whole)
        events: list[Json] = [{"choices": [{"index": 0, "delta": message}]}, {"choices": [choice | {"delta": {}}]}]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(head | {'object': 'chat.completion.chunk'} | event)}\n\n" for event in events]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")
