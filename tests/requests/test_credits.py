"""A model refuses a request, and another one takes the very same for less (Messages,
`fallback_credit_token`)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.policy import Inject
from proxy.policy import Tools as ToolsPolicy
from tests import steps
from tests.dialects.messages import turns as messages
from tests.requests.changing import Call, Changing, Json, Model, Said, received
from tests.requests.test_handler import POLICY

REFUSE = "Refuse this."
TOKEN = "fct_1"
FREE = ("model", "stream", "fallback_credit_token")
"""The members in which the two requests may differ."""


class Crediting(Model):
    """Refuses what it is asked to behind its script, and checks what comes with the token for
    it."""

    refused_request: Json

    def _answered(self, api: str, body: Json, raw: bytes, said: Said) -> tuple[int, bytes]:
        asked = {name: value for name, value in body.items() if name not in FREE}
        if body.get("fallback_credit_token") == TOKEN:
            if asked != self.refused_request:
                return (
                    400,
                    b'{"type":"error","error":{"type":"invalid_request_error","message":"no match"}}',
                )
            del body["fallback_credit_token"]
        elif said.text == REFUSE:
            self.refused_request = asked
            details = {"type": "refusal", "fallback_credit_token": TOKEN}
            refusal = messages.message(stop_reason="refusal", stop_details=details)
            return 200, messages.stream(refusal) if body["stream"] else json.dumps(refusal).encode()
        self._signed.clear()  # the other model takes the thinking of the first one, too
        return super()._answered(api, body, json.dumps(body).encode(), said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 2])
async def test_the_same_request_goes_to_the_other_model_with_its_hidden_rounds(
    rounds: int, stream: bool
) -> None:
    world = Changing()
    model: Any = Crediting()
    world.model = model
    world.upstream.send = model.send
    policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING))
    history = [{"role": "user", "content": "Read."}]
    history += steps.messages("toolu_1", "all is well " * 5_000, "read_log")
    body: Json = {"model": "one", "max_tokens": 4_000, "stream": stream, "messages": history}
    body["tools"] = [steps.tool("messages", "read_log")]

    async def ask(body: Json, *says: Said) -> Any:
        model.script = list(says)
        client, _ = await world.post("messages", body, policy, "acme-1")
        assert (client.status, model.refused, model.script) == (200, [], []), (
            client.body,
            model.refused,
        )
        return client

    def greps(first: int, number: int) -> list[Said]:
        ids = [f"toolu_{at}" for at in range(first, first + number)]
        return [Said("", [Call(id, "grep", {"pattern": id})], "I think.") for id in ids]

    earlier = await ask(body, *greps(10, 1), Said("It is well.", ()))
    reply = received("messages", "one", earlier.body, stream, False)
    body["messages"] = [*history, *reply.native, {"role": "user", "content": "And now?"}]
    refusal = await ask(body, *greps(20, rounds), Said(REFUSE, ()))
    assert TOKEN.encode() in refusal.body
    redeemed = {**body, "model": "other", "fallback_credit_token": TOKEN}
    answer = await ask(redeemed, *greps(30, 1), Said("So it is.", ()))
    said = received("messages", "other", answer.body, stream, False)
    body["messages"] += [*said.native, {"role": "user", "content": "Sure?"}]
    await ask({**body, "model": "other"}, Said("Yes.", ()))
    sent = world.model.requests[-1].content.decode()
    assert all(
        json.dumps(id) in sent for id in ("toolu_10", "toolu_30", *(["toolu_20"] if rounds else []))
    )
    await world.close()
