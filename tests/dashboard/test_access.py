"""Who may see what: the operator everything, a caller's key its own namespace, and pages of other sites nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import msgspec
import pytest

from proxy.dashboard.access import VALID, Access, Viewer
from proxy.dashboard.pages import DAY, savings_page
from proxy.dashboard.queries import Reader
from proxy.dashboard.rows import Recorded, Rows
from proxy.telemetry.outcome import Holdout, Kind
from tests.dashboard.traffic import begin, dashboard, outcome, recorded, session, turn
from tests.fake_upstream import StrictUpstream, text
from tests.serving import PLAIN, Proxy, served, tight

STRANGER = {"x-forwarded-for": "192.0.2.1"}
"""What a reverse proxy on this machine adds; its callers are elsewhere."""


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def access(clock: Clock, token: str | None = "right", secret: bytes = b"s" * 32) -> Access:
    return Access(token, lambda: secret, clock)


def test_a_cookie_names_its_viewer_until_it_ends(clock: Clock) -> None:
    ours = access(clock)
    for namespace in (None, "acme-1"):
        cookie = ours.cookie(namespace)
        assert cookie is not None
        assert ours.viewer(cookie) == Viewer(namespace, clock.now + VALID)
        assert access(clock).viewer(cookie), "another worker with the same file takes it"
        assert access(clock, token="changed").viewer(cookie) is None
        assert access(clock, secret=b"t" * 32).viewer(cookie) is None
        assert ours.viewer(cookie[:-4] + "AAA=") is None
    clock.now += VALID
    assert ours.viewer(cookie) is None


@pytest.mark.parametrize("cookie", ["", "x", "é", "AAAA", "=" * 10, "A" * 5_000, "AAAA" * 20, "\x00"])
def test_any_other_cookie_is_nobodys(clock: Clock, cookie: str) -> None:
    assert access(clock).viewer(cookie) is None
    assert access(clock, secret=b"").viewer(cookie) is None


def test_callers_with_other_keys_do_not_lock_the_operator_out(clock: Clock) -> None:
    ours = access(clock)
    assert not any(ours.is_admin(f"the key of caller {number}") for number in range(100))
    assert ours.is_admin("right")


def test_without_a_token_no_token_is_right(clock: Clock) -> None:
    for token in (None, ""):
        assert access(clock, token=token).is_admin("") is False
        assert access(clock, token=token).is_admin("x") is False


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    path = tmp_path_factory.mktemp("dashboard") / "rows.db"
    with StrictUpstream() as upstream:
        policies = {
            "default": tight(upstream.url, share_namespace=True),
            "acme": tight(upstream.url, api_keys=[{"env": "ONE"}, {"env": "TWO"}, {"env": "THREE"}]),
        }
        settings = {
            "admin_token": "let me in",
            "allowed_hosts": ("proxy.example",),
            "environment": {"ONE": "one", "TWO": "two", "THREE": "three"},
        }
        with served(policies, dashboard=path, **settings) as running:
            for caller in ("one", "two", "stranger"):
                upstream.script(text("Hello."))
                turn(running, begin(f"Hello from {caller}."), 1, key=caller, model=f"model-of-{caller}")
            session(running, upstream, 4, key="three", model="model-of-three")
            recorded(running, 7)
            yield running


def seen(proxy: Proxy, **request: object) -> list[str]:
    return sorted({row["model"] for row in dashboard(proxy, "requests", **request)})


def login(proxy: Proxy, headers: dict[str, str] | None = None, **form: str) -> httpx.Response:
    return httpx.post(f"{proxy.root}/_offload/login", data=form, headers={**STRANGER, **(headers or {})}, verify=PLAIN)


ALL = ["model-of-one", "model-of-stranger", "model-of-three", "model-of-two"]


def test_the_operator_sees_everything(proxy: Proxy) -> None:
    assert seen(proxy) == ALL
    assert seen(proxy, headers={**STRANGER, "authorization": "Bearer let me in"}) == ALL


@pytest.mark.parametrize("path", ["", "api/me", "api/requests", "api/savings", "api/sessions", "api/health"])
def test_others_see_nothing(proxy: Proxy, path: str) -> None:
    reply = httpx.get(f"{proxy.root}/_offload/{path}", headers=STRANGER, verify=PLAIN)
    assert reply.status_code == (401 if path else 303)
    assert "model-of" not in reply.text


@pytest.mark.parametrize(
    "headers",
    [{"x-forwarded-host": "proxy.example"}, {"x-forwarded-for": ""}, {"forwarded": "for=_x"}, {"via": "1.1 cache"},
     {"x-real-ip": "127.0.0.1"}, {"cf-connecting-ip": "192.0.2.1"}, {"host": "proxy.example"},
     {"host": "proxy.example:80"}],
    ids=str,
)  # fmt: skip
def test_what_a_proxy_forwards_is_not_local(proxy: Proxy, headers: dict[str, str]) -> None:
    assert httpx.get(f"{proxy.root}/_offload/api/requests", headers=headers, verify=PLAIN).status_code == 401


@pytest.mark.parametrize("host", ["localhost", "[::1]:8787", "[::1]", "127.0.0.1:80"])
def test_every_name_of_this_machine_is_local(proxy: Proxy, host: str) -> None:
    assert seen(proxy, headers={"host": host}) == ALL


def test_a_callers_key_opens_its_own_namespace(proxy: Proxy) -> None:
    own = {**STRANGER, "authorization": "Bearer one"}
    assert seen(proxy, headers=own) == ["model-of-one"]
    [session] = dashboard(proxy, "sessions", headers=own)
    assert session["model"] == "model-of-one"
    assert [row["model"] for row in dashboard(proxy, "savings", headers=own)["models"]] == ["model-of-one"]
    [others] = [one for one in dashboard(proxy, "sessions") if one["model"] == "model-of-two"]
    assert dashboard(proxy, f"sessions/{others['session']}", headers=own) == []
    assert len(dashboard(proxy, f"sessions/{others['session']}")) == 1
    reply = httpx.get(f"{proxy.root}/_offload/api/health", headers=own, verify=PLAIN)
    assert reply.status_code == 403


def test_what_became_of_messages_is_for_the_operator_and_their_owner(proxy: Proxy) -> None:
    place = next(row["id"] for row in dashboard(proxy, "requests") if row["compacted"])
    for headers, status in (
        ({}, 200),
        ({"authorization": "Bearer three"}, 200),
        ({"authorization": "Bearer one"}, 404),
    ):
        address = f"{proxy.root}/_offload/api/requests/{place}"
        assert httpx.get(address, headers=headers, verify=PLAIN).status_code == status, headers


def test_savings_are_those_of_the_own_namespace(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.db", 16 << 20)
    for number, namespace in enumerate(("acme-1", "acme-2")):
        found = outcome(number, namespace, holdout=Holdout.PLANNED, cost_before=10, cost_after=20, tokens_before=30)
        rows.write([Recorded(5.0, found, number)])
    reader = Reader(tmp_path / "rows.db")
    everything, own = (savings_page(0.0, name, lambda tenant, model: None, reader) for name in (None, "acme-1"))
    for seen, count in ((everything, 2), (own, 1)):
        assert [row["requests"] for row in seen["models"]] == [row["requests"] for row in seen["hours"]] == [count]
        assert (seen["sessions"], seen["groups"][0]["sessions"]) == ({"sessions": count, "losses": count}, count)
    reader.close()
    rows.close()


def test_all_of_the_savings_are_of_the_same_days_and_observed_sessions_are_no_losses(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.db", 16 << 20)
    costs = {"holdout": Holdout.PLANNED, "cost_before": 10, "cost_after": 20}
    for number, at in enumerate((DAY - 1, DAY + 1, DAY + 50_000)):
        rows.write([Recorded(at, outcome(number, **costs), number)])
    seen = msgspec.structs.replace(outcome(3, **costs), kind=Kind.OBSERVED)
    rows.write([Recorded(DAY + 60_000, seen, 3)])
    with closing(Reader(tmp_path / "rows.db")) as reader:
        found = savings_page(DAY + 40_000.0, None, lambda tenant, model: None, reader)
    rows.close()
    assert found["models"][0]["rewritten"] == sum(hour["requests"] for hour in found["hours"]) == 2
    assert found["sessions"] == {"sessions": 2, "losses": 2}
    assert found["groups"][0]["sessions"] == 3


def test_a_key_that_nobody_listed_does_not_open_a_shared_namespace(proxy: Proxy) -> None:
    reply = httpx.get(
        f"{proxy.root}/_offload/api/requests", headers={**STRANGER, "authorization": "Bearer stranger"}, verify=PLAIN
    )
    assert reply.status_code == 401
    refused = login(proxy, key="stranger")
    assert (refused.status_code, "not listed" in refused.text) == (403, True)


def test_the_login_sets_a_cookie_that_only_the_browser_and_the_proxy_see(proxy: Proxy) -> None:
    done = login(proxy, token="let me in")
    assert (done.status_code, done.headers["location"]) == (303, "./")
    cookie = SimpleCookie(done.headers["set-cookie"])["offload_session"]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/_offload/")
    assert not cookie["secure"]
    assert "let me in" not in str(done.headers)
    assert seen(proxy, headers=STRANGER, cookies={"offload_session": cookie.value}) == ALL

    safe = login(proxy, {"origin": "https://localhost"}, token="let me in")
    assert SimpleCookie(safe.headers["set-cookie"])["offload_session"]["secure"]

    own = SimpleCookie(login(proxy, key="two").headers["set-cookie"])["offload_session"].value
    assert seen(proxy, headers=STRANGER, cookies={"offload_session": own}) == ["model-of-two"]
    assert seen(proxy, cookies={"offload_session": own}) == ["model-of-two"], "on this machine, too"


def test_a_wrong_login_says_so(proxy: Proxy) -> None:
    for form in ({"token": "wrong"}, {"key": ""}, {}):
        refused = login(proxy, **form)
        assert refused.status_code == 403
        assert "set-cookie" not in refused.headers
    large = httpx.post(f"{proxy.root}/_offload/login", data={"token": "x" * 10_000}, verify=PLAIN)
    assert large.status_code == 413


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}],
    ids=str,
)
def test_pages_of_other_sites_get_nothing(proxy: Proxy, headers: dict[str, str]) -> None:
    for path in ("", "api/requests", "static/dashboard.js", "login"):
        assert httpx.get(f"{proxy.root}/_offload/{path}", headers=headers, verify=PLAIN).status_code == 403
    refused = httpx.post(f"{proxy.root}/_offload/login", data={"token": "let me in"}, headers=headers, verify=PLAIN)
    assert refused.status_code == 403


def test_every_page_forbids_foreign_code_and_frames(proxy: Proxy) -> None:
    for path in ("", "login", "api/me", "static/dashboard.js", "static/vendor/uPlot.iife.min.js"):
        reply = httpx.get(f"{proxy.root}/_offload/{path}", verify=PLAIN)
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["static/../pages.py", "static/%2e%2e/pages.py", "static/vendor/SHA256SUMS", "static/"]
)
def test_only_static_files_are_served(proxy: Proxy, path: str) -> None:
    assert httpx.get(f"{proxy.root}/_offload/{path}", verify=PLAIN).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["requests?before=-1", "requests?before=9e9", "requests?before=" + "9" * 400, "savings?days=0", "savings?days=x",
     "sessions/zz", "sessions/-1", "sessions/" + "f" * 400, "requests/" + "9" * 400,
     "requests/" + "9" * 5_000, "requests/-1", "requests/%D9%A3", "requests/0x1", "requests?before=%D9%A3"],
)  # fmt: skip
def test_odd_parameters_are_harmless(proxy: Proxy, path: str) -> None:
    assert httpx.get(f"{proxy.root}/_offload/api/{path}", verify=PLAIN).status_code in (200, 404)


def test_a_secret_is_made_for_each_file(tmp_path: Path) -> None:
    one, two = Rows(tmp_path / "one", 1 << 20), Rows(tmp_path / "two", 1 << 20)
    again = Rows(tmp_path / "one", 1 << 20)
    assert one.secret() == again.secret() != two.secret()
    for rows in (one, two, again):
        rows.close()
