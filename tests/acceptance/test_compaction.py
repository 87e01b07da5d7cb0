"""Compaction that a client asks upstream for, served by the proxy, through the openai SDK and in
front of an upstream that refuses what it does not know."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.errors import StoreFault
from proxy.plan.compacting import GONE, UNREAD, reference
from proxy.requests import references, rounds
from proxy.requests.archive import Archive
from proxy.stores.local import Folder
from tests.acceptance.test_archive import FACT, LOGS, body
from tests.clock import wait_until
from tests.dialects.responses.api import ResponsesApi, call, say
from tests.fake_upstream import Recorded, Reply, StrictUpstream, error, whole
from tests.sdks import openai
from tests.serving import Proxy, served, tight

Json = dict[str, Any]
TRIGGER = {"type": "compaction_trigger"}
OFF = {"x-offload": "off"}
SNAPSHOT = "<state_snapshot><overall_goal>open the vault</overall_goal></state_snapshot>"
GROUP = re.compile(r"/context_store/compressed_group_[0-9a-f]{16}\.txt")
LOG = re.compile(r"/context_store/0\.log\.[0-9a-f]{16}\.txt")
ITEM = {"id": "cmp_1", "type": "compaction", "encrypted_content": "gAAAAABupstreams"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


class Upstream:
    """Writes snapshots, and reads the originals when asked to recall."""

    def __init__(self) -> None:
        self.api = ResponsesApi()
        self.api.respond(self._answer)
        self.refuses = False

    def __call__(self, request: Recorded) -> Reply:
        if self.refuses:
            return error(401)
        return self.api(request)

    def _answer(self, asked: Json) -> list[Json]:
        last = (
            asked["input"][-1] if isinstance(asked["input"], list) else {"content": asked["input"]}
        )
        text = json.dumps(last)
        if "scratchpad" in text:
            return [say(SNAPSHOT)]
        found = GROUP.findall(json.dumps(asked["input"]))
        if "Recall" in text and found:
            return [call("read_file", {"path": found[0]})]
        if (
            last.get("type") == "function_call_output"
            and (log := LOG.search(text))
            and FACT not in text
        ):
            return [call("grep", {"pattern": "vault", "path": log[0]})]
        return [say("Done.")]

    @property
    def asked(self) -> Json:
        return self.api.asked[-1]


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def up(upstream: Upstream) -> Iterator[StrictUpstream]:
    with StrictUpstream() as made:
        made.respond(upstream)
        yield made


@pytest.fixture
def proxy(up: StrictUpstream, tmp_path: Path) -> Iterator[Proxy]:
    with served({"default": tight(up.url, compaction="auto")}, store=tmp_path) as one:
        yield one


def client_of(proxy: Proxy, key: str = "alice") -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.url, api_key=key, max_retries=0, timeout=60)


def history() -> list[Json]:
    items: list[Json] = body("responses", LOGS, "And?")[1]["input"]
    return items


def compacted(client: openai.OpenAI, way: str) -> Json:
    """The item that the client gets, in one of the ways to ask for it."""
    common: Json = {"model": "gpt-4.1", "store": False, "tools": [TOOL]}
    if way == "endpoint":
        answer = client.responses.compact(model="gpt-4.1", input=history())  # type: ignore[arg-type]
        *users, item = answer.output
        assert [json.loads(user.model_dump_json())["content"] for user in users] == [
            "Look into the logs.",
            "And?",
        ]
    elif way == "trigger":
        [item] = client.responses.create(input=[*history(), TRIGGER], **common).output
    else:
        with client.responses.stream(input=[*history(), TRIGGER], **common) as events:
            [item] = events.get_final_response().output
    made: Json = item.model_dump(exclude_none=True)
    return made


each_way = pytest.mark.parametrize("way", ["endpoint", "trigger", "streamed"])


@each_way
def test_a_compacted_history_is_there_again(
    way: str, up: StrictUpstream, upstream: Upstream, proxy: Proxy
) -> None:
    with client_of(proxy) as client:
        item = compacted(client, way)
        assert item["type"] == "compaction" and len(item["encrypted_content"]) < 100
        assert FACT not in json.dumps(item), "a reference, not a text"
        kept = [{"role": "user", "content": "Look into the logs."}, item]
        for question in ("Recall: what opens the vault?", "And now?"):
            asking: Any = [*kept, {"role": "user", "content": question}]
            client.responses.create(model="gpt-4.1", input=asking, tools=[TOOL], store=False)  # type: ignore[arg-type]
            if "Recall" in question:
                assert FACT in json.dumps(upstream.asked["input"][-1])
        shown = json.dumps(upstream.asked["input"][1])
    assert "open the vault" in shown and upstream.asked["input"][1]["role"] == "user"
    assert (
        not upstream.api.refused
        and len([one for one in up.requests if b"scratchpad" in one.body]) == 1
    )


def test_a_history_is_compacted_again(proxy: Proxy) -> None:
    """Of the one before, the client gets no text."""
    with client_of(proxy) as client:
        item, said = compacted(client, "endpoint"), {"role": "user", "content": "Go on."}
        answer = client.responses.compact(model="gpt-4.1", input=[item, said])  # type: ignore[list-item]
    user, again = answer.output
    assert json.loads(user.model_dump_json())["content"] == "Go on."
    assert again.type == "compaction" and again.encrypted_content != item["encrypted_content"]


@pytest.mark.parametrize(("retention", "limit"), [("30d", 86_400), ("1h", 600)])
def test_what_stands_behind_a_reference_in_use_is_renewed(
    retention: str, limit: int, up: StrictUpstream, upstream: Upstream, tmp_path: Path
) -> None:
    """Its client has no other copy. What is younger than a day, or than a sixth of a short
    retention, is left alone."""
    policies = {"default": tight(up.url, compaction="auto", retention=retention)}
    old, young = time.time() - limit - 100, time.time() - limit + 300
    with served(policies, store=tmp_path) as proxy, client_of(proxy) as client:
        item = compacted(client, "trigger")
    [record] = tmp_path.rglob("*/compactions/*")
    first, *others = sorted(tmp_path.rglob("*/originals/*"))
    for path in (record, *others):
        os.utime(path, (old, old))
    os.utime(first, (young, young))
    with served(policies, store=tmp_path) as other:
        ask(other, [item, {"role": "user", "content": "And now?"}])
        wait_until(lambda: all(path.stat().st_mtime > old + 90 for path in (record, *others)))
    assert first.stat().st_mtime == pytest.approx(young, abs=1)


def asked_for(upstream: Upstream, proxy: Proxy, items: list[Json], *calls: Json) -> list[str]:
    """The answers to these calls of our tools, one after the other, in one reply to these items."""
    upstream.api.script(*([one] for one in calls), [say("Done.")])
    assert ask(proxy, items).status_code == 200
    return [str(one["output"]) for one in upstream.asked["input"][-2 * len(calls) + 1 :: 2]]


SEARCH = call("grep", {"pattern": "vault opens|nothing happened in bay 3"})


def test_all_that_stands_behind_a_reference_is_in_reach(
    up: StrictUpstream, upstream: Upstream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before the compaction: a search goes through all of it, and a file opens by its call's own
    words."""
    with client_of(proxy) as client:
        item = compacted(client, "trigger")
    question = {"role": "user", "content": "What now?"}
    calls = (
        SEARCH,
        call("read_file", {"path": "/logs/0.log"}),
        call("read_file", {"path": "/logs/7.log"}),
    )
    for items in (
        [item, question],
        [*ask(proxy, [item, question, TRIGGER]).json()["output"], question],
    ):
        found, first, last = asked_for(upstream, proxy, items, *calls)
        assert FACT in found and FACT in first and "7:0 nothing happened" in last
        assert f"Found {found.count('nothing happened') + 1}" in found or "first" in found
        assert "earlier conversation" not in found + first + last


