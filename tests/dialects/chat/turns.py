"""Turns written down as transcripts: what upstream says in each round, what the client gets, what
is asked next."""

from __future__ import annotations

import json
from typing import Any

from proxy import sse
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.reply import ChatRoundRequest, ChatTurn

Json = dict[str, Any]

DONE = "[DONE]"
GREP, READ, SEARCH = (
    {"type": "function", "function": {"name": name}} for name in ("grep", "read_file", "search")
)


def asked(
    stream: bool = True, max_rounds: int = 8, injected: bool = True, **members: Any
) -> ChatRoundRequest:
    """A request with one tool of the client's; a member that is None is left out."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "tools": [SEARCH], "stream": stream, **members}
    request = CHAT.parse(
        json.dumps({key: value for key, value in body.items() if value is not None}).encode()
    )
    ours = [json.dumps(tool["function"]).encode() for tool in (GREP, READ)] if injected else []
    return ChatRoundRequest(request, request.entries, ours, max_rounds)


def turn(**asked_for: Any) -> ChatTurn:
    return ChatTurn(asked(**asked_for))


# -- what upstream says ----------------------------------------------------------------------------


def chunk(
    delta: Json | None = None, finish: str | None = None, id: str = "c1", **more: Any
) -> Json:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {
        "id": id,
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **more,
    }


def called(
    name: str, arguments: str = "{}", id: str = "call_1", index: int = 0, **more: Any
) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": id, "type": "function", "function": function, **more}


def more(arguments: str, index: int = 0) -> Json:
    return {"index": index, "function": {"arguments": arguments}}


def calls(*deltas: Json, **members: Any) -> Json:
    return {**members, "tool_calls": list(deltas)}


def usage(prompt: int, completion: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def stream(*events: Json | str | bytes) -> bytes:
    """Events as JSON, as data, or as the very bytes."""
    return b"".join(one if isinstance(one, bytes) else sse.encode(_data(one)) for one in events)


def whole(message: Json, finish: str = "stop", id: str = "c1", **members: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return json.dumps(
        {"id": id, "object": "chat.completion", "model": "m", "choices": [choice], **members}
    ).encode()


def _data(one: Json | str) -> bytes:
    return one.encode() if isinstance(one, str) else json.dumps(one).encode()


ROLE = chunk({"role": "assistant", "content": ""})
OURS = stream(
    ROLE,
    chunk({"content": "Let me look."}),
    chunk(calls(called("grep", '{"pat'))),
    chunk(calls(more('tern":"x"}'))),
    chunk({}, "tool_calls"),
    chunk(usage=usage(100, 10)),
    DONE,
)
"""A round in which one of our tools is called, after a word."""
SILENT = stream(
    ROLE, chunk(calls(called("grep"))), chunk({}, "tool_calls"), chunk(usage=usage(100, 10)), DONE
)
"""The same without a word."""
ANSWER = stream(
    chunk({"role": "assistant", "content": ""}, id="c2"),
    chunk({"content": "It is "}, id="c2"),
    chunk({"content": "42."}, id="c2"),
    chunk({}, "stop", id="c2"),
    chunk(usage=usage(150, 5), id="c2"),
    DONE,
)
MIXED = stream(
    ROLE,
    chunk(calls(called("search", '{"q":', "a", 0))),
    chunk(calls(called("read_file", '{"path":"p"}', "b", 1))),
    chunk(calls(more("1}"))),
    chunk(calls(called("search", "{}", "c", 2))),
    chunk({}, "tool_calls"),
    chunk(usage=usage(100, 10)),
    DONE,
)


# -- what a client makes of it ---------------------------------------------------------------------


def events(out: bytes) -> list[Any]:
    decoder = sse.EventDecoder()
    found = [event.data for event in decoder.feed(out) + decoder.flush() if event.data is not None]
    return [DONE if data == b"[DONE]" else json.loads(data) for data in found]


def folded(out: bytes) -> Json:
    """The whole reply that a stream amounts to: `message`, `finish`, `usage`, `logprobs`; one of
    each."""
    reply: Json = {"message": {}, "finish": None, "usage": None, "logprobs": []}
    for one in events(out):
        if one == DONE:
            continue
        reply["usage"] = one.get("usage") or reply["usage"]
        for choice in one["choices"]:
            _fold(reply["message"], choice.get("delta") or {})
            reply["finish"] = choice["finish_reason"] or reply["finish"]
            reply["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
    return reply


def _fold(message: Json, delta: Json) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for entry in value or ():
                _fold_call(message.setdefault(key, []), entry)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif isinstance(value, list):
            message[key] = (message.get(key) or []) + value
        elif value is not None:
            message[key] = value


def _fold_call(made: list[Json], entry: Json) -> None:
    """As the strictest clients do it: calls are numbered 0, 1, 2 without a gap, in this order."""
    index = entry["index"]
    assert index in range(len(made) + 1), entry
    if index == len(made):
        made.append({"function": {"name": "", "arguments": ""}})
    call = made[index]
    call |= {key: value for key, value in entry.items() if key not in ("index", "function")}
    for key, value in (entry.get("function") or {}).items():
        known = call["function"].get(key, "")
        # some servers do, and it is passed on as it came
        repeated = key == "name" and value == known
        call["function"][key] = known if repeated else known + (value or "")


def read(out: bytes) -> Json:
    """The same of a reply that was no stream."""
    reply = json.loads(out)
    [choice] = reply["choices"]
    message = {key: value for key, value in choice["message"].items() if value is not None}
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return {
        "message": message,
        "finish": choice["finish_reason"],
        "usage": reply.get("usage"),
        "logprobs": logprobs,
    }


def made(reply: Json) -> list[tuple[str, str, str]]:
    """The calls in a folded reply: id, name, arguments."""
    calls = reply["message"].get("tool_calls", [])
    return [
        (call.get("id", ""), call["function"]["name"], call["function"]["arguments"])
        for call in calls
    ]


def text(reply: Json) -> str:
    return reply["message"].get("content") or ""
