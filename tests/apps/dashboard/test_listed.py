"""A request's messages as they came against the messages as they were sent, in each API."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.apps.dashboard import describe
from tests.apps.dashboard.speaking import APIS, BOTH, READ, Model, ask, body_of, play
from tests.apps.dashboard.traffic import RESULT, TOOL, begin, dashboard
from tests.clock import wait_until
from tests.fake_upstream import Recorded, StrictUpstream
from tests.serving import Proxy, served, tight
from tests.steps import chat

Row = dict[str, Any]

WHOLE = {
    "mode": "compress",
    "pin_user_tokens": 60,
    "compress": {"wait": "always", "snapshot_tokens": 100},
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[StrictUpstream]:
    with StrictUpstream(expect_refusals=True) as one:
        yield one


@pytest.fixture(scope="module")
def model(upstream: StrictUpstream) -> Model:
    upstream.respond(one := Model())
    return one


@pytest.fixture(scope="module")
def proxy(upstream: StrictUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    policies = {
        "default": tight(upstream.url),
        "paying": tight(upstream.url, api_keys=[{"env": "PAYING"}], offload={}),
        "whole": tight(upstream.url, api_keys=[{"env": "WHOLE"}], offload=WHOLE),
        "watched": tight(
            upstream.url, api_keys=[{"env": "WATCHED"}], offload={**WHOLE, "mode": "observe"}
        ),
    }
    path = tmp_path_factory.mktemp("dashboard") / "rows.db"
    keys = {name.upper(): name for name in policies if name != "default"}
    with served(policies, dashboard=path, environment=keys) as running:
        yield running


def requests_of(proxy: Proxy, model: str, count: int) -> list[Row]:
    """Return every request of the one session with this model's name, as its page shows it."""

    def rows() -> list[Row]:
        found = [one for one in dashboard(proxy, "sessions") if one["model"] == model]
        return dashboard(proxy, f"sessions/{found[0]['session']}") if found else []

    wait_until(lambda: len(rows()) >= count)
    return [dashboard(proxy, f"requests/{row['id']}") for row in rows()]


def digests(request: Recorded) -> list[str]:
    """Return the digests of the messages, items or blocks that upstream got."""
    body = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    entries = msgspec.json.decode(
        body["messages" if "messages" in body else "input"], type=list[msgspec.Raw]
    )
    return [hashlib.sha256(entry).hexdigest()[:16] for entry in entries]


@pytest.mark.parametrize("api", APIS)
def test_every_message_is_listed_with_what_was_sent_of_it(
    api: str, proxy: Proxy, upstream: StrictUpstream, model: Model
) -> None:
    upstream.begin_anew()
    play(proxy, model, api, 7, task=f"List it, {api}.", model=f"listed-{api}", moves={5: READ})
    rows = requests_of(proxy, f"listed-{api}", 7)
    sent = [request for request in upstream.requests if not request.path.endswith("models")]
    del sent[6]  # the second round of the request that read something back
    assert len(rows) == len(sent) == 7
    for row, request in zip(rows, sent, strict=True):
        listed = row["detail"]["messages"]
        assert [one["index"] for one in listed] == list(range(row["messages"])) and not row[
            "detail"
        ]["omitted"]
        for one in listed:
            waits = one["kind"] == "results" and not one["rule"]
            assert one["stays"] == ("waiting" if waits else "")
        aside = sum(row["kinds"]) - sum(one["sent"] + one["hidden"] for one in listed)
        assert aside > 0, "the client's tools, and ours"
        if row["kind"] == "untouched":
            assert sum(one["tokens"] for one in listed) + aside == row["tokens_before"]
            assert all(not one["sent_digest"] and one["sent"] == one["tokens"] for one in listed)
        if api != "messages":  # whose entries are blocks within messages
            assert {one["sent_digest"] or one["digest"] for one in listed} <= set(digests(request))
    last = rows[-1]
    rules = {one["kind"]: one["rule"] for one in last["detail"]["messages"][:4]}
    assert rules["results"] == "event" and rules["user"] == ""
    moved = [one for one in last["detail"]["messages"] if one["rule"] == "event"]
    assert all(
        one["sent"] < one["tokens"] and one["sent_digest"] not in ("", one["digest"])
        for one in moved
    )
    assert len(moved) == last["compacted"] and {one["event"] for one in moved} == set(
        range(1, last["events"] + 1)
    )
    hidden = sum(one["hidden"] for one in last["detail"]["messages"])
    assert hidden == last["kinds"][7] > 0 and last["reinserted"] == 1
    assert {one["origin"] for one in moved} == {"result of lookup"} and all(
        len(one["files"]) == 1 for one in moved
    )


@pytest.mark.parametrize("api", APIS)
def test_summarised_messages_were_not_sent(api: str, proxy: Proxy, model: Model) -> None:
    play(proxy, model, api, 6, task=f"Summarise it, {api}.", key="whole", model=f"whole-{api}")
    last = requests_of(proxy, f"whole-{api}", 6)[-1]
    gone = [one for one in last["detail"]["messages"] if one["rule"] == "summarised"]
    assert len(gone) == last["compressed"] > 0
    assert all((one["sent"], one["sent_digest"]) == (0, "") for one in gone)
    assert sum(last["kinds"]) == pytest.approx(last["tokens_after"], abs=10)
    assert "Summarised " in " ".join(row["words"] for row in requests_of(proxy, f"whole-{api}", 6))

    def summaries() -> list[Row]:
        found = [row for row in dashboard(proxy, "requests") if row["model"] == f"whole-{api}"]
        return [row for row in found if row["kind"] == "summary"]

    wait_until(summaries)
    assert {row["dialect"] for row in summaries()} == {api}