def test_callers_without_a_key_reach_what_stands_behind_their_references(
    upstream: Upstream, proxy: Proxy
) -> None:
    """The reference is a secret of its client, and opens nothing else."""
    [item] = ask(proxy, [*history(), TRIGGER], key="").json()["output"]
    question = {"role": "user", "content": "What now?"}
    upstream.api.script([SEARCH], [say("Done.")])
    assert ask(proxy, [item, question], key="").status_code == 200
    assert FACT in upstream.asked["input"][-1]["output"]


def test_what_cannot_be_read_behind_a_reference_is_said(
    upstream: Upstream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(proxy) as client:
        item = compacted(client, "trigger")
    items = [item, {"role": "user", "content": "What now?"}]
    read = call("read_file", {"path": "/logs/0.log"})
    with monkeypatch.context() as patched:
        patched.setattr(rounds, "BEHIND_CHARS", 0)
        patched.setattr(rounds, "READ_AT_ONCE", 4)
        found, alone = asked_for(upstream, proxy, items, call("grep", {"pattern": "vault"}), read)
        assert re.search(
            r"\[\d older files were not searched: send the path of one to search it\]", found
        )
        assert FACT in alone, "one file always opens"
    with monkeypatch.context() as patched:
        patched.setattr(Archive, "read_many", unanswered)
        for answer in asked_for(upstream, proxy, items, SEARCH, read):
            assert (
                "cannot be read at the moment" in answer and "Nothing has been moved" not in answer
            )
    [original] = proxy.store.rglob("*/originals/0.log*")
    original.unlink()
    found, gone = asked_for(upstream, proxy, items, SEARCH, read)
    assert (
        FACT not in found
        and "nothing happened" in found
        and "not among the texts that are kept" in gone
    )


async def unanswered(*_: object) -> list[bytes | None]:
    raise StoreFault("no answer")


def test_a_store_that_fails_is_not_said_to_keep_nothing(
    up: StrictUpstream, upstream: Upstream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(proxy) as client:
        item = compacted(client, "trigger")
    with served({"default": tight(up.url, compaction="auto")}, store=proxy.store) as other:
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "get_many", failing)
            assert ask(other, [item, {"role": "user", "content": "And now?"}]).status_code == 200
        assert upstream.asked["input"][0]["content"] == [{"type": "input_text", "text": UNREAD}]
    with served({"default": tight(up.url, compaction="auto")}, store=proxy.store) as other:
        ask(other, [item, {"role": "user", "content": "And now?"}])
        assert "open the vault" in json.dumps(upstream.asked["input"][0])


def failing(*_: object) -> None:
    raise OSError("no disk")


def test_the_same_history_is_compacted_once_and_alike(up: StrictUpstream, proxy: Proxy) -> None:
    with client_of(proxy) as client:
        one, other = compacted(client, "trigger"), compacted(client, "streamed")
    assert one["encrypted_content"] == other["encrypted_content"]
    assert len([asked for asked in up.requests if b"scratchpad" in asked.body]) == 1


@pytest.mark.parametrize(
    "broken", ["proxy.requests.rendering.Rendered.of", "proxy.requests.compactions._reply"]
)
def test_a_bug_of_ours_leaves_the_compaction_to_upstream(
    broken: str, up: StrictUpstream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(broken, fail)
    reply = ask(proxy, [*history(), TRIGGER])
    assert "its log says where" in reply.headers["x-offload-reason"]
    assert json.loads(up.requests[-1].body)["input"][-1] == TRIGGER, "what the client sent"


def ask(
    proxy: Proxy,
    items: list[Json],
    key: str = "alice",
    headers: dict[str, str] | None = None,
    **more: Any,
) -> httpx.Response:
    made = {"model": "gpt-4.1", "store": False, "tools": [TOOL], "input": items, **more}
    return proxy.post("/v1/responses", made, key, **(headers or {}))


def test_a_reference_of_anothers_leads_nowhere(upstream: Upstream, proxy: Proxy) -> None:
    """In the words for one that never was; so do cut and changed ones that still look like ours."""
    with client_of(proxy) as client:
        item = compacted(client, "trigger")
    question = {"role": "user", "content": "Go on."}
    last = item["encrypted_content"]
    for key, given in (
        ("mallory", last),
        ("alice", reference(64 * "a")),
        ("alice", last[:-1] + "0"),
    ):
        assert ask(proxy, [{**item, "encrypted_content": given}, question], key).status_code == 200
        assert upstream.asked["input"][0]["content"] == [{"type": "input_text", "text": GONE}]


@pytest.mark.parametrize(
    "given", ["gAAAAABupstreams", "offload-proxy.", "offload-proxy." + "0" * 63, "x" * 100, ""]
)
def test_what_is_not_ours_is_not_touched(
    given: str, up: StrictUpstream, upstream: Upstream, proxy: Proxy
) -> None:
    up.expect_refusals = True
    items = [{**ITEM, "encrypted_content": given}, {"role": "user", "content": "Go on."}]
    made = json.dumps({"model": "gpt-4.1", "store": False, "input": items}).encode()
    proxy.post("/v1/responses", made, "alice")
    assert up.requests[-1].body == made


def test_compaction_that_upstream_manages_is_left_out(upstream: Upstream, proxy: Proxy) -> None:
    wish = [{"type": "compaction", "compact_threshold": 1000}]
    assert ask(proxy, history(), context_management=wish).status_code == 200
    assert "context_management" not in upstream.asked and FACT not in json.dumps(
        upstream.asked["input"]
    )


@pytest.mark.parametrize("wish", [[{"type": "fold"}], [{"type": "compaction"}, {}], {}, "all"])
def test_wishes_of_a_new_kind_are_left_to_upstream(
    wish: Any, up: StrictUpstream, proxy: Proxy
) -> None:
    up.respond(lambda request: whole({"id": "resp_1", "object": "response", "output": []}))
    reply = ask(proxy, history(), context_management=wish)
    assert json.loads(up.requests[-1].body)["context_management"] == wish
    assert reply.headers["x-offload-reason"].endswith("do not go with `context_management`")


def test_a_trigger_counts_beside_what_upstream_is_to_manage(proxy: Proxy) -> None:
    wish = [{"type": "compaction", "compact_threshold": 1000}]
    [item] = ask(proxy, [*history(), TRIGGER], context_management=wish).json()["output"]
    assert item["type"] == "compaction"


def test_a_snapshot_that_the_model_does_not_write_is_named(
    up: StrictUpstream, upstream: Upstream, proxy: Proxy
) -> None:
    up.expect_refusals = True
    upstream.api.script([say("No.")], [say("No.")])
    reply = ask(proxy, [*history(), TRIGGER])
    assert json.loads(up.requests[-1].body)["input"][-1] == TRIGGER, "what the client sent"
    assert reply.headers["x-offload-reason"] == (
        "sent as it came: upstream is asked to compact it, because the model wrote no snapshot of it for the proxy"
    )


def test_a_compacted_conversation_is_not_held_out(up: StrictUpstream, proxy: Proxy) -> None:
    """The model gets the tools by which it reads what its snapshot names."""
    [item] = ask(proxy, [*history(), TRIGGER]).json()["output"]
    policy = tight(up.url, offload={"holdout": 0.9999})
    with served({"default": policy}, store=proxy.store) as other:
        reply = ask(other, [item, {"role": "user", "content": "And now?"}])
        assert reply.headers["x-offload-mode"] == "compact"
        assert ask(other, history()).headers["x-offload-mode"] == "observe"


@pytest.mark.parametrize("trigger", [[], [TRIGGER]], ids=["", "trigger"])
@pytest.mark.parametrize(
    ("headers", "why"),
    [({}, "the policy's mode for this model is off"), (OFF, "the client sent `x-offload: off`")],
    ids=["mode", "header"],
)
def test_where_nothing_is_planned_the_reason_says_why_and_what_was_sent(
    headers: dict[str, str], why: str, trigger: list[Json], up: StrictUpstream, proxy: Proxy
) -> None:
    up.expect_refusals = True
    [item] = ask(proxy, [*history(), TRIGGER]).json()["output"]
    question = {"role": "user", "content": "And now?"}
    policy = tight(up.url) if headers else tight(up.url, offload={"mode": "off"})
    with served({"default": policy}, store=proxy.store) as other:
        for items, sent in (
            ([item, question], "sent with the history that its reference stands for"),
            (history(), "sent as it came"),
        ):
            reply = ask(other, [*items, *trigger], headers=headers)
            assert reply.headers["x-offload-reason"] == f"{sent}: {why}"


@pytest.mark.parametrize("mode", ["passthrough", "native"])
def test_upstream_serves_it_where_it_can_and_all_fits(
    mode: str, up: StrictUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "native":
        monkeypatch.setitem(references.NATIVE, "responses", ("127.0.0.1",))
    up.respond(lambda request: whole({"id": "resp_1", "object": "response", "output": [ITEM]}))
    policy = tight(up.url, **({"compaction": "passthrough"} if mode == "passthrough" else {}))
    with served({"default": policy}, store=tmp_path) as proxy, client_of(proxy) as client:
        assert compacted(client, "trigger")["encrypted_content"] == ITEM["encrypted_content"]
        assert json.loads(up.requests[-1].body)["input"] == [*history(), TRIGGER]
        client.responses.compact(model="gpt-4.1", input=history())  # type: ignore[arg-type]
        assert up.requests[-1].path == "/v1/responses/compact"
        assert json.loads(up.requests[-1].body)["input"] == history()
        reply = ask(proxy, [*history(), TRIGGER])
        assert (
            reply.headers["x-offload-reason"] == "sent as it came: upstream is asked to compact it"
        )
    assert proxy.stored() == []


def test_a_history_that_does_not_fit_is_served_here(
    up: StrictUpstream, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(references.NATIVE, "responses", ("127.0.0.1",))
    policy = tight(up.url)
    policy["upstream"]["context_window"] = 9_000
    with served({"default": policy}, store=tmp_path) as proxy, client_of(proxy) as client:
        assert compacted(client, "trigger")["encrypted_content"].startswith("offload-proxy.")


def test_whoever_upstream_refuses_gets_its_refusal(
    up: StrictUpstream, upstream: Upstream, proxy: Proxy
) -> None:
    upstream.refuses = True
    made = [*history(), TRIGGER]
    assert ask(proxy, made).status_code == 401
    assert json.loads(up.requests[-1].body)["input"] == made, "as it came"
    assert proxy.stored() == []


def test_an_identity_opens_its_compaction_with_other_tokens(
    up: StrictUpstream, tmp_path: Path
) -> None:
    """The reference is the client's once upstream has answered the call for the snapshot, and not
    before."""
    upstream = Upstream()
    account = {"x-account": "7b1d2c0e-6f5a-4a57-9b3a-0d6a6c1f2e11"}

    def checked(request: Recorded) -> Reply:
        good = (request.header("authorization") or "").startswith("Bearer good")
        return upstream(request) if good or request.method != "POST" else error(401)

    up.respond(checked)

    def post(items: list[Json], token: str) -> httpx.Response:
        return ask(proxy, items, token, account)

    with served(
        {"default": tight(up.url, identity={"header": "x-account"})}, store=tmp_path
    ) as proxy:
        for _ in range(2):
            refused = post([*history(), TRIGGER], "forged")
            assert refused.status_code == 401 and "x-offload-mode" not in refused.headers
            assert not proxy.stored()
        [item] = post([*history(), TRIGGER], "good-1").json()["output"]
        assert (
            post(
                [item, {"role": "user", "content": "Recall: what opens the vault?"}], "good-2"
            ).status_code
            == 200
        )
        assert FACT in json.dumps(upstream.asked["input"][-1])
        before = proxy.stored()
        again = post([*history(), TRIGGER], "forged")
        assert (
            again.status_code == 401
            and again.content == refused.content
            and proxy.stored() == before
        )
        assert again.headers.keys() == refused.headers.keys()


@pytest.mark.parametrize(
    "items", [[TRIGGER], [{"role": "developer", "content": "Briefly."}, TRIGGER]], ids=len
)
def test_nothing_to_compact_is_upstreams_to_say(
    items: list[Json], up: StrictUpstream, upstream: Upstream, proxy: Proxy
) -> None:
    up.expect_refusals = True
    assert ask(proxy, items).status_code == 400
    assert (
        json.loads(up.requests[-1].body)["input"] == items
        and "Invalid value" in upstream.api.refused[-1]
    )


def test_a_history_that_ends_with_a_prompt_for_summaries_is_compacted_too(proxy: Proxy) -> None:
    said = {"role": "user", "content": "Create a detailed summary of the conversation so far."}
    for items in (
        [*history(), said],
        [*history(), said, {"role": "assistant", "content": "Done."}, said],
    ):
        assert ask(proxy, [*items, TRIGGER]).json()["output"][0]["type"] == "compaction"
