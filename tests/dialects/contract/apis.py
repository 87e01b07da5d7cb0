"""The three APIs behind one interface: how each writes a reply, and what its client makes of it.

A reply is a list of blocks, each a kind and a text. `ours` and `theirs` are calls with the text as
their argument, and `server` is a call that upstream executes itself. Chat has none of these, and
its client sees no order among texts, thoughts and calls.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.dialects.turn import Turn
from tests.dialects.chat import turns as chat
from tests.dialects.contract import sdks
from tests.dialects.messages import api as messages_api
from tests.dialects.messages import turns as messages
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import turns as responses
from tests.dialects.scripted import encoded
from tests.dialects.turning import events

Json = dict[str, Any]
Encodings = dict[str, Callable[[Json], bytes]]


class Block(NamedTuple):
    kind: str
    text: str


class Round(NamedTuple):
    """What the model says in one round; `cut` if it was stopped within."""

    blocks: Sequence[Block]
    cut: bool = False


def think(text: str = "hm") -> Block:
    return Block("think", text)


def text(text: str = "So.") -> Block:
    return Block("text", text)


def ours(text: str = "x") -> Block:
    return Block("ours", text)


def theirs(text: str = "q") -> Block:
    return Block("theirs", text)


def server(text: str = "w") -> Block:
    return Block("server", text)


class Api(ABC):
    """One API as the contract sees it."""

    dialect: ClassVar[Dialect]
    ordered = True
    """Whether the client sees in which order the blocks came."""
    json_mode: ClassVar[Json]
    """The members of a request that wants JSON."""

    @abstractmethod
    def turn(self, *, stream: bool = True, **members: Any) -> Turn: ...

    @abstractmethod
    def reply(self, said: Round, number: int) -> Json:
        """The whole reply of round `number`, from 1 on."""

    @property
    @abstractmethod
    def encodings(self) -> Encodings:
        """The ways in which servers stream a reply. The first one is the API's own."""

    @property
    def odd(self) -> Encodings:
        """Ways of other servers that the SDKs do not read."""
        return {}

    @abstractmethod
    def assembled(self, out: bytes) -> Json:
        """What the SDK makes of a stream, after everything that a strict client could complain
        about."""

    @abstractmethod
    def blocks(self, reply: Json) -> list[Block]: ...

    @abstractmethod
    def usage(self, reply: Json) -> tuple[int, int]:
        """The tokens of the prompt and of the completion."""

    def whole(self, reply: Json) -> bytes:
        return json.dumps(reply, separators=(",", ":")).encode()

    def put_back(self, turn: Turn, reply: Json) -> list[Block]:
        """What goes upstream of this reply with the client's next request."""
        entry = self.entry(reply)
        hidden = turn.hidden and self.dialect.paired(turn.hidden, entry)
        sent = self.dialect.reinserted(hidden, entry) if hidden else [entry]
        return self.entries(json.loads(b"[%b]" % b",".join(map(bytes, sent))))

    @abstractmethod
    def entries(self, entries: list[Json]) -> list[Block]:
        """The blocks of entries in a request. A result of a call of ours is one, too."""

    @abstractmethod
    def entry(self, reply: Json) -> bytes:
        """The entry with which the client sends the reply back."""


class Chat(Api):
    dialect = CHAT
    ordered = False
    json_mode: ClassVar[Json] = {"response_format": {"type": "json_object"}}

    def turn(self, *, stream: bool = True, **members: Any) -> Turn:
        return chat.turn(
            stream=stream, stream_options={"include_usage": True} if stream else None, **members
        )

    def reply(self, said: Round, number: int) -> Json:
        joined = {
            kind: "".join(one.text for one in said.blocks if one.kind == kind)
            for kind in ("think", "text")
        }
        called = [
            chat.called(*_called(one, "search"), f"call_{number}_{place}", index)
            for index, (place, one) in enumerate(
                (place, one)
                for place, one in enumerate(said.blocks)
                if one.kind in ("ours", "theirs")
            )
        ]
        message: Json = {"content": joined["text"] or None}
        message |= {"reasoning_content": joined["think"]} if joined["think"] else {}
        message |= {"tool_calls": called} if called else {}
        finish = "length" if said.cut else "tool_calls" if called else "stop"
        reply: Json = json.loads(
            chat.whole(message, finish, f"c{number}", usage=chat.usage(100 * number, 10))
        )
        return reply

    @property
    def encodings(self) -> Encodings:
        ways = ("own", "large", "in pieces", "always 0", "no index", "repeating")
        return {way: partial(_streamed, way) for way in ways}

    @property
    def odd(self) -> Encodings:
        return {"late id": partial(_streamed, "late id")}

    def assembled(self, out: bytes) -> Json:
        chat.folded(out)  # which is strict about the numbers of calls
        return sdks.chat(out)

    def blocks(self, reply: Json) -> list[Block]:
        return self.entries([reply["choices"][0]["message"]])

    def entries(self, entries: list[Json]) -> list[Block]:
        found: list[Block] = []
        for message in entries:
            if message["role"] == "tool":
                found.append(Block("result", message["content"]))
                continue
            found += [
                think(message.get("reasoning_content") or ""),
                text(message.get("content") or ""),
            ]
            calls = (call["function"] for call in message.get("tool_calls") or [])
            found += [_call(json.loads(call["arguments"])) for call in calls]
        return [one for one in found if one.text]

    def usage(self, reply: Json) -> tuple[int, int]:
        used = reply["usage"]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        return used["prompt_tokens"], used["completion_tokens"]

    def entry(self, reply: Json) -> bytes:
        message = reply["choices"][0]["message"]
        known = ("role", "content", "reasoning_content", "tool_calls")
        return json.dumps({key: message[key] for key in known if message.get(key)}).encode()


