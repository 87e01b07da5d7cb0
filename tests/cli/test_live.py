"""`check --live`, in front of upstreams that respx plays."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import respx

from proxy.cli import FAILED, OK, main
from proxy.cli.live import verdict

DEFAULT = "upstream: {base_url: http://local.test/v1}\n"
ACME = """\
api_keys: [{env: CLIENT_KEY}]
upstream: {base_url: "http://cloud.test/v1", api_key: sk-acme, context_window: 100000}
rules:
  - model: "big-*"
    offload: {compress: {model: small}}
  - model: local
    upstream: {base_url: "http://local.test/v1"}
"""
MODELS = ["big-1", "big-2", "small", *(f"other-{number}" for number in range(9))]


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLIENT_KEY", "client")
    (tmp_path / "default.yaml").write_text(DEFAULT)
    (tmp_path / "acme.yaml").write_text(ACME)
    return tmp_path


def listed(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": model, "context_length": 200_000} for model in MODELS]})


def test_it_says_what_each_upstream_answers(policies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with respx.mock:
        cloud = respx.get("http://cloud.test/v1/models", headers={"authorization": "Bearer sk-acme"})
        cloud.mock(side_effect=listed)
        model = {"id": "qwen", "meta": {"n_ctx_train": 32768}}
        local = respx.get("http://local.test/v1/models").respond(json={"data": [model]})
        assert main(["check", "--live", str(policies)]) == OK
    said = capsys.readouterr().out.partition("upstreams, asked now\n")[2].splitlines()
    assert said == [
        "  default    http://local.test/v1: reachable, 200, asks for no key, 1 model",
        "               qwen: context window 32,768 tokens",
        "  acme       http://cloud.test/v1: reachable, 200, key accepted, 12 models",
        "               big-1: context window 200,000 tokens, the policy says 100,000",
        "               big-2: context window 200,000 tokens, the policy says 100,000",
        "               small: context window 200,000 tokens, the policy says 100,000",
        "  acme       http://local.test/v1: reachable, 200, key accepted, 1 model",
        "               qwen: context window 32,768 tokens, the policy says 100,000",
    ]
    keys = [call.request.headers.get("authorization") for call in local.calls]
    assert sorted(keys, key=str) == ["Bearer sk-acme", None]


def test_anthropic_is_asked_as_it_expects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = "{base_url: http://claude.test, api_key: sk-claude}"
    (tmp_path / "default.yaml").write_text(f"{DEFAULT}open: true\nupstreams: {{messages: {messages}}}\n")
    with respx.mock:
        respx.get("http://local.test/v1/models").respond(json={"data": []})
        names = {"x-api-key": "sk-claude", "anthropic-version": "2023-06-01"}
        listed = {"data": [{"id": "claude", "max_input_tokens": 200_000}]}
        respx.get("http://claude.test/v1/models", headers=names).respond(json=listed)
        assert main(["check", "--live", str(tmp_path)]) == OK
    said = capsys.readouterr().out
    assert "messages   http://claude.test with the policy's key\n" in said
    assert "http://claude.test: reachable, 200, key accepted, 1 model\n" in said
    assert "claude: context window 200,000 tokens\n" in said


def test_a_key_that_only_another_header_may_carry(policies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with respx.mock:
        respx.get("http://cloud.test/v1/models", headers={"api-key": "sk-acme"}).respond(200)
        respx.get("http://cloud.test/v1/models").respond(401)
        respx.get("http://local.test/v1/models").respond(404)
        assert main(["check", "--live", str(policies)]) == OK
    said = capsys.readouterr().out
    assert "http://cloud.test/v1: reachable, 200, key accepted, but only as `api-key`\n" in said
    assert "http://local.test/v1: reachable, 404, gives no list of models\n" in said


def test_one_that_fails_makes_the_exit_code(policies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with respx.mock:
        respx.get("http://cloud.test/v1/models").respond(403)
        respx.get("http://local.test/v1/models").mock(side_effect=httpx.ConnectError("no route"))
        assert main(["check", "--live", str(policies)]) == FAILED
    said = capsys.readouterr().out
    assert "http://cloud.test/v1: FAILED, 403, the policy's key is refused\n" in said
    assert "http://local.test/v1: DOES NOT ANSWER, http://local.test: ConnectError: no route\n" in said
    assert "sk-acme" not in said


def test_without_the_flag_nobody_is_asked(policies: Path) -> None:
    with respx.mock(assert_all_called=False) as router:
        assert main(["check", str(policies)]) == OK
        assert not router.calls


@pytest.mark.parametrize(
    ("status", "key_header", "good"),
    [
        (200, "authorization", True),
        (200, "", True),
        (301, "authorization", False),
        (401, "", True),
        (404, "authorization", True),
        (429, "", True),
        (500, "", False),
    ],
)
def test_which_statuses_are_good(status: int, key_header: str, good: bool) -> None:
    assert verdict(status, key_header)[0] == good
