"""`offload-proxy recall`: a thin client of the running proxy."""

from __future__ import annotations

import io
from collections.abc import Callable

import httpx
import pytest
import respx

from proxy.cli import main
from tests.acceptance.test_archive import FACT, LOGS, Kept, kept

__all__ = ["kept"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command and returns its exit code, output and errors."""

    def run(*arguments: str, key: str = "alice", url: str = kept.proxy.url) -> tuple[int, str, str]:
        monkeypatch.setenv("OFFLOAD_API_KEY", key)
        code = main(["recall", "--url", url, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_it_lists_sessions_and_their_texts(kept: Kept, run: Run) -> None:
    code, out, _ = run()
    assert code == 0 and "Look into the logs." in out and kept.session in out
    code, out, _ = run("--session", kept.session[:5])
    assert code == 0 and f"{kept.reference}: result of look /logs/0.log" in out


def test_it_searches_and_exits_like_grep(kept: Kept, run: Run) -> None:
    code, out, _ = run("--grep", "vault")
    assert code == 0 and FACT in out and kept.reference in out
    assert run("--grep", "vault", "--session", "0" * 16)[0] == run("--grep", "no such words")[0] == 1


def test_it_writes_a_text_as_it_is(kept: Kept, run: Run) -> None:
    assert run(kept.reference) == (0, dict(LOGS)["/logs/0.log"], "")


def test_the_key_may_come_on_standard_input(kept: Kept, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("alice\n"))
    assert FACT in run("--grep", "vault", key="")[1]


@pytest.mark.parametrize(
    ("arguments", "key", "url", "code", "words"),
    [
        ((), "", "", 2, "set OFFLOAD_API_KEY"),
        ((), "a\x1b", "", 2, "set OFFLOAD_API_KEY"),
        ((), "alice", "http://127.0.0.1:9", 1, "is the proxy there?"),
        ((), "alice", "nonsense", 1, "is the proxy there?"),
        ((), "alice", "http://[::1", 2, "--url"),
        ((), "\udcff", "", 2, "set OFFLOAD_API_KEY"),
        (("\udcff",), "alice", "", 1, "is not valid Unicode"),
        (("--grep", "("), "alice", "", 1, "`$.pattern` cannot be used"),
        (("--grep", "\udcff"), "alice", "", 1, "is not valid Unicode"),
        (("x", "--grep", "y"), "alice", "", 2, "give a PATH, or"),
    ],
)
def test_what_goes_wrong_is_told(
    kept: Kept, run: Run, arguments: tuple[str, ...], key: str, url: str, code: int, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    done, _, errors = run(*arguments, key=key, url=url or kept.proxy.url)
    assert done == code and words in errors


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(502, html="<h1>Bad gateway</h1>"), "answered 502, and not as an offload-proxy"),
        (httpx.Response(200, json=["sessions"]), "answered 200, and not as an offload-proxy"),
        (httpx.RemoteProtocolError("cut off"), "cut off; is the proxy there?"),
    ],
)
def test_what_is_no_proxy_of_ours_is_told_from_one(
    answer: httpx.Response | Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFLOAD_API_KEY", "alice")
    with respx.mock(base_url="https://proxy.example/team") as there:
        asked = there.post("/recall_sessions").mock(side_effect=[answer])
        assert main(["recall", "--url", "https://proxy.example/team/v1/"]) == 1
    assert words in capsys.readouterr().err
    request = asked.calls.last.request
    assert request.headers["authorization"] == "Bearer alice" and b'"limit":200' in request.content