def _streamed(way: str, reply: Json) -> bytes:
    """The stream of a chat reply whose calls come in this way."""
    choice, id = reply["choices"][0], reply["id"]
    message = choice["message"]
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in message.get("reasoning_content") or ""]
    deltas += [{"content": piece} for piece in message.get("content") or ""]
    deltas += [
        chat.calls(entry) for call in message.get("tool_calls", []) for entry in _entries(way, call)
    ]
    ends = chat.chunk({}, choice["finish_reason"], id), chat.chunk(id=id, usage=reply["usage"])
    return chat.stream(*(chat.chunk(delta, id=id) for delta in deltas), *ends, chat.DONE)


def _entries(way: str, call: Json) -> list[Json]:
    place, name = call["index"], call["function"]["name"]
    arguments = call["function"]["arguments"]
    whole = {key: value for key, value in call.items() if key != "index"}
    begun = {**whole, "function": {"name": name, "arguments": ""}}
    if way == "own":
        return [call]
    if way == "large":
        halves = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
        return [
            {**call, "function": {"arguments": piece} | ({} if at else {"name": name})}
            for at, piece in enumerate(halves)
        ]
    if way == "always 0":
        return [{"index": 0, **whole}]
    if way == "no index":
        return [begun, *({"function": {"arguments": piece}} for piece in arguments)]
    if way == "late id":
        return [
            {"function": begun["function"]},
            *({"id": call["id"], "function": {"arguments": a}} for a in arguments),
        ]
    if way == "repeating":
        return [{**call, "function": {"name": name, "arguments": piece}} for piece in arguments]
    first = {"index": place, **begun, "function": {"name": name[:2], "arguments": ""}}
    pieces = ({"index": place, "function": {"arguments": piece}} for piece in arguments)
    return [first, {"index": place, "function": {"name": name[2:]}}, *pieces]


class Messages(Api):
    dialect = MESSAGES
    json_mode: ClassVar[Json] = {"output_config": {"format": {"type": "json_schema", "schema": {}}}}

    def turn(self, *, stream: bool = True, **members: Any) -> Turn:
        return messages.turn(stream=stream, **members)

    def reply(self, said: Round, number: int) -> Json:
        stopped: Json = {"stop_reason": "max_tokens"} if said.cut else {}
        made = messages.message(*map(self.block, said.blocks), number=number, **stopped)
        for place, block in enumerate(made["content"]):
            block |= (
                {"id": f"srvtoolu_{number}_{place}"} if block["type"] == "server_tool_use" else {}
            )
        return made

    @staticmethod
    def block(one: Block) -> Json:
        if one.kind == "server":
            return {"type": "server_tool_use", "name": "web_search", "input": {"query": one.text}}
        if one.kind in ("ours", "theirs"):
            name, arguments = _called(one, "fetch")
            return messages_api.call(name, json.loads(arguments))
        return (
            messages_api.thinking(one.text) if one.kind == "think" else messages_api.say(one.text)
        )

    @property
    def encodings(self) -> Encodings:
        return {"own": messages.stream, "large": lambda reply: messages.stream(reply, 1_000)}

    @property
    def odd(self) -> Encodings:
        def nameless(reply: Json) -> bytes:
            return b"\n".join(
                line
                for line in messages.stream(reply).split(b"\n")
                if not line.startswith(b"event")
            )

        def unnumbered(reply: Json) -> bytes:
            found = messages_api.events_of(reply)
            return b"".join(
                encoded({key: one[key] for key in one if key != "index"}) for one in found
            )

        untyped = partial(_untyped, messages.stream)
        return {"nameless": nameless, "unnumbered": unnumbered, "untyped": untyped}

    def assembled(self, out: bytes) -> Json:
        out = out.replace(b'{"untyped":', b'{"type":')
        made = messages.accumulated(out)
        assert made["content"] == sdks.messages(_named(out))["content"]
        return made

    def blocks(self, reply: Json) -> list[Block]:
        return self.entries([reply])

    def entries(self, entries: list[Json]) -> list[Block]:
        blocks = [
            block
            for entry in entries
            for block in (entry["content"] if "role" in entry else [entry])
        ]
        return list(map(self._read, blocks))

    def _read(self, block: Json) -> Block:
        kind = block["type"]
        if kind == "server_tool_use":
            return server(block["input"]["query"])
        if kind == "tool_use":
            return _call(block["input"])
        if kind == "tool_result":
            return Block("result", block["content"])
        return think(block["thinking"]) if kind == "thinking" else text(block["text"])

    def usage(self, reply: Json) -> tuple[int, int]:
        used = reply["usage"]
        return used["input_tokens"] + used["cache_read_input_tokens"], used["output_tokens"]

    def entry(self, reply: Json) -> bytes:
        return json.dumps({"role": "assistant", "content": reply["content"]}).encode()


