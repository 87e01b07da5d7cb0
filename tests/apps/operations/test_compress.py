"""`/v1/compress` and `/v1/retrieve/HASH`, as gateways call them."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.stores.local import Folder
from tests.fake_upstream import StrictUpstream, text
from tests.serving import PLAIN, Proxy, served, tight
from tests.steps import chat

UPSTREAM = "http://127.0.0.1:9/v1"
POLICY = tight(
    UPSTREAM, offload={"max_total_tokens": 2_000, "max_tool_message_tokens": 200, "keep_views": 1}
)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with served({"default": POLICY}) as proxy:
        yield proxy


def history(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read the logs."}]
    for number in range(turns):
        lines = (f"{number}-{line} the pump ran at {line * 7 % 93} percent" for line in range(60))
        messages += chat(f"call_{number}", "\n".join(lines))
    return messages


def asked(proxy: Proxy, messages: Any, key: str = "gateway", **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "model": "gpt-4.1", **more}
    reply = proxy.post("/v1/compress", body, key)
    assert reply.status_code == 200, reply.text
    answered: dict[str, Any] = reply.json()
    return answered


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def retrieved(proxy: Proxy, digest: str, key: str = "gateway") -> httpx.Response:
    return httpx.get(f"{proxy.root}/v1/retrieve/{digest}", headers=bearer(key), verify=PLAIN)


def test_old_results_become_previews_and_everything_else_stays(proxy: Proxy) -> None:
    messages = history(8)
    got = asked(proxy, messages)
    assert len(got["messages"]) == len(messages)
    moved = [index for index, one in enumerate(got["messages"]) if one != messages[index]]
    assert moved and all(messages[index]["role"] == "tool" for index in moved)
    assert got["messages"][-1] == messages[-1], "the model has not answered it"
    assert all(
        got["messages"][index] | {"content": ""} == messages[index] | {"content": ""}
        for index in moved
    )
    assert got["tokens_after"] < got["tokens_before"]
    assert got["tokens_saved"] == got["tokens_before"] - got["tokens_after"]
    assert len(got["ccr_hashes"]) == len(got["transforms_applied"]) == len(moved)
    assert got["reason"]


def test_each_hash_gives_its_result_back_to_this_key_alone(proxy: Proxy) -> None:
    messages = history(8)
    got = asked(proxy, messages)
    for digest in got["ccr_hashes"]:
        [index] = [
            at
            for at, one in enumerate(got["messages"])
            if f".{digest}.txt" in (one["content"] or "")
        ]
        assert retrieved(proxy, digest).json() == {
            "hash": digest,
            "original_content": messages[index]["content"],
        }
        refused = retrieved(proxy, digest, "another")
        assert refused.status_code == 404
        assert refused.text.replace(digest, "") == retrieved(
            proxy, "0" * 16, "another"
        ).text.replace("0" * 16, "")


def test_a_hash_is_kept_also_where_a_chat_has_moved_the_same_before(up: StrictUpstream) -> None:
    messages = history(8)
    up.respond(lambda request: text("Done."))
    with served({"default": {**POLICY, "upstream": {"base_url": up.url}}}) as proxy:
        body = {"model": "gpt-4.1", "messages": messages}
        assert proxy.post("/v1/chat/completions", body, "gateway").status_code == 200
        proxy.post("/read_file", {"absolute_path": "/none"}, "gateway")  # waits for what is written
        hashes = asked(proxy, messages)["ccr_hashes"]
        assert hashes and {retrieved(proxy, one).status_code for one in hashes} == {200}


@pytest.mark.parametrize("kind", ["originals", "digests"])
def test_a_hash_of_what_is_damaged_is_kept_anew(kind: str, tmp_path: Path) -> None:
    with served({"default": POLICY}, tmp_path) as proxy:
        assert asked(proxy, history(8))["ccr_hashes"]
    for record in tmp_path.glob(f"*/{kind}/*"):
        record.write_bytes(record.read_bytes()[:-9])
    with served({"default": POLICY}, tmp_path) as proxy:
        hashes = asked(proxy, history(8))["ccr_hashes"]
        assert hashes and {retrieved(proxy, one).status_code for one in hashes} == {200}


def test_moved_results_can_be_read_by_their_references(proxy: Proxy) -> None:
    messages = history(8)
    got = asked(proxy, messages)
    [path] = re.findall(r"stored in (\S+\.txt)", got["messages"][2]["content"])
    for named in (path, path.rpartition("/")[2]):
        reply = proxy.post("/read_file", {"absolute_path": named}, "gateway")
        assert reply.json()["answer"] == messages[2]["content"], reply.text


def test_results_without_their_calls_count_as_answered(proxy: Proxy) -> None:
    messages = history(8)[2::2]  # as LiteLLM sends them
    got = asked(proxy, messages)
    assert [one["role"] for one in got["messages"]] == ["tool"] * len(messages)
    assert got["ccr_hashes"]


def test_results_whose_calls_are_there_stay_until_the_model_has_answered(proxy: Proxy) -> None:
    first, second = history(10)[-4:-2], history(10)[-2:]
    both = first[0]["tool_calls"] + second[0]["tool_calls"]
    last = [{**first[0], "tool_calls": both}, first[1], second[1]]
    messages = history(8) + last
    got = asked(proxy, messages)
    assert got["ccr_hashes"] and got["messages"][-3:] == last


def test_a_growing_history_keeps_its_beginning(proxy: Proxy) -> None:
    before: dict[str, Any] = {"messages": [], "ccr_hashes": []}
    for turns in range(1, 16):
        got = asked(proxy, history(turns))
        changed = got["messages"][: len(before["messages"])] != before["messages"]
        assert changed == (got["ccr_hashes"] != before["ccr_hashes"]), (
            "it changes only where something moves"
        )
        assert got["ccr_hashes"][: len(before["ccr_hashes"])] == before["ccr_hashes"]
        before = got


@pytest.mark.parametrize("size", [1, 6])
def test_it_says_why_nothing_moves(proxy: Proxy, size: int) -> None:
    """A result that is larger than the ceiling has not been answered."""
    messages = history(1)
    messages[-1]["content"] *= size
    got = asked(proxy, messages)
    assert got["messages"] == messages
    assert got["reason"].startswith("waiting: ")
    assert got["compression_ratio"] == 1.0


def test_nothing_moves_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> bool:
        raise OSError(errno.ENOSPC, "no space left")

    with served({"default": POLICY}) as proxy:
        monkeypatch.setattr(Folder, "put", full)
        reply = proxy.post("/v1/compress", {"messages": history(8), "model": "m"}, "gateway")
    assert reply.status_code == 503 and "so nothing moves" in reply.text


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_a_policy_that_moves_nothing_moves_nothing_here(mode: str) -> None:
    with served(
        {"default": {"upstream": {"base_url": UPSTREAM}, "offload": {"mode": mode}}}
    ) as proxy:
        messages = history(8)
        got = asked(proxy, messages)
        assert (got["messages"], got["reason"]) == (messages, f"The policy's mode is {mode}.")


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("POST", "/v1/compress", b"{}", 400),
        ("POST", "/v1/compress", b'{"messages": "x"}', 400),
        ("POST", "/v1/compress", b"\xff", 400),
        ("GET", "/v1/compress", b"", 405),
        ("POST", "/v1/retrieve/0123456789abcdef", b"{}", 405),
        ("GET", "/v1/retrieve/", b"", 404),
        ("GET", "/v1/retrieve/..%2F..%2Fetc%2Fpasswd", b"", 404),
        ("GET", "/v1/retrieve/0123456789ABCDEF", b"", 404),
    ],
)
def test_bad_calls_get_clear_errors(
    proxy: Proxy, method: str, path: str, body: bytes, status: int
) -> None:
    reply = httpx.request(
        method, f"{proxy.root}{path}", content=body, headers=bearer("gateway"), verify=PLAIN
    )
    assert reply.status_code == status, reply.text
    assert json.loads(reply.text)["answer"]


def test_callers_without_a_key_are_refused(proxy: Proxy) -> None:
    assert proxy.post("/v1/compress", {"messages": history(1)}, key="").status_code == 401
