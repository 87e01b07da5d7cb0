"""Generated conversations that change their API, their model, or both, at random points.

The model calls our tools before its replies and beside the client's calls. Upstream is as strict as
each API, and takes no thinking that another model signed. The client sends back what it got as long
as API and model stay, and otherwise what any client could make of it: texts, calls and results.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from proxy.dialects import NAMED
from proxy.policies.tenants import Tenant
from proxy.policy import Inject, Mode, Policy
from proxy.policy import Tools as ToolsPolicy
from proxy.requests.handler import Chat
from proxy.settings import Settings
from proxy.telemetry.outcome import Outcome
from tests import steps, strict, written
from tests.asgi import ScriptedClient
from tests.dialects.chat import turns as chat
from tests.dialects.messages import api as messages_api
from tests.dialects.messages import turns as messages
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import turns as responses
from tests.fake_upstream import Pieces, Recorded
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import POLICY, World

Json = dict[str, Any]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
OF_API: dict[str, Json] = {
    "chat": {},
    "messages": {"max_tokens": 4_000},
    "responses": {"store": False, "include": ["reasoning.encrypted_content"]},
    "responses, stored": {},
}
HISTORY = {"chat": "messages", "messages": "messages", "responses": "input"}
STORE = "/context_store/"
RESULT = 2_000
"""The size of a large result. A token is a character here."""


class Call(NamedTuple):
    id: str
    name: str
    given: Json


class Said(NamedTuple):
    """What the model says in one round: a text, and calls of ours and of the client's."""

    text: str
    calls: Sequence[Call]
    thought: str = ""


class Reply(NamedTuple):
    """A reply in the client's history: as the API has it, and what any API can say of it."""

    api: str
    model: str
    native: list[Json]
    text: str
    calls: Sequence[Call]


class Result(NamedTuple):
    id: str
    text: str


Entry = str | Reply | Result
"""What the user says, a reply, or the result of a call."""


# -- upstream --------------------------------------------------------------------------------------


class Model:
    """Answers requests of all APIs with the rounds of `script`, and keeps what it has `spoken`."""

    def __init__(self) -> None:
        self.script: list[Said] = []
        self.spoken: list[Said] = []
        self.refused: list[str] = []
        self.requests: list[Any] = []
        self._messages = messages_api.MessagesApi()
        self._responses = responses_api.ResponsesApi()
        self._signed: dict[str, str] = {}

    async def send(self, request: Any) -> ScriptedReply:
        self.requests.append(request)
        api = next(name for name, path in PATHS.items() if request.url.endswith(path))
        body = json.loads(request.content)
        said = self._next("grep" in [_name(tool) for tool in body["tools"]])
        status, raw = self._answered(api, body, request.content, said)
        if status != 200:
            self.refused.append(raw.decode())
        return ScriptedReply(raw, status=status)

    def _next(self, offered: bool) -> Said:
        """Return what the model says; it calls our tools only if they are `offered`."""
        while self.script:
            said = self.script.pop(0)
            calls = [one for one in said.calls if offered or one.name != "grep"]
            if calls or not said.calls:  # else it would not have said so
                self.spoken.append(said._replace(calls=calls))
                return self.spoken[-1]
        raise AssertionError("the model has nothing to say")

    def _answered(self, api: str, body: Json, raw: bytes, said: Said) -> tuple[int, bytes]:
        who = f"{api} {body['model']}"
        aliens = {
            whose
            for sign, whose in self._signed.items()
            if whose != who and f'"{sign}"'.encode() in raw
        }
        if aliens:
            return 400, json.dumps(
                {"error": {"message": f"thinking of {aliens} in a request of {who}"}}
            ).encode()
        if api == "chat":
            return self._chat(body, said)
        scripted = self._messages if api == "messages" else self._responses
        made = _blocks(said) if api == "messages" else _items(said)
        scripted.script(made)
        reply = scripted(Recorded("POST", PATHS[api], [], raw))
        signs = (*self._messages.signed, *self._responses.encrypted)
        self._signed |= {sign: who for sign in signs if sign not in self._signed}
        return reply.status, _joined(reply)

    def _chat(self, body: Json, said: Said) -> tuple[int, bytes]:
        try:
            strict.check(body, strict.Rules(extra_fields=("reasoning_content", "index")))
        except strict.Refused as refused:
            return refused.status, json.dumps(refused.body()).encode()
        calls = [
            chat.called(one.name, json.dumps(one.given), one.id, at)
            for at, one in enumerate(said.calls)
        ]
        message = {"content": said.text or None, **({"tool_calls": calls} if calls else {})}
        message |= {"reasoning_content": said.thought} if said.thought else {}
        finish = "tool_calls" if calls else "stop"
        if body.get("stream"):
            return 200, chat.stream(
                chat.ROLE, chat.chunk(message), chat.chunk({}, finish), chat.DONE
            )
        return 200, chat.whole({**message, "tool_calls": calls} if calls else message, finish)


