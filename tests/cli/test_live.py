"""`check --live`, in front of upstreams on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import FAILED, OK, main
from proxy.cli.check import verdict
from tests.fake_upstream import Recorded, Reply, StrictUpstream, error, whole

DEFAULT = "upstream: {{base_url: {local}}}\n"
ACME = """\
api_keys: [{{env: CLIENT_KEY}}]
upstream: {{base_url: {cloud}, api_key: sk-acme, context_window: 100000}}
rules:
  - model: "big-*"
    offload: {{compress: {{model: small}}}}
  - model: local
    upstream: {{base_url: {local}}}
"""
MODELS = ["big-1", "big-2", "small", *(f"other-{number}" for number in range(9))]


@pytest.fixture
def local(up: StrictUpstream) -> StrictUpstream:
    return up


@pytest.fixture
def cloud() -> Iterator[StrictUpstream]:
    with StrictUpstream() as upstream:
        yield upstream


@pytest.fixture
def policies(
    local: StrictUpstream, cloud: StrictUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("CLIENT_KEY", "client")
    (tmp_path / "default.yaml").write_text(DEFAULT.format(local=local.url))
    (tmp_path / "acme.yaml").write_text(ACME.format(local=local.url, cloud=cloud.url))
    return tmp_path


def listing(*models: dict[str, Any], **headers: str) -> Any:
    """Answers the question for models, if it has these headers."""

    def answer(request: Recorded) -> Reply:
        assert (request.method, request.path) == ("GET", "/v1/models")
        known = all(
            request.header(name.replace("_", "-")) == value for name, value in headers.items()
        )
        return whole({"data": models}) if known else error(401)

    return answer


def asked(
    folder: Path, capsys: pytest.CaptureFixture[str], **names: StrictUpstream
) -> tuple[int, str]:
    """Return the exit code and what was said, with names in place of addresses."""
    code = main(["check", "--live", str(folder)])
    said = capsys.readouterr().out.partition("upstreams, asked now\n")[2]
    for name, upstream in names.items():
        said = said.replace(upstream.url.removesuffix("/v1"), name)
    return code, said


def test_it_says_what_each_upstream_answers(
    policies: Path, local: StrictUpstream, cloud: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [{"id": model, "context_length": 200_000} for model in MODELS]
    cloud.respond(listing(*found, authorization="Bearer sk-acme"))
    local.respond(listing({"id": "qwen", "meta": {"n_ctx_train": 32768}}))
    code, said = asked(policies, capsys, local=local, cloud=cloud)
    assert code == OK
    assert said.splitlines() == [
        "  default    local/v1: reachable, 200, asks for no key, 1 model",
        "               qwen: context window 32,768 tokens",
        "  acme       cloud/v1: reachable, 200, key accepted, 12 models",
        "               big-1: context window 200,000 tokens, the policy says 100,000",
        "               big-2: context window 200,000 tokens, the policy says 100,000",
        "               small: context window 200,000 tokens, the policy says 100,000",
        "  acme       local/v1: reachable, 200, key accepted, 1 model",
        "               qwen: context window 32,768 tokens, the policy says 100,000",
    ]
    keys = [request.header("authorization") for request in local.requests]
    assert sorted(keys, key=str) == ["Bearer sk-acme", None]


def test_anthropic_is_asked_as_it_expects(
    local: StrictUpstream, cloud: StrictUpstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = cloud.url.removesuffix("/v1")
    messages = f"{{base_url: {address}, api_key: sk-claude}}"
    (tmp_path / "default.yaml").write_text(
        f"{DEFAULT.format(local=local.url)}open: true\nupstreams: {{messages: {messages}}}\n"
    )
    local.respond(listing())
    model = {"id": "claude", "max_input_tokens": 200_000}
    cloud.respond(listing(model, x_api_key="sk-claude", anthropic_version="2023-06-01"))
    assert main(["check", "--live", str(tmp_path)]) == OK
    said = capsys.readouterr().out
    assert f"messages   {address} with the policy's key\n" in said
    assert f"{address}: reachable, 200, key accepted, 1 model\n" in said
    assert "claude: context window 200,000 tokens\n" in said


def test_a_key_that_only_another_header_may_carry(
    policies: Path, local: StrictUpstream, cloud: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.respond(listing(api_key="sk-acme"))
    code, said = asked(policies, capsys, local=local, cloud=cloud)
    assert code == OK
    assert "cloud/v1: reachable, 200, key accepted, but only as `api-key`\n" in said
    assert "local/v1: reachable, 404, gives no list of models\n" in said


def test_one_that_fails_makes_the_exit_code(
    policies: Path, local: StrictUpstream, cloud: StrictUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.respond(lambda _: error(403))
    gone = policies / "default.yaml"
    gone.write_text("upstream: {base_url: 'http://127.0.0.1:1/v1'}\n")
    code, said = asked(policies, capsys, cloud=cloud)
    assert code == FAILED
    assert "cloud/v1: FAILED, 403, the policy's key is refused\n" in said
    assert "http://127.0.0.1:1/v1: DOES NOT ANSWER, connection refused at 127.0.0.1:1" in said
    assert "sk-acme" not in said


def test_without_the_flag_nobody_is_asked(
    policies: Path, local: StrictUpstream, cloud: StrictUpstream
) -> None:
    assert main(["check", str(policies)]) == OK
    assert not local.requests and not cloud.requests


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
