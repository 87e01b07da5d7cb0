"""`serve --capture` with `capture: true`: what the store has, who reads it, and who does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.cli import FAILED, MISTAKE, OK, main
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import Proxy, tight
from tests.steps import chat

SECRET = "sk-very-secret"
KEY = {"cookie": SECRET, "x-api-key": SECRET}
WORD = "heliotrope"
LONG = "\n".join(f"line {number} of a long result" for number in range(400))
BODY = {
    "model": "gpt-4o",
    "messages": [
        {"role": "user", "content": f"Look for {WORD}."},
        *chat("c", LONG),
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": "And?"},
    ],
}


@pytest.fixture
def capturing(up: StrictUpstream, serve: Callable[..., Proxy]) -> Proxy:
    return serve({"default": tight(up.url, capture=True)}, capture=64 << 20)


def ask(
    proxy: Proxy, up: StrictUpstream, body: Any = BODY, key: str = SECRET, **headers: str
) -> None:
    """Ask, and wait until the request is captured."""
    before = len(files(proxy))
    up.script(text("Yes."))
    assert proxy.post(f"/v1/chat/completions?key={key}", body, key, **headers).status_code == 200
    wait_until(lambda: len(files(proxy)) > before)


def files(proxy: Proxy) -> list[Path]:
    return sorted(proxy.store.glob("*/captures/*.jsonl"), key=lambda file: file.name)


def test_requests_are_captured_without_a_credential_and_replayed(
    capturing: Proxy, up: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    for wish in ("on", "observe"):
        ask(capturing, up, **KEY, **{"x-offload": wish})
    stored = files(capturing)
    assert [json.loads(file.read_bytes())["body"] for file in stored] == [BODY, BODY]
    assert all(SECRET.encode() not in file.read_bytes() for file in stored)
    assert main(["replay", "--json", "--store", str(capturing.store)]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [str(capturing.store)] and not found["left_out"]
    [tally] = found["policies"]
    assert (tally["planned"], tally["billed"], tally["sessions"]) == (2, 1, 1)
    assert main(["replay", "--store", str(capturing.store)]) == OK
    assert f"2 requests, 1 session, captures of {capturing.store}\n" in capsys.readouterr().out


def test_what_the_client_wants_beyond_its_api_is_captured(
    capturing: Proxy, up: StrictUpstream
) -> None:
    """Without it, upstream may not take the request again."""
    ask(capturing, up, **{"anthropic-beta": "one-2026-01-01,two-2026-02-02"})
    ask(capturing, up)
    found = [json.loads(file.read_bytes()).get("beta") for file in files(capturing)]
    assert found == ["one-2026-01-01,two-2026-02-02", None]


def test_captures_are_one_callers_and_are_forgotten_with_it(
    capturing: Proxy,
    up: StrictUpstream,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.cli.store.SETTLED", 0.0)
    store = ["--store", str(capturing.store)]
    for key in ("one", "two", "two"):
        ask(capturing, up, key=key, **{"x-offload": "observe"})
    one, two = sorted(
        {file.parent.parent.name for file in files(capturing)},
        key=lambda name: counted(capturing, name),
    )
    for namespace, requests in ((one, 1), (two, 2)):
        assert main(["replay", "--json", *store, "--namespace", namespace]) == OK
        assert json.loads(capsys.readouterr().out)["requests"] == requests
    assert main(["store", "forget", two, *store, "--yes"]) == OK
    assert capsys.readouterr().out == "deleted 2 records\n"
    assert [file.parent.parent.name for file in files(capturing)] == [one]
    assert main(["replay", *store, "--namespace", two]) == MISTAKE
    assert f"{capturing.store}: holds no captures of whole requests" in capsys.readouterr().err


def counted(proxy: Proxy, namespace: str) -> int:
    return len(list(proxy.store.glob(f"{namespace}/captures/*")))


def test_no_tool_and_no_operation_reaches_a_capture(
    capturing: Proxy, up: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the operator, nobody reads what was captured, also not whoever asked."""
    ask(capturing, up)
    [file] = files(capturing)
    namespace = file.parent.parent.name
    paths = (
        file.name,
        f"captures/{file.name}",
        f"../captures/{file.name}",
        f"/{namespace}/captures/{file.name}",
    )
    for path in paths:
        found = operation(capturing, "/read_file", absolute_path=path)
        assert not found["success"] and WORD not in str(found), path
    found = operation(capturing, "/grep", pattern=WORD, archive=True)
    assert not found["metadata"].get("matches") and "Look for" not in str(found)
    assert file.name not in str(operation(capturing, "/recall_sessions"))
    recall = ["recall", "--namespace", namespace, "--store", str(capturing.store)]
    assert main([*recall, "--grep", WORD]) == FAILED
    assert main([*recall, file.name]) == FAILED
    assert "Look for" not in capsys.readouterr().out
    question = {"role": "user", "content": f"Read {file.name}"}
    asked = {
        **BODY,
        "messages": [*chat("d", LONG), {"role": "assistant", "content": "Seen."}, question],
    }
    ask(capturing, up, asked)
    assert WORD not in str(up.requests[-1].body), "not even where a request quotes its name"


def operation(proxy: Proxy, path: str, **given: object) -> Any:
    reply: httpx.Response = proxy.post(path, given, SECRET)
    return reply.json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "{store}", "a.jsonl"], "give files, or --store"),
        (["--namespace", "acme"], "--namespace needs --store"),
        (["--store", "{store}", "--namespace", "../x"], "expected a namespace"),
        (["--store", "{store}/none"], "there is no folder"),
        (["--store", "{store}"], "holds no captures of whole requests"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(one.format(store=tmp_path) for one in arguments)]) == MISTAKE
    assert message in capsys.readouterr().err


def test_a_damaged_capture_leaves_the_others(
    capturing: Proxy, up: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        ask(capturing, up, **{"x-offload": "observe"})
    damaged = files(capturing)[1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["replay", "--json", "--store", str(capturing.store)]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 2
    [left_out] = found["left_out"]
    assert damaged.name in left_out and "not a JSON object" in left_out