def _name(tool: Json) -> str:
    return str(tool.get("name") or tool["function"]["name"])


def _joined(reply: Pieces) -> bytes:
    return b"".join(piece for piece in reply.pieces if isinstance(piece, bytes))


def _blocks(said: Said) -> list[Json]:
    thought = [messages_api.thinking(said.thought)] if said.thought else []
    text = [messages_api.say(said.text)] if said.text else []
    return [
        *thought,
        *text,
        *(messages_api.call(one.name, one.given, id=one.id) for one in said.calls),
    ]


def _items(said: Said) -> list[Json]:
    thought = [responses_api.reasoning(said.thought)] if said.thought else []
    text = [responses_api.say(said.text)] if said.text else []
    return [
        *thought,
        *text,
        *(responses_api.call(one.name, one.given, call_id=one.id) for one in said.calls),
    ]


# -- the client ------------------------------------------------------------------------------------


def spoken(api: str, text: str, calls: Sequence[Call]) -> list[Json]:
    """A reply as a client writes it that got it in another API, or from another model."""
    if api == "messages":
        return [{"role": "assistant", "content": _blocks(Said(text, calls))}]
    if api == "responses":
        said = [{"role": "assistant", "content": text}] if text else []
        made = [{"type": "function_call", "call_id": one.id, "name": one.name} for one in calls]
        return [
            *said,
            *(
                one | {"arguments": json.dumps(call.given)}
                for one, call in zip(made, calls, strict=True)
            ),
        ]
    made = [chat.called(one.name, json.dumps(one.given), one.id) for one in calls]
    for call in made:
        del call["index"]
    return [
        {"role": "assistant", "content": text or None, **({"tool_calls": made} if made else {})}
    ]


def sent(api: str, model: str, history: Sequence[Entry]) -> list[Json]:
    """The history as the client sends it in this API, to this model."""
    made: list[Json] = []
    for entry in history:
        if isinstance(entry, Reply):
            same = (entry.api, entry.model) == (api, model)
            made += entry.native if same else spoken(api, entry.text, entry.calls)
        elif isinstance(entry, Result):
            made += steps.STEP[api](entry.id, entry.text)[1:]
        else:
            made.append(
                {
                    "role": "user",
                    "content": [{"type": "text", "text": entry}] if api == "messages" else entry,
                }
            )
        if api == "messages" and [one["role"] for one in made[-2:]] == ["user", "user"]:
            last = made.pop()
            made[-1] = {"role": "user", "content": [*made[-1]["content"], *last["content"]]}
    return made


def received(api: str, model: str, raw: bytes, stream: bool, stored: bool) -> Reply:
    if api == "chat":
        message = (
            chat.folded(raw)["message"] if stream else json.loads(raw)["choices"][0]["message"]
        )
        kept = ("role", "content", "tool_calls", "reasoning_content")
        native = {
            "role": "assistant",
            **{key: message[key] for key in kept if message.get(key) is not None},
        }
        calls = [
            Call(one["id"], one["function"]["name"], json.loads(one["function"]["arguments"]))
            for one in native.get("tool_calls", ())
        ]
        return Reply(api, model, [{"content": None, **native}], native.get("content") or "", calls)
    if api == "messages":
        reply = messages.accumulated(raw) if stream else json.loads(raw)
        blocks = reply["content"]
        text = "".join(one["text"] for one in blocks if one["type"] == "text")
        calls = [
            Call(one["id"], one["name"], one["input"])
            for one in blocks
            if one["type"] == "tool_use"
        ]
        return Reply(api, model, [{"role": "assistant", "content": blocks}], text, calls)
    items = (responses.accumulated(raw) if stream else json.loads(raw))["output"]
    for item in () if stored else items:
        del item["id"]
    text = "".join(
        part["text"] for one in items if one["type"] == "message" for part in one["content"]
    )
    calls = [
        Call(one["call_id"], one["name"], json.loads(one["arguments"]))
        for one in items
        if one["type"] == "function_call"
    ]
    return Reply(api, model, items, text, calls)


