"""A scripted stand-in for a model, and the upstream on loopback that serves it.

It decides only by the messages that reach it. So if the proxy takes a text away and does not give
it back, the answers show it.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from posixpath import dirname
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.tokens import Tokens

Json = dict[str, Any]

count = lru_cache(maxsize=4096)(Tokens().count)
"""Tokens of a text. An agent sends the same texts again and again."""

READ_SOURCE = "read_source"
TASK = """\
Find out how Python's standard library is written. Read these pages, one at a time:
{pages}"""
QUESTION = (
    "Quote the one line of `{path}` that begins with `{begins}`, exactly, and say nothing else."
)
FRAME = 4
"""Tokens of a message besides its text."""

_asked = re.compile(r"Quote the one line of `(?P<path>[^`]+)` that begins with `(?P<begins>[^`]+)`")
_listed = re.compile(r"`([^`]+)` from line (\d+)")
_reference = re.compile(r"\(detailed result is stored in (?P<file>[^;)\s]+)")
_found = re.compile(r"^File: (?P<file>\S+).*\n(?:\d+- .*\n)*(?P<line>\d+): ", re.MULTILINE)


class Said(NamedTuple):
    """A reply: its text, and the tool that it calls with which arguments."""

    text: str
    tool: str = ""
    arguments: Json | None = None


def text_of(message: Json) -> str:
    text: str = message.get("content") or ""
    return text


def moved_to(message: Json) -> str:
    """The file to which a tool result was moved; empty if it was not."""
    found = _reference.search(text_of(message)) if message["role"] == "tool" else None
    return found["file"] if found else ""


def reply(messages: Sequence[Json], tools: Sequence[str]) -> Said:
    """The scripted model's reply to these messages. It may call the tools with these names."""
    users = [message for message in messages if message["role"] == "user"]
    if asked := _asked.search(text_of(users[-1])):
        turn = messages[messages.index(users[-1]) + 1 :]
        return _answer(asked["path"], asked["begins"], turn, messages, tools)
    read = sum(message["role"] == "tool" for message in messages)
    wanted = _listed.findall(text_of(users[0]))[read:]
    if not wanted:
        return Said("That was the last page: I have read all of them.")
    return Said("", READ_SOURCE, {"path": wanted[0][0], "first": int(wanted[0][1])})


def _answer(
    path: str, begins: str, turn: Sequence[Json], messages: Sequence[Json], tools: Sequence[str]
) -> Said:
    """Quote the line from a page in sight, or search the moved pages, open the hit and quote what
    came back."""
    mine = [
        message
        for message in messages
        if message["role"] == "tool" and text_of(message).startswith(f"{path}, ")
    ]
    files = [file for file in map(moved_to, mine) if file]
    if not turn:
        lines = (
            line
            for message in mine
            if not moved_to(message)
            for line in text_of(message).splitlines()
        )
        if seen := next((line for line in lines if line.startswith(begins)), ""):
            return Said(seen)
        if not files or "grep" not in tools:
            return Said(f"I have no text of {path} any more.")
        return Said("", "grep", {"pattern": "^" + re.escape(begins), "path": dirname(files[0])})
    last = text_of(turn[-1])
    if turn[-2]["tool_calls"][0]["function"]["name"] == "read_file":
        return Said(last.partition("\n")[0])
    for hit in _found.finditer(last):
        if (file := f"{dirname(files[0])}/{hit['file']}") in files:
            return Said("", "read_file", {"path": file, "offset": int(hit["line"]), "limit": 1})
    return Said("I cannot find that line any more.")


# The upstream


class Sent(NamedTuple):
    """A request as it reached the upstream. `pieces`: its tools and messages, each with its
    tokens."""

    messages: list[Json]
    pieces: list[tuple[str, int]]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)

    def shares(self, other: Sent) -> int:
        """Tokens of the pieces with which both requests begin, as a provider's prompt cache needs
        it."""
        shared = 0
        for (one, tokens), (two, _) in zip(self.pieces, other.pieces, strict=False):
            if one != two:
                break
            shared += tokens
        return shared


def message_tokens(message: Json) -> int:
    """Text, each call's name and arguments, and the frame."""
    calls = [part for call in message.get("tool_calls") or () for part in call["function"].values()]
    return FRAME + sum(map(count, [text_of(message), *calls]))


class ScriptedUpstream:
    """Chat completions, not streamed. `requests` has what reached it."""

    def __init__(self) -> None:
        self.requests: list[Sent] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[ScriptedUpstream]:
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.should_exit = server.force_exit = True
                thread.join(5)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        tools = body.get("tools") or []
        said = reply(body["messages"], [tool["function"]["name"] for tool in tools])
        pieces = [(json.dumps(one), message_tokens(one)) for one in body["messages"]]
        sent = Sent(body["messages"], [(json.dumps(tools), count(json.dumps(tools))), *pieces])
        cached = max((earlier.shares(sent) for earlier in self.requests), default=0)
        self.requests.append(sent)
        completion = count(said.text) + FRAME
        message: Json = {"role": "assistant", "content": said.text}
        if said.tool:
            function = {"name": said.tool, "arguments": json.dumps(said.arguments or {})}
            message["tool_calls"] = [
                {"id": f"call_{len(self.requests)}", "type": "function", "function": function}
            ]
        choice = {
            "index": 0,
            "finish_reason": "tool_calls" if said.tool else "stop",
            "message": message,
        }
        usage = {
            "prompt_tokens": sent.tokens,
            "completion_tokens": completion,
            "total_tokens": sent.tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        head = {"id": f"chatcmpl-{len(self.requests)}", "object": "chat.completion", "created": 0}
        return JSONResponse({**head, "model": body["model"], "choices": [choice], "usage": usage})