def _untyped(stream: Callable[[Json], bytes], reply: Json) -> bytes:
    """A stream of which only the names of the events say their types."""
    return stream(reply).replace(b'data: {"type":', b'data: {"untyped":')


def _named(out: bytes) -> bytes:
    """The stream with the names of its events, which the SDK needs."""
    return b"".join(encoded(event) for event in events(out))


class Responses(Api):
    dialect = RESPONSES
    json_mode: ClassVar[Json] = {
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}
    }

    def turn(self, *, stream: bool = True, **members: Any) -> Turn:
        return responses.turn(stream=stream, **members)

    def reply(self, said: Round, number: int) -> Json:
        return responses.response(
            *map(self.item, said.blocks),
            number=number,
            status="incomplete" if said.cut else "completed",
        )

    @staticmethod
    def item(one: Block) -> Json:
        if one.kind == "server":
            return {
                "type": "web_search_call",
                "status": "completed",
                "action": {"type": "search", "query": one.text},
            }
        if one.kind in ("ours", "theirs"):
            return responses_api.call(*_called(one, "fetch"))
        return (
            responses_api.reasoning(one.text)
            if one.kind == "think"
            else responses_api.say(one.text)
        )

    @property
    def encodings(self) -> Encodings:
        return {"own": responses.stream, "large": lambda reply: responses.stream(reply, 1_000)}

    @property
    def odd(self) -> Encodings:
        def few_words(reply: Json) -> bytes:
            """Codex's own test server sends only the last event of each item."""
            kept = ("response.created", "response.output_item.done", f"response.{reply['status']}")
            found = [event for event in responses_api.events_of(reply) if event["type"] in kept]
            numbered = [event | {"sequence_number": number} for number, event in enumerate(found)]
            return b"".join(map(encoded, numbered))

        def ids_alone(reply: Json) -> bytes:
            """llama.cpp says by an id alone which item an event is about, and ends all items at the
            end."""
            found, ids = list(responses_api.events_of(reply)), {}
            for event in found:
                event.pop("output_index", None)
                event.pop("sequence_number")
                item = event.get("item", {})
                ids[item.get("id")] = item.get("call_id", item.get("id"))
                event |= {"item_id": ids[event["item_id"]]} if "item_id" in event else {}
            found[:-1] = sorted(
                found[:-1], key=lambda event: event["type"] == "response.output_item.done"
            )
            return b"".join(map(encoded, found))

        def one_index(reply: Json) -> bytes:
            """Some gateways count texts and calls each from 0."""
            found = responses_api.events_of(reply)
            return b"".join(
                encoded(event | {"output_index": 0} if "output_index" in event else event)
                for event in found
            )

        def new_ids(reply: Json) -> bytes:
            """Copilot encrypts the ids, each time anew."""
            found = list(responses_api.events_of(reply))
            for event in found:
                event |= {"item_id": f"{event['sequence_number']}"} if "item_id" in event else {}
                event |= (
                    {"item": event["item"] | {"id": "it"}}
                    if event["type"] == "response.output_item.added"
                    else {}
                )
            return b"".join(map(encoded, found))

        def no_ends(reply: Json) -> bytes:
            """Some servers end all items with the reply."""
            found = responses_api.events_of(reply)
            return b"".join(
                encoded(event) for event in found if event["type"] != "response.output_item.done"
            )

        odd = {
            "few words": few_words,
            "ids alone": ids_alone,
            "one index": one_index,
            "new ids": new_ids,
        }
        return odd | {"no ends": no_ends, "no types": partial(_untyped, responses.stream)}

    def assembled(self, out: bytes) -> Json:
        made = responses.accumulated(out)
        assert self.blocks(made) == self.blocks(sdks.responses(out))
        return made

    def blocks(self, reply: Json) -> list[Block]:
        return self.entries(reply["output"])

    def entries(self, entries: list[Json]) -> list[Block]:
        flat = [item for one in entries for item in (one if isinstance(one, list) else [one])]
        return list(map(self._read, flat))

    def _read(self, item: Json) -> Block:
        kind = item["type"]
        if kind == "web_search_call":
            return server(item["action"]["query"])
        if kind == "function_call":
            return _call(json.loads(item["arguments"]))
        if kind == "function_call_output":
            return Block("result", item["output"])
        return (
            think(item["summary"][0]["text"])
            if kind == "reasoning"
            else text(item["content"][0]["text"])
        )

    def usage(self, reply: Json) -> tuple[int, int]:
        used = reply["usage"]
        assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
        return used["input_tokens"], used["output_tokens"]

    def entry(self, reply: Json) -> bytes:
        return b",".join(json.dumps(item).encode() for item in reply["output"])


