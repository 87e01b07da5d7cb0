"""`serve --capture` with `capture: true`: what goes to disk, and that `replay` reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.cli import OK, main
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import Proxy, tight
from tests.steps import chat

SECRET = "sk-very-secret"
KEY = {"cookie": SECRET, "x-api-key": SECRET}
LONG = "\n".join(f"line {number} of a long result" for number in range(400))
BODY = {
    "model": "gpt-4o",
    "messages": [
        {"role": "user", "content": "Look."},
        *chat("c", LONG),
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": "And?"},
    ],
}


@pytest.fixture
def capturing(up: StrictUpstream, serve: Callable[..., Proxy], tmp_path: Path) -> Iterator[tuple[Proxy, Path]]:
    folder = tmp_path / "captures"
    yield serve({"default": tight(up.url, capture=True)}, capture=folder), folder


def ask(proxy: Proxy, body: Any = BODY, **headers: str) -> httpx.Response:
    return proxy.post(f"/v1/chat/completions?key={SECRET}", body, SECRET, **KEY, **headers)


def test_requests_are_captured_without_a_credential_and_replayed(
    capturing: tuple[Proxy, Path], up: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, folder = capturing
    up.script(text("Yes."), text("Yes."))
    for wish in ("on", "observe"):
        assert ask(proxy, **{"x-offload": wish}).status_code == 200
    wait_until(lambda: sum(file.read_bytes().count(b"\n") for file in folder.rglob("*.jsonl")) == 2)
    [file] = folder.rglob("*.jsonl")
    captured = file.read_text()
    assert SECRET not in captured and file.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["body"] for line in captured.splitlines()] == [BODY, BODY]
    assert main(["replay", "--json", str(folder)]) == OK
    [found] = json.loads(capsys.readouterr().out)["policies"]
    assert (found["planned"], found["billed"], found["sessions"]) == (2, 1, 1)
