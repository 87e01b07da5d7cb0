"""A client whose tokens rotate is one client by its identity, and whoever only says to be it
reaches nothing of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_archive import FACT, LOGS, REFERENCE, body
from tests.clients.apis import Asked, api
from tests.fake_upstream import Message, Recorded, Reply, StrictUpstream, calls, error, text, whole
from tests.serving import Proxy, served, tight, wait_until

Json = dict[str, Any]
ACCOUNT = "7b1d2c0e-6f5a-4a57-9b3a-0d6a6c1f2e11"
MOVED = re.compile(r"/context_store/[\w.-]+\.txt")
BY_HEADER = {"identity": {"header": "x-account"}}
SNAPSHOT = "<state_snapshot><overall_goal>go on</overall_goal></state_snapshot>"
REFUSED = {
    "error": {
        "message": "Incorrect API key provided",
        "type": "invalid_request_error",
        "code": "invalid",
    }
}


@dataclass
class Checked:
    """An upstream that takes tokens that begin with `good`. Its model reads the first file that it
    sees once."""

    name: str
    refused: Reply = field(default_factory=lambda: error(401, REFUSED))
    seen: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._api: Callable[[Recorded], Reply] = api(self.name, self._answer)

    def __call__(self, request: Recorded) -> Reply:
        given = request.header("authorization") or f"Bearer {request.header('x-api-key')}"
        if request.method == "POST" and not given.startswith("Bearer good"):
            return self.refused
        return self._api(request)

    def _answer(self, asked: Asked) -> Message:
        self.seen.append(asked)
        last = asked.texts[-1]
        if "scratchpad" in last and "<state_snapshot>" in last:
            return text(SNAPSHOT)
        found = MOVED.findall(asked.shown)
        if last.startswith(("Recall", "And?")) and found and "read_file" in asked.tools:
            return calls(("read_file", {"path": found[0]}, f"call_{len(asked.history)}"))
        return text("Done.")


def policy(up: StrictUpstream, **sections: Any) -> Json:
    offload = {"mode": "compress", "compress": {"wait": "always", "snapshot_tokens": 100}}
    return tight(up.url, offload=offload, tools={"inject": "always"}, **sections)


def post(
    proxy: Proxy, name: str, number: int, question: str, token: str, **headers: str
) -> httpx.Response:
    path, made = body(name, LOGS[:number], question)
    history = made.get("messages", made.get("input"))
    history += [
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": question},
    ] * (number - 8)
    return proxy.post(f"/v1{path}", made, token, **{"anthropic-version": "2023-06-01"}, **headers)


def moved(proxy: Proxy, checked: Checked) -> str:
    """The reference of the first log, once it is stored."""
    reference = next(path for path in REFERENCE.findall(checked.seen[-1].shown) if "0.log" in path)
    wait_until(lambda: any(reference.rpartition("/")[2] in path.name for path in proxy.stored()))
    return reference


def asked(up: StrictUpstream) -> list[bytes]:
    return [request.body for request in up.requests if request.method == "POST"]


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_rotating_tokens_and_one_identity_are_sent_as_one_key(name: str, tmp_path: Path) -> None:
    """With hidden rounds, snapshots and originals. The tokens are new in each request."""
    sent = []
    for sections, headers in (({}, {}), (BY_HEADER, {"x-account": ACCOUNT})):
        with StrictUpstream() as up:
            up.respond(Checked(name))
            store = tmp_path / str(len(sent))
            with served({"default": policy(up, **sections)}, store=store) as proxy:
                for number in range(1, 12):
                    token = f"good-{number}" if sections else "good"
                    assert post(proxy, name, number, "And?", token, **headers).status_code == 200
            sent.append(asked(up))
        kinds = {path.parent.name for path in store.rglob("*") if path.is_file()}
        assert kinds >= {"originals", "rounds", "snapshots"}
    assert len(sent[0]) > 20 and sent[0] == sent[1]
    assert sent[0][-1].count(b"read_file") > 3, "hidden rounds are put back"


@pytest.mark.parametrize("name", ["chat", "messages"])
def test_who_only_says_to_be_the_client_gets_upstreams_refusal_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    with StrictUpstream() as up:
        up.respond(Checked(name))
        settings: Any = {"policies": {"default": policy(up, **BY_HEADER)}, "store": tmp_path}
        with served(**settings) as proxy:
            for number in (4, 8):
                post(proxy, name, number, "And?", "good", **{"x-account": ACCOUNT})
        before, replies, rounds = files(tmp_path), [], []
        with served(**settings) as proxy:
            for account in (ACCOUNT, "9" * 36):
                up.requests.clear()
                replies.append(post(proxy, name, 8, "And?", "forged", **{"x-account": account}))
                rounds.append(len(asked(up)))
        assert files(tmp_path) == before
        for reply in replies:
            assert (reply.status_code, reply.json()) == (401, REFUSED)
            assert not [header for header in reply.headers if header.startswith("x-offload")]
        assert {*replies[0].headers} == {*replies[1].headers}
        with served(**settings) as proxy:
            good = post(proxy, name, 8, "And?", "good-again", **{"x-account": ACCOUNT})
    assert good.status_code == 200 and "x-offload-mode" in good.headers


def files(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def test_an_error_in_the_place_of_a_reply_is_no_acceptance() -> None:
    """Some servers refuse a key within a stream that they answer with 200."""
    with StrictUpstream() as up, served({"default": policy(up, **BY_HEADER)}) as proxy:
        up.respond(checked := Checked("chat"))
        checked.refused = whole(REFUSED, 200)
        reply = post(proxy, "chat", 8, "And?", "forged", **{"x-account": ACCOUNT})
    assert reply.json() == REFUSED and proxy.stored() == []
    assert not [header for header in reply.headers if header.startswith("x-offload")]


def test_a_text_is_recalled_with_another_token_and_by_nobody_else(tmp_path: Path) -> None:
    with (
        StrictUpstream() as up,
        served({"default": tight(up.url, **BY_HEADER)}, store=tmp_path) as proxy,
    ):
        up.respond(checked := Checked("chat"))
        post(proxy, "chat", 8, "Look.", "good-1", **{"x-account": ACCOUNT})
        reference = moved(proxy, checked)
        for token, account, known in (
            ("good-2", ACCOUNT, True),
            ("good-1", "8" * 36, False),
            ("good-1", "", False),
        ):
            post(
                proxy,
                "chat",
                0,
                f"Recall {reference}",
                token,
                **({"x-account": account} if account else {}),
            )
            assert (FACT in checked.seen[-1].texts[-1]) is known, (token, account)
        for account in ({}, {"x-account": ACCOUNT}):
            assert (
                FACT not in proxy.post("/read_file", {"path": reference}, "good-1", **account).text
            )


def test_a_header_that_upstream_does_not_get_says_nothing(tmp_path: Path) -> None:
    """Upstream could not check it: `Connection` names it as ours alone."""
    with (
        StrictUpstream() as up,
        served({"default": tight(up.url, **BY_HEADER)}, store=tmp_path) as proxy,
    ):
        up.respond(checked := Checked("chat"))
        post(proxy, "chat", 8, "Look.", "good-1", **{"x-account": ACCOUNT})
        reference = moved(proxy, checked)
        hidden = {"x-account": ACCOUNT, "connection": "x-account"}
        post(proxy, "chat", 0, f"Recall {reference}", "good-2", **hidden)
        assert FACT not in checked.seen[-1].texts[-1]
        post(proxy, "chat", 0, f"Recall {reference}", "good-2", **{"x-account": ACCOUNT})
        assert FACT in checked.seen[-1].texts[-1]


def test_a_window_that_a_forged_request_seems_to_teach_is_its_own(tmp_path: Path) -> None:
    """An upstream may refuse a long request before it looks at the key."""
    full = {
        "error": {
            "message": "This model's maximum context length is 2048 tokens.",
            "code": "context_length_exceeded",
        }
    }
    with (
        StrictUpstream() as up,
        served({"default": tight(up.url, **BY_HEADER)}, store=tmp_path) as proxy,
    ):
        up.respond(checked := Checked("chat"))
        post(proxy, "chat", 8, "Look.", "good-1", **{"x-account": ACCOUNT})
        before = asked(up)[-1]
        checked.refused = error(400, full)
        assert (
            post(proxy, "chat", 8, "Look.", "forged", **{"x-account": ACCOUNT}).status_code == 400
        )
        post(proxy, "chat", 8, "Look.", "good-2", **{"x-account": ACCOUNT})
        assert asked(up)[-1] == before