def _call(arguments: Json) -> Block:
    return ours(arguments["pattern"]) if "pattern" in arguments else theirs(arguments["q"])


def _called(one: Block, fetch: str) -> tuple[str, str]:
    """The name and the arguments of a call."""
    return (
        ("grep", json.dumps({"pattern": one.text}))
        if one.kind == "ours"
        else (fetch, json.dumps({"q": one.text}))
    )


APIS: dict[str, Api] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}


def expected(
    api: Api, rounds: Sequence[Round], *, json_mode: bool = False, aloud: bool = False
) -> list[Block]:
    """What the client should see: everything in its order, but our calls; of hidden rounds no JSON,
    and nothing that belongs to what it does not see, but for thinking that comes before any call of
    ours (`aloud`)."""
    shown: list[Block] = []
    texts: dict[str, list[str]] = {"think": [], "text": []}
    for number, said in enumerate(rounds):
        goes_on = number < last_round(rounds)
        kept: list[Block] = []
        visible = not goes_on  # whether what directly follows is seen
        for place, one in reversed([*enumerate(said.blocks)]):
            if one.kind != "think" or not isinstance(api, Responses):
                visible = one.kind != "ours" and not (goes_on and json_mode and one.kind == "text")
            live = (
                aloud
                and not number
                and one.kind == "think"
                and all(b.kind != "ours" for b in said.blocks[:place])
            )
            kept += [one] if visible or live else []
        shown += kept[::-1]
        for kind in texts:
            said_so = "".join(one.text for one in kept[::-1] if one.kind == kind)
            texts[kind] += [said_so] if said_so else []
        if not goes_on:
            break
    if api.ordered:
        return shown
    joined = [Block(kind, "\n\n".join(found)) for kind, found in texts.items() if found]
    return [*joined, *(one for one in shown if one.kind == "theirs")]


def last_round(rounds: Sequence[Round]) -> int:
    """The round with which the client's reply ends."""
    for number, said in enumerate(rounds):
        kinds = {one.kind for one in said.blocks}
        if said.cut or "theirs" in kinds or "ours" not in kinds:
            return number
    raise AssertionError("the script does not end")


def expected_back(api: Api, rounds: Sequence[Round]) -> list[Block]:
    """What should go back upstream: all that the model wrote, and our results. Where it was
    stopped, what follows our unanswered call is that it never was: only what the client saw goes
    back."""
    found: list[Block] = []
    for number, said in enumerate(rounds[: last_round(rounds) + 1]):
        mixed = any(one.kind == "theirs" for one in said.blocks)
        answered = mixed or number < last_round(rounds)
        blocks = said.blocks if answered else expected(api, [said])
        if not api.ordered:
            joined = {
                kind: "".join(one.text for one in blocks if one.kind == kind)
                for kind in ("think", "text")
            }
            calls = [one for one in blocks if one.kind in ("ours", "theirs")]
            blocks = [
                *(Block(kind, said_so) for kind, said_so in joined.items() if said_so),
                *calls,
            ]
        found += [*blocks, *(Block("result", "found") for one in blocks if one.kind == "ours")]
    return found