# -- a conversation --------------------------------------------------------------------------------


class Changing(World):
    """One proxy for conversations in all APIs."""

    def __init__(self) -> None:
        super().__init__()
        self.services.threads.close()
        self.model = Model()
        self.upstream: Any = self.model
        self.services = self._services(Settings(body_limit=8 << 20))
        self.chats = {name: Chat(self.services, NAMED[name]) for name in PATHS}

    async def post(
        self, api: str, body: Json, policy: Policy, namespace: str
    ) -> tuple[ScriptedClient, Outcome]:
        path = PATHS[api]
        client = ScriptedClient(json.dumps(body).encode(), b"", path=path, raw_path=path.encode())
        await self.chats[api](client.client(), Tenant(policy, namespace))
        return client, self.outcomes.pop()


class Needle(NamedTuple):
    """A search of ours that a reply hid."""

    pattern: str
    at: int  # the place of the reply in the history
    api: str


class Conversation:
    """One conversation, which a seed determines."""

    def __init__(self, world: Changing, seed: int) -> None:
        self.world = world
        self.name = f"acme-{seed}"
        self.choice = random.Random(seed)
        self.random_ids = self.choice.random() < 0.6
        self.stored = self.choice.random() < 0.3
        self.models = ["one", "other"]
        self.api = self.choice.choice(sorted(PATHS))
        self.model = "one"
        self.policy = self._policy()
        self.history: list[Entry] = ["Read the logs, and then answer."]
        self.needles: list[Needle] = []
        self.number = 0
        self.earlier = ""  # the last request upstream
        self.changes = 0
        self.put_back = 0
        for _ in range(self.choice.randint(3, 6)):
            call = self._call()
            self.history += [Reply("", "", [], "", [call]), self._result(call, large=True)]

    def _policy(self) -> Policy:
        offload = written.offload(
            mode=Mode.COMPACT,
            max_total_tokens=self.choice.choice([4_000, 9_000]),
            max_tool_message_tokens=1_500,  # answers stay
            unseen_limit=20_000,
            cached_read=0,
            cache_write=1,
        )
        inject = self.choice.choice([Inject.WHEN_OFFLOADING, Inject.AGENTS])
        return replace(POLICY, offload=offload, tools=ToolsPolicy(inject=inject))

    # -- what is said --

    def _id(self) -> str:
        self.number += 1
        if not self.random_ids:
            return f"call_{self.number}"
        letters = string.ascii_letters + string.digits
        return f"call_{self.number}" + "".join(self.choice.choice(letters) for _ in range(22))

    def _call(self) -> Call:
        id = self._id()
        return Call(id, "read_log", {"path": f"/log/{self.number}"})

    def _result(self, call: Call, *, large: bool) -> Result:
        line = f"{call.given['path']}: all is well, and nothing needs to be done.\n"
        return Result(call.id, line * (RESULT // len(line) if large else 1))

    def _said(self, *, ours: bool, ends: bool) -> Said:
        """A round with a search of ours, or one that `ends` the reply with words or calls."""
        calls: list[Call] = []
        if ours:
            id = self._id()
            calls.append(Call(id, "grep", {"pattern": f"needle-{self.number}!"}))
        theirs = ends and (ours or self.choice.random() < 0.6)
        calls += [self._call() for _ in range(self.choice.randint(1, 2))] if theirs else []
        words = self.choice.random() < 0.4 or not calls
        thought = "I think so." if self.choice.random() < 0.4 else ""
        return Said(f"These are words {self.number}." if words else "", calls, thought)

    def _rounds(self) -> list[Said]:
        hidden = [
            self._said(ours=True, ends=False) for _ in range(self.choice.choice([0, 0, 1, 2]))
        ]
        return [*hidden, self._said(ours=self.choice.random() < 0.3, ends=True)]

    # -- one request --

    async def turn(self) -> None:
        """One request, its reply, and what the client does then."""
        model, choice, before = self.world.model, self.choice, (self.api, self.model)
        if choice.random() < 0.35:
            self.api = choice.choice(sorted(PATHS))
            self.model = choice.choice(self.models)
        changed = before != (self.api, self.model)
        self.changes += changed
        stream, at = choice.random() < 0.5, len(model.requests)
        members = OF_API[
            "responses, stored" if self.stored and self.api == "responses" else self.api
        ]
        body = {
            "model": self.model,
            "stream": stream,
            **members,
            "tools": [steps.tool(self.api, "read_log")],
        }
        body[HISTORY[self.api]] = sent(self.api, self.model, self.history)
        model.script, model.spoken = self._rounds(), []
        client, outcome = await self.world.post(self.api, body, self.policy, self.name)
        assert client.status == 200, client.body
        assert not model.refused, model.refused
        assert not outcome.reason
        assert not model.script, "upstream was asked for all that the model has to say"
        requests = [request.content.decode() for request in model.requests[at:]]
        reply = received(self.api, self.model, client.body, stream, self.stored)
        assert "needle" not in client.body.decode()
        self._check_history(requests[0])
        if self.earlier and not changed and not outcome.new_event:
            assert _begins(self.api, requests[0], self.earlier), "a prefix breaks only at a change"
        self.earlier = requests[-1]
        self._go_on(reply, model.spoken)

    def _check_history(self, raw: str) -> None:
        """Nothing is missing upstream: each result is there, or can be read, and so is each hidden
        round whose reply can be known in this API."""
        for entry in self.history:
            if isinstance(entry, Result):
                assert json.dumps(entry.id) in raw
                assert json.dumps(entry.text)[1:-1] in raw or STORE in raw
        for needle in self.needles:
            found = needle.pattern in raw
            self.put_back += found
            assert found or not self._must_find(needle), needle

    def _must_find(self, needle: Needle) -> bool:
        """Whether its reply is known by its history, its calls, or the call before its text."""
        reply = self.history[needle.at]
        assert isinstance(reply, Reply)
        return (
            needle.api == self.api
            or bool(reply.calls)
            or isinstance(self.history[needle.at - 1], Result)
        )

    def _go_on(self, reply: Reply, spoken: Sequence[Said]) -> None:
        """Take the reply, and answer its calls, or say something."""
        theirs = [one for said in spoken for one in said.calls if one.name != "grep"]
        assert list(reply.calls) == theirs
        for said in spoken:
            assert said.text in reply.text
        searches = [one for said in spoken for one in said.calls if one.name == "grep"]
        self.needles += [
            Needle(one.given["pattern"], len(self.history), self.api) for one in searches
        ]
        self.history.append(reply)
        self.history += [self._result(one, large=self.choice.random() < 0.5) for one in theirs]
        if not theirs or self.choice.random() < 0.2:
            self.history.append(f"And now, after {self.number}?")


def _begins(api: str, later: str, earlier: str) -> bool:
    """Whether a request begins with all that an earlier one had."""
    one, other = json.loads(later), json.loads(earlier)
    first = list(_parts(api, other))
    return one["tools"] == other["tools"] and list(_parts(api, one))[: len(first)] == first


def _parts(api: str, body: Json) -> Iterator[Any]:
    for entry in body[HISTORY[api]]:
        if api == "messages" and isinstance(entry["content"], list):
            yield from ((entry["role"], block) for block in entry["content"])
        else:
            yield entry


async def play(world: Changing, seed: int) -> Conversation:
    """Play one conversation."""
    conversation = Conversation(world, seed)
    for _ in range(conversation.choice.randint(5, 9)):
        await conversation.turn()
    return conversation
