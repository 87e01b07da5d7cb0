"""`offload-proxy recall`: a thin client of the running proxy, or a look into the store without
one."""

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
    assert code == 0 and FACT in out and kept.reference.rpartition("/")[2] in out
    assert (
        run("--grep", "vault", "--session", "0" * 16)[0] == run("--grep", "no such words")[0] == 1
    )


def test_it_writes_a_text_as_it_is(kept: Kept, run: Run) -> None:
    assert run(kept.reference) == (0, dict(LOGS)["/logs/0.log"], "")


def test_the_key_may_come_on_standard_input(
    kept: Kept, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("alice\n"))
    assert FACT in run("--grep", "vault", key="")[1]


# -- without a proxy -------------------------------------------------------------------------------


@pytest.fixture
def look(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command over the store, and returns its exit code, output and errors."""
    monkeypatch.delenv("OFFLOAD_API_KEY", raising=False)

    def look(*arguments: str, namespace: str = "") -> tuple[int, str, str]:
        [owner] = {path.parent.parent.name for path in kept.proxy.store.rglob("*/sessions/*")}
        store = str(kept.proxy.store)
        code = main(["recall", "--namespace", namespace or owner, "--store", store, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return look


def test_who_can_open_the_store_needs_no_proxy_and_no_key(kept: Kept, look: Run) -> None:
    code, out, _ = look()
    assert code == 0 and "Look into the logs." in out and kept.session in out
    assert f"{kept.reference}: result of look /logs/0.log" in look("--session", kept.session[:5])[1]
    code, out, _ = look("--grep", "vault")
    assert code == 0 and FACT in out
    assert look("--grep", "no such words")[0] == 1
    assert look(kept.reference) == (0, dict(LOGS)["/logs/0.log"], "")


def test_a_look_into_the_store_stays_in_its_namespace(kept: Kept, look: Run) -> None:
    other = "default-0123456789abcdef"
    assert look("--grep", "vault", namespace=other)[0] == 1
    code, out, errors = look(kept.reference, namespace=other)
    assert (code, out) == (1, "") and "There is no file" in errors


@pytest.mark.parametrize(
    ("arguments", "namespace", "code", "words"),
    [
        ((), "../x", 2, "expected a namespace"),
        (("--grep", "("), "", 1, "`$.pattern` cannot be used"),
        (("--url", "http://127.0.0.1:9"), "", 2, "give --url for a running proxy, or --namespace"),
        (("--store", "/nowhere/at/all"), "", 2, "there is no folder"),
    ],
)
def test_what_goes_wrong_in_the_store_is_told(
    look: Run, arguments: tuple[str, ...], namespace: str, code: int, words: str
) -> None:
    done, out, errors = look(*arguments, namespace=namespace)
    assert (done, out) == (code, "") and words in errors


# -- what goes wrong -------------------------------------------------------------------------------


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
        (
            httpx.Response(502, html="<h1>Bad gateway</h1>"),
            "answered 502, and not as an offload-proxy",
        ),
        (httpx.Response(200, json=["sessions"]), "answered 200, and not as an offload-proxy"),
        (httpx.RemoteProtocolError("cut off"), "cut off; is the proxy there?"),
    ],
)
def test_what_is_no_proxy_of_ours_is_told_from_one(
    answer: httpx.Response | Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OFFLOAD_API_KEY", "alice")
    with respx.mock(base_url="https://proxy.example/team") as there:
        asked = there.post("/recall_sessions").mock(side_effect=[answer])
        assert main(["recall", "--url", "https://proxy.example/team/v1/"]) == 1
    assert words in capsys.readouterr().err
    request = asked.calls.last.request
    assert request.headers["authorization"] == "Bearer alice" and b'"limit":200' in request.content


def test_a_session_that_is_not_there(run: Run) -> None:
    for session in ("zzzz", "0" * 16):
        assert run("--session", session) == (
            1,
            "",
            f"offload-proxy: no session begins with {session}\n",
        )