def test_what_would_be_summarised_shows(proxy: Proxy, model: Model) -> None:
    play(proxy, model, "chat", 8, task="Watch it.", key="watched", model="watched")
    last = requests_of(proxy, "watched", 8)[-1]
    gone = [one for one in last["detail"]["messages"] if one["rule"] == "summarised"]
    assert len(gone) == last["compressed"] > 0


def test_a_cache_breakpoint_of_ours_shows(proxy: Proxy, model: Model) -> None:
    """The bytes of such a message are not those that came."""
    history = begin("Mark it.")
    for number in range(6):
        body = body_of("messages", history, [TOOL], model="marked")
        body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        reply = proxy.post(
            "/v1/messages", body, "", **{"x-api-key": "paying", "anthropic-version": "2023-06-01"}
        )
        assert reply.status_code == 200, reply.text
        history += chat(f"call_{number}", RESULT.format(turn=number) * 8, "lookup")
    marked = [
        one
        for row in requests_of(proxy, "marked", 6)
        for one in row["detail"]["messages"]
        if one["rule"] == "marked"
    ]
    assert marked and all(
        one["sent_digest"] != one["digest"] and one["sent"] == one["tokens"] for one in marked
    )


def test_a_reply_that_is_put_back_as_the_model_wrote_it_shows(proxy: Proxy, model: Model) -> None:
    """The client saw only its own call of a reply that also had one of ours."""
    history = begin("Look at both.")
    for number in range(4):
        ask(proxy, "chat", history, model="both")
        history += chat(f"call_{number}", RESULT.format(turn=number), "lookup")
    model.next.append(BOTH)
    reply = ask(proxy, "chat", history, model="both").json()["choices"][0]["message"]
    [call] = reply["tool_calls"]
    assert call["function"]["name"] == "lookup"
    history += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "Looked up."}]
    ask(proxy, "chat", history, model="both")
    last = requests_of(proxy, "both", 6)[-1]
    [restored] = [one for one in last["detail"]["messages"] if one["rule"] == "restored"]
    assert (restored["index"], restored["kind"]) == (len(history) - 2, "assistant")
    assert restored["hidden"] > 0 and restored["sent_digest"] not in ("", restored["digest"])
    assert last["detail"]["messages"][-1]["stays"] == "small"


def test_half_a_surrogate_pair_costs_no_list(
    upstream: StrictUpstream, model: Model, tmp_path: Path
) -> None:
    """As JavaScript's `slice` leaves it of an emoji in a call's arguments."""
    policy = tight(upstream.url, dashboard_content=True)
    messages = [{"role": "user", "content": "Look."}, *chat("call_1", "a log")]
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"path": "\ud83d"}'
    with served(
        {"default": policy}, dashboard=tmp_path / "rows.db", dashboard_content=True
    ) as proxy:
        body = {"model": "halved", "messages": messages}
        assert proxy.post("/v1/chat/completions", body).status_code == 200
        [row] = requests_of(proxy, "halved", 1)
    assert [one["about"] for one in row["detail"]["messages"]][-1].endswith('?"}')


def test_texts_are_kept_where_operator_and_policy_allow_it_and_shown_as_long(
    upstream: StrictUpstream, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest messages, as they came and as they were sent, up to a length."""
    monkeypatch.setattr(describe, "MESSAGES", 7)
    monkeypatch.setattr(describe, "LONGEST_TEXT", 300)
    monkeypatch.setattr(describe, "TEXTS", 1_200)
    policies = {
        "open": tight(upstream.url, api_keys=[{"env": "OPEN"}], dashboard_content=True),
        "closed": tight(upstream.url, api_keys=[{"env": "CLOSED"}]),
    }
    given = {
        "dashboard": tmp_path / "rows.db",
        "environment": {"OPEN": "open", "CLOSED": "closed"},
    }
    with served(policies, dashboard_content=True, **given) as proxy:
        for caller in policies:
            play(proxy, model, "chat", 6, task="Keep it.", key=caller, model=f"{caller}-model")
        last = requests_of(proxy, "open-model", 6)[-1]
        closed = requests_of(proxy, "closed-model", 6)[-1]["detail"]
    listed = last["detail"]["messages"]
    texts = last["detail"]["texts"]
    assert len(listed) == 7 and last["detail"]["omitted"] == last["messages"] - 7
    assert listed[-1]["index"] == last["messages"] - 1, "the newest"
    assert any("lookup" in one["about"] for one in listed)
    came, sent = texts[str(last["messages"] - 1)]
    assert RESULT[:20] in came and len(came) == 300 and sent is None
    moved = {str(one["index"]) for one in listed if one["rule"]}
    changed = {index for index, (_, sent) in texts.items() if sent is not None}
    assert changed == moved & texts.keys() != set()
    assert 1 < len(texts) < 7, "as far as there is room"
    assert sum(len(came) + len(sent or "") for came, sent in texts.values()) <= 1_200
    assert closed["texts"] == {} and {one["about"] for one in closed["messages"]} == {""}
    with served(policies, **given) as proxy:
        later = requests_of(proxy, "open-model", 6)[-1]["detail"]
    assert later["texts"] == {} and later["snapshot"] is None, "the operator forbade it since"
    assert {one["about"] for one in later["messages"]} == {""}
