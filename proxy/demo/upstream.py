"""The embedded upstream: chat completions on loopback, answered by the scripted model.

It follows the real API's rules as far as the demo needs them: calls and results must be paired, usage is counted from
the request, and a stream carries `usage` last and only on demand.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proxy.demo import measure, model

Json = dict[str, Any]

DELTA = 24
"""Characters in one streamed piece."""


class ScriptedUpstream:
    """Runs in a thread for the block. `requests`: those that it answered; `refused`: why it refused others."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self.requests: list[measure.SentRequest] = []
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
        raw = await request.body()
        body = json.loads(raw)
        if fault := unpaired(body["messages"]):
            self.refused.append(fault)
            error = {"message": fault, "type": "invalid_request_error", "param": "messages", "code": None}
            return JSONResponse({"error": error}, status_code=400)
        said = model.reply(body["messages"], [tool["function"]["name"] for tool in body.get("tools") or ()])
        sent = measure.sent(raw, self._count, summary=said.summary)
        number, usage = len(self.requests), self._usage(sent, said)
        self.requests.append(sent)
        head = {"id": f"chatcmpl-{number}", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            return JSONResponse(_whole(head, said, number, usage))
        with_usage = (body.get("stream_options") or {}).get("include_usage")
        events = _events(head, said, number, usage if with_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")

    def _usage(self, sent: measure.SentRequest, said: model.ScriptedReply) -> Json:
        cached = max((measure.shared_tokens(earlier, sent) for earlier in self.requests), default=0)
        completion = self._count(said.text) + (self._count(json.dumps(said.call.arguments)) if said.call else 0)
        return {
            "prompt_tokens": sent.tokens,
            "completion_tokens": completion,
            "total_tokens": sent.tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def unpaired(messages: Sequence[Json]) -> str | None:
    """The fault for which OpenAI would refuse these messages; None if results directly follow the calls they answer."""
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
    return f"these calls have no result: {', '.join(sorted(waiting))}" if waiting else None


def _whole(head: Json, said: model.ScriptedReply, number: int, usage: Json) -> Json:
    calls = {"tool_calls": [_call(said.call, number)]} if said.call else {}
    message = {"role": "assistant", "content": said.text or None, **calls}
    choice = {"index": 0, "message": message, "finish_reason": _finish(said)}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}


def _events(head: Json, said: model.ScriptedReply, number: int, usage: Json | None) -> Iterator[str]:
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": said.text[start : start + DELTA]} for start in range(0, len(said.text), DELTA)]
    if said.call:
        deltas.append({"tool_calls": [{"index": 0, **_call(said.call, number)}]})
    for delta in deltas:
        yield _event(head, [{"index": 0, "delta": delta, "finish_reason": None}])
    yield _event(head, [{"index": 0, "delta": {}, "finish_reason": _finish(said)}])
    if usage:
        yield _event(head, [], usage=usage)
    yield "data: [DONE]\n\n"


def _event(head: Json, choices: list[Json], **members: Json) -> str:
    chunk = {**head, "object": "chat.completion.chunk", "choices": choices, **members}
    return f"data: {json.dumps(chunk)}\n\n"


def _call(call: model.ScriptedCall, number: int) -> Json:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _finish(said: model.ScriptedReply) -> str:
    return "tool_calls" if said.call else "stop"
