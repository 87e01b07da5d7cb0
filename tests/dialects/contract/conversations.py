"""Short conversations of a client with an upstream that refuses what the real one refuses.

The client is one that knows nothing of our tools: it answers its own calls, and sends back what it
saw. Hidden rounds are put back where a seed says so, and otherwise not, as in mode `off`, for
another model or with a new key. Upstream takes both, in Responses after one refusal.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.recognise import Hidden
from proxy.plan.turn import Addition, State
from tests import strict
from tests.dialects.chat import turns as chat
from tests.dialects.contract import apis
from tests.dialects.contract.apis import Block, Round
from tests.dialects.messages import api as messages_api
from tests.dialects.messages import turns as messages
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import turns as responses
from tests.dialects.scripted import OURS
from tests.dialects.turning import feed
from tests.fake_upstream import Pieces, Recorded

Json = dict[str, Any]


class Client(ABC):
    """A client with its history, in one API."""

    dialect: ClassVar[Dialect]
    json_mode: ClassVar[Json]
    puts_back = True
    gets_reasoning_back = False
    """Whether it is certain that this client sends reasoning back as items."""

    def __init__(self, members: Json, *, stream: bool) -> None:
        self.members = {"model": "m", "stream": stream, **members}
        self.stream = stream
        self.history: list[Json] = []
        self.hidden: list[Hidden | None] = []
        """What each of its replies hid."""

    def converse(self, rounds: Sequence[Round], *, puts_back: bool) -> list[Block]:
        """Have one reply made, of these rounds. Returns its blocks."""
        self.puts_back = puts_back
        request = self.dialect.parse(json.dumps(self._body()).encode())
        turn = self.dialect.turn(request, list(self._entries(request.entries, puts_back)), OURS, 8)
        out = b""
        for said in rounds:
            out += feed(turn, self._upstream(turn.request(), said))
            if turn.state is State.CALLING:
                turn.answer(["found"] * len(turn.calls))
            if turn.state is State.DONE:
                break
        out += turn.close()
        assert b"grep" not in out and b"found" not in out
        self.hidden.append(turn.hidden)
        return self._take(out)

    def _entries(self, entries: Sequence[Any], puts_back: bool) -> Any:
        """The entries as they go upstream. Each reply of the model's is one."""
        replies = iter(self.hidden)
        for entry in entries:
            hidden = next(replies) if self._is_reply(entry) else None
            if hidden is not None and puts_back:
                yield from self.dialect.reinserted(self.dialect.paired(hidden, entry), entry)
            else:
                yield entry

    @abstractmethod
    def say(self, text: str) -> None: ...

    @abstractmethod
    def _body(self) -> Json: ...

    @abstractmethod
    def _is_reply(self, entry: bytes) -> bool: ...

    @abstractmethod
    def _upstream(self, body: bytes, said: Round) -> bytes:
        """Upstream's reply. Raises Refused or RefusedMessage."""

    @abstractmethod
    def _take(self, out: bytes) -> list[Block]:
        """Add the reply to the history, and answer its calls."""


class ChatClient(Client):
    dialect = CHAT
    json_mode = apis.Chat.json_mode
    _number = 0

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def _body(self) -> Json:
        return {**self.members, "messages": self.history, "tools": [chat.SEARCH]}

    def _is_reply(self, entry: bytes) -> bool:
        return b'"assistant"' in bytes(entry)

    def _upstream(self, body: bytes, said: Round) -> bytes:
        strict.check(json.loads(body), strict.Rules(extra_fields=("reasoning_content", "index")))
        self._number += 1
        api = apis.APIS["chat"]
        reply = api.reply(said, self._number)
        return next(iter(api.encodings.values()))(reply) if self.stream else api.whole(reply)

    def _take(self, out: bytes) -> list[Block]:
        api = apis.APIS["chat"]
        folded = (
            chat.folded(out)["message"] if self.stream else json.loads(out)["choices"][0]["message"]
        )
        message = {key: value for key, value in folded.items() if value is not None}
        self.history.append(message)
        for call in message.get("tool_calls", []):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        return api.entries([message])


class _Scripted(Client):
    """A client whose upstream keeps what it said."""

    api: Callable[[Recorded], Pieces]
    path: ClassVar[str]

    @abstractmethod
    def _script(self, said: Round) -> None: ...

    def _upstream(self, body: bytes, said: Round) -> bytes:
        """What has lost its hidden rounds may be refused for the thinking before them, and is taken
        without."""
        self._script(said)
        status, raw = self._sent(body)
        if (
            status == 400
            and not self.puts_back
            and self.dialect.complaint(status, raw) is Addition.THINKING
        ):
            status, raw = self._sent(self.dialect.forgiving(body, [])[0])
        assert status == 200, raw
        return raw

    def _sent(self, body: bytes) -> tuple[int, bytes]:
        reply = self.api(Recorded("POST", self.path, [], body))
        return reply.status, b"".join(piece for piece in reply.pieces if isinstance(piece, bytes))


