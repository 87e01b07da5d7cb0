"""The compaction of Anthropic's API, served by the proxy, through the anthropic SDK and a strict
upstream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.plan.compacting import GONE, reference
from tests.acceptance.test_archive import FACT, LOGS, body
from tests.dialects.messages.api import MessagesApi, call, say
from tests.fake_upstream import StrictUpstream
from tests.sdks import anthropic
from tests.serving import Proxy, served, tight

Json = dict[str, Any]
MODEL = "claude-sonnet-5-5"
SNAPSHOT = "<state_snapshot><overall_goal>open the vault</overall_goal></state_snapshot>"
NAMES = re.compile(r"/context_store/(?:compressed_group_|0\.log\.)[0-9a-f]{16}\.txt")
SUMMARIZE: Json = {"type": "summarize"}


def answer(asked: Json) -> list[Json]:
    """Write snapshots; asked to recall, follow the paths until the fact is found."""
    last = json.dumps(asked["messages"][-1]["content"])
    if "scratchpad" in last:
        return [say(SNAPSHOT)]
    named = NAMES.findall(last if "tool_result" in last else json.dumps(asked["messages"]))
    if FACT not in last and ("Recall" in last or "tool_result" in last) and named:
        tool = {"pattern": "vault", "path": named[0]} if "0.log" in named[0] else {"path": named[0]}
        return [call("grep" if "pattern" in tool else "read_file", tool)]
    return [say("Done.")]


@pytest.fixture
def api() -> MessagesApi:
    made = MessagesApi()
    made.respond(answer)
    return made


@pytest.fixture
def proxy(api: MessagesApi, tmp_path: Path) -> Iterator[Proxy]:
    with StrictUpstream() as up:
        up.respond(api)
        with served({"default": tight(up.url)}, store=tmp_path) as one:
            yield one


def client_of(proxy: Proxy, key: str = "alice") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=proxy.root, api_key=key, max_retries=0, timeout=30)


def history() -> Json:
    made: Json = body("messages", LOGS, "And?")[1]
    return made


def compacted(client: anthropic.Anthropic, *, stream: bool) -> Json:
    """The block that the client gets."""
    if stream:
        with client.beta.messages.stream(compaction=SUMMARIZE, **history()) as events:  # type: ignore[arg-type]
            message = events.get_final_message()
    else:
        message = client.beta.messages.create(compaction=SUMMARIZE, **history())  # type: ignore[arg-type]
    assert message.stop_reason == "compaction"
    [block] = message.content
    made: Json = block.model_dump(exclude_none=True)
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_compacted_history_is_there_again(
    stream: bool, role: str, api: MessagesApi, proxy: Proxy
) -> None:
    with client_of(proxy) as client:
        block = compacted(client, stream=stream)
        assert (
            block["type"] == "compaction"
            and "open the vault" in block["content"]
            and FACT not in block["content"]
        )
        sent = [
            {"role": role, "content": [block]},
            {"role": "user", "content": "Recall: what opens the vault?"},
        ]
        client.beta.messages.create(
            model=MODEL, max_tokens=500, messages=sent, tools=history()["tools"]
        )  # type: ignore[arg-type]
    assert FACT in json.dumps(api.asked[-1]["messages"][-1]), "it followed the references"
    first = api.asked[-1]["messages"][0]
    assert first["role"] == "user" and "open the vault" in json.dumps(first)
    assert not api.refused


def test_references_of_others_and_changed_ones_lead_nowhere(api: MessagesApi, proxy: Proxy) -> None:
    with client_of(proxy) as client:
        block = compacted(client, stream=False)
    for key, signature in (("mallory", block["signature"]), ("alice", reference(64 * "a"))):
        sent = [
            {"role": "user", "content": [{**block, "signature": signature}]},
            {"role": "user", "content": "Go on."},
        ]
        with client_of(proxy, key) as client:
            client.beta.messages.create(model=MODEL, max_tokens=500, messages=sent)  # type: ignore[arg-type]
        shown = json.dumps(api.asked[-1]["messages"])
        assert GONE in shown and "open the vault" not in shown


@pytest.mark.parametrize("kept", [False, True])
def test_edits_are_left_out_but_those_of_thinking(
    kept: bool, api: MessagesApi, proxy: Proxy
) -> None:
    thinking = {"type": "clear_thinking_20251015", "keep": "all"}
    edits: Any = [{"type": "clear_tool_uses_20250919"}, *([thinking] if kept else [])]
    with client_of(proxy) as client:
        client.beta.messages.create(context_management={"edits": edits}, **history())
    assert api.asked[-1].get("context_management") == ({"edits": [thinking]} if kept else None)
    assert FACT not in json.dumps(api.asked[-1]["messages"])


def test_edits_of_a_new_kind_are_left_to_upstream(api: MessagesApi, proxy: Proxy) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "fold_20271101"}]}
    made = {**history(), "context_management": edits}
    reply = proxy.post("/v1/messages", made, "alice", **{"anthropic-version": "2023-06-01"})
    sent = [*api.asked, *api.refused]
    assert reply.headers["x-offload-mode"] == "off" and sent
    assert reply.headers["x-offload-reason"].endswith("do not go with `context_management`")


def test_a_count_takes_the_wish_and_leaves_it_out(api: MessagesApi, proxy: Proxy) -> None:
    asked = {name: value for name, value in history().items() if name != "max_tokens"}
    with client_of(proxy) as client:
        client.beta.messages.count_tokens(compaction=SUMMARIZE, **asked)
    assert "compaction" not in api.counted[-1] and not api.refused


def test_a_wish_of_a_new_type_is_left_to_upstream(api: MessagesApi, proxy: Proxy) -> None:
    reply = proxy.post("/v1/messages", {**history(), "compaction": {"type": "fold"}}, "alice")
    assert (
        reply.status_code == 400 and "compaction: Extra inputs are not permitted" in api.refused[-1]
    )