class MessagesClient(_Scripted):
    dialect = MESSAGES
    json_mode = apis.Messages.json_mode
    path = "/v1/messages"

    def __init__(self, members: Json, *, stream: bool) -> None:
        super().__init__({"max_tokens": 90_000, **members}, stream=stream)
        self.api = messages_api.MessagesApi()

    def say(self, text: str) -> None:
        if self.history and self.history[-1]["role"] == "user":
            self.history[-1]["content"].append({"type": "text", "text": text})
        else:
            self.history.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def _body(self) -> Json:
        return {**self.members, "messages": self.history, "tools": [messages.FETCH]}

    def _is_reply(self, entry: bytes) -> bool:
        return b'"assistant"' in bytes(entry)

    def _script(self, said: Round) -> None:
        blocks = [apis.Messages.block(one) for one in said.blocks]
        for place, block in enumerate(blocks):
            block |= (
                {"id": f"srvtoolu_{len(self.history)}_{place}"}
                if block["type"] == "server_tool_use"
                else {}
            )
        assert isinstance(self.api, messages_api.MessagesApi)
        self.api.script([*blocks, {"stop_reason": "max_tokens"}] if said.cut else blocks)

    def _take(self, out: bytes) -> list[Block]:
        reply = messages.accumulated(out) if self.stream else json.loads(out)
        content = reply["content"]
        self.history.append({"role": "assistant", "content": content})
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in calls]
        if results:
            self.history.append({"role": "user", "content": results})
        return apis.APIS["messages"].blocks(reply)


class ResponsesClient(_Scripted):
    dialect = RESPONSES
    json_mode = apis.Responses.json_mode
    path = "/v1/responses"

    def __init__(self, members: Json, *, stream: bool) -> None:
        kept = {} if members.get("store", True) else {"include": ["reasoning.encrypted_content"]}
        super().__init__({**kept, **members}, stream=stream)
        self.api = responses_api.ResponsesApi()

    @property
    def gets_reasoning_back(self) -> bool:  # type: ignore[override]
        return not self.members["store"] or any(
            item.get("type") == "reasoning" for item in self.history
        )

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def _body(self) -> Json:
        return {**self.members, "input": self.history, "tools": [responses.FETCH]}

    def _is_reply(self, entry: bytes) -> bool:
        return b'"function_call_output"' not in bytes(entry) and b'"user"' not in bytes(entry)

    def _script(self, said: Round) -> None:
        items = [apis.Responses.item(one) for one in said.blocks]
        if said.cut and items:
            items[-1] |= {"status": "incomplete"}
        assert isinstance(self.api, responses_api.ResponsesApi)
        self.api.script(items)

    def _take(self, out: bytes) -> list[Block]:
        reply = responses.accumulated(out) if self.stream else json.loads(out)
        if not self.members.get("store", True):
            for item in reply["output"]:
                item.pop("id", None)
        self.history += reply["output"]
        calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": id, "output": "ok"} for id in calls
        ]
        return apis.APIS["responses"].blocks(reply)


CLIENTS: dict[str, type[Client]] = {
    "chat": ChatClient,
    "messages": MessagesClient,
    "responses": ResponsesClient,
}


def drawn(choice: random.Random, kinds: Sequence[str], most: int = 3) -> list[Round]:
    """What the model says until the client's reply ends."""
    rounds: list[Round] = []
    while True:
        blocks = [
            Block(choice.choice(kinds), choice.choice(["a", "bc", "x y"]))
            for _ in range(choice.randint(1, 5))
        ]
        said = {one.kind for one in blocks}
        goes_on = "ours" in said and "theirs" not in said and len(rounds) < most
        if not goes_on:
            blocks = [one for one in blocks if one.kind != "ours" or "theirs" in said]
            blocks += [] if "theirs" in said else [Block("text", "End.")]
        rounds.append(Round(blocks))
        if not goes_on:
            return rounds


def play(name: str, seed: int) -> int:
    """Play one conversation. Returns how many requests the client made."""
    choice = random.Random(f"{name} {seed}")
    members: Json = dict(CLIENTS[name].json_mode) if choice.random() < 0.3 else {}
    json_mode = bool(members)
    if name == "responses":
        members["store"] = choice.random() < 0.5
    client = CLIENTS[name](members, stream=choice.random() < 0.6)
    often = choice.choice([0, 0.5, 1])  # how often hidden rounds are put back
    kinds = ["think", "text", "ours", "theirs", *(["server"] if name != "chat" else [])]
    requests = 0
    for turn in range(choice.randint(1, 3)):
        client.say(f"Question {turn}.")
        for _ in range(3):
            rounds, aloud = drawn(choice, kinds), client.gets_reasoning_back
            seen = client.converse(rounds, puts_back=choice.random() < often)
            requests += 1
            assert seen == apis.expected(
                apis.APIS[name], rounds, json_mode=json_mode, aloud=aloud
            ), (name, seed)
            if not any(one.kind == "theirs" for one in seen):
                break
    return requests
