"""Who may see what: the operator everything, a caller's key its own namespace, and pages of other
sites nothing."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from http.cookies import SimpleCookie
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from proxy.apps.dashboard import (
    AT_ONCE,
    VALID,
    VIEWERS,
    Access,
    Dashboard,
    Viewer,
    invitation,
    new_link,
    use_link,
)
from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import DAY, Recorded, Rows
from proxy.apps.dashboard.savings import savings
from proxy.errors import DashboardFault, Overloaded
from proxy.server.process import Process
from proxy.settings import Settings
from proxy.telemetry.outcome import Holdout, Kind
from tests.apps.dashboard.traffic import (
    OPERATOR,
    begin,
    dashboard,
    key,
    outcome,
    recorded,
    session,
    turn,
)
from tests.clock import PATIENCE, Clock, soon, wait_until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import ADMIN, PLAIN, Proxy, served, spawned, tight
from tests.wire import connection, heard, read_message

STRANGER = {"x-forwarded-for": "192.0.2.1"}
"""What a reverse proxy on this machine adds; its callers are elsewhere."""


def access(
    token: str | None = "right", secret: bytes = b"s" * 32, now: float = 1_000_000.0
) -> Access:
    return Access(token, lambda: secret, lambda: now)


def test_a_cookie_names_its_viewer_until_it_ends() -> None:
    for namespace in (None, "acme-1"):
        cookie = access().cookie(Viewer(namespace))
        assert access().viewer(cookie) == Viewer(namespace)
        assert access(secret=b"t" * 32).viewer(cookie), (
            "another replica with the same token takes it"
        )
        assert access(token="changed").viewer(cookie) is None
        assert access(token="").viewer(cookie) is None
        assert access().viewer(cookie[:-4] + "AAA=") is None
        assert access(now=1_000_000.0 + VALID).viewer(cookie) is None


@pytest.mark.parametrize(
    "cookie", ["", "x", "é", "AAAA", "=" * 10, "A" * 5_000, "AAAA" * 20, "A" * 44, "\x00"]
)
def test_any_other_cookie_is_nobodys(cookie: str) -> None:
    assert access().viewer(cookie) is None
    assert access(token="", secret=b"").viewer(cookie) is None


def test_without_a_token_the_files_secret_signs() -> None:
    cookie = access(token=None).cookie(Viewer())
    assert access(token="").viewer(cookie) == Viewer()
    assert access(token=None, secret=b"t" * 32).viewer(cookie) is None
    assert access(token=None, secret=b"").viewer(cookie) is None
    with pytest.raises(DashboardFault):
        access(token=None, secret=b"").cookie(Viewer())


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    path = tmp_path_factory.mktemp("dashboard") / "rows.db"
    with StrictUpstream() as upstream:
        policies = {
            "default": tight(upstream.url, share_namespace=True),
            "acme": tight(
                upstream.url,
                api_keys=[{"env": "ONE"}, {"env": "TWO"}, {"env": "THREE"}, {"env": "FOUR"}],
            ),
        }
        settings = {
            "allowed_hosts": ("proxy.example",),
            "environment": {"ONE": "one", "TWO": "two", "THREE": "three", "FOUR": "four"},
        }
        with served(policies, dashboard=path, **settings) as running:
            for caller in ("one", "two", "stranger"):
                upstream.script(text("Hello."))
                turn(
                    running,
                    begin(f"Hello from {caller}."),
                    1,
                    key=caller,
                    model=f"model-of-{caller}",
                )
            session(running, upstream, 4, key="three", model="model-of-three")
            recorded(running, 7)
            yield running


def seen(proxy: Proxy, **request: object) -> list[str]:
    return sorted({row["model"] for row in dashboard(proxy, "requests", **request)} - {""})


def login(proxy: Proxy, headers: dict[str, str] | None = None, **form: str) -> httpx.Response:
    return httpx.post(
        f"{proxy.root}/_offload/login",
        data=form,
        headers={**STRANGER, **(headers or {})},
        verify=PLAIN,
    )


ALL = ["model-of-one", "model-of-stranger", "model-of-three", "model-of-two"]


def test_the_operator_sees_everything(proxy: Proxy) -> None:
    assert seen(proxy) == ALL
    assert seen(proxy, headers={**STRANGER, **OPERATOR}) == ALL


@pytest.mark.parametrize(
    ("asked", "models"),
    [
        ("model=model-of-one", ["one"]),
        ("tenant=acme&text=OF-TWO", ["two"]),
        ("outcome=changed&period=hour", ["three"]),
        ("outcome=errors", []),
        ("sort=came&limit=1", ["three"]),
        ("limit=3&offset=0&period=never", ["three"]),
        ("after=999", []),
        ("session=none", []),
    ],
)
def test_an_address_says_which_requests_are_shown(
    proxy: Proxy, asked: str, models: list[str]
) -> None:
    # what other tests ask names no model
    named = asked if "text=" in asked else f"{asked}&text=model-of"
    found = {row["model"] for row in dashboard(proxy, f"requests?{named}")}
    assert found == {f"model-of-{name}" for name in models}


def test_others_see_nothing(proxy: Proxy) -> None:
    for path in ("", "api/me", "api/requests", "api/savings", "api/sessions", "api/health"):
        for headers in (
            STRANGER,
            {"host": "localhost"},
            {"host": "127.0.0.1:80"},
            {"host": "proxy.example"},
        ):
            reply = httpx.get(f"{proxy.root}/_offload/{path}", headers=headers, verify=PLAIN)
            assert reply.status_code == (401 if path else 303), (path, headers)
            assert "Log in at /_offload/login" in reply.text or not path
            assert "model-of" not in reply.text


def test_the_proxys_address_leads_a_browser_to_the_pages(proxy: Proxy) -> None:
    """A program that asks for `/` asks upstream."""
    reply = httpx.get(proxy.root, headers={"accept": "text/html,*/*"}, verify=PLAIN)
    assert (reply.status_code, reply.headers["location"]) == (307, "/_offload/")
    assert httpx.get(proxy.root, verify=PLAIN).status_code == 404, "what upstream says"
    bare = httpx.get(f"{proxy.root}/_offload", verify=PLAIN)
    assert bare.status_code == 307 and bare.headers["location"].endswith("/_offload/")


def test_a_callers_key_opens_its_own_namespace(proxy: Proxy) -> None:
    own = {**STRANGER, **key("one")}
    assert seen(proxy, headers=own) == ["model-of-one"]
    me = dashboard(proxy, "me", headers=own)
    assert (me["operator"], me["off"], me["fault"], "file" in me) == (False, False, "", False)
    [session] = dashboard(proxy, "sessions", headers=own)
    assert session["model"] == "model-of-one"
    assert [row["model"] for row in dashboard(proxy, "savings", headers=own)["models"]] == [
        "model-of-one"
    ]
    assert [row["model"] for row in dashboard(proxy, "names", headers=own)] == ["model-of-one"]
    assert dashboard(proxy, "latency?model=model-of-two", headers=own)["requests"] == 0
    assert dashboard(proxy, "requests?model=model-of-two", headers=own) == []
    [others] = [one for one in dashboard(proxy, "sessions") if one["model"] == "model-of-two"]
    assert dashboard(proxy, f"sessions/{others['session']}", headers=own) == []
    assert len(dashboard(proxy, f"sessions/{others['session']}")) == 1
    place = next(row["id"] for row in dashboard(proxy, "requests") if row["compacted"])
    for path, headers, status in (
        ("health", own, 403),
        (f"requests/{place}", own, 404),
        (f"requests/{place}", key("three"), 200),
        (f"requests/{place}", OPERATOR, 200),
    ):
        assert (
            httpx.get(
                f"{proxy.root}/_offload/api/{path}", headers=headers, verify=PLAIN
            ).status_code
            == status
        )


@pytest.mark.parametrize(
    ("period", "requests"), [("hour", 1), ("day", 2), ("week", 3), ("month", 4)]
)
def test_all_of_a_period_is_of_the_same_time_and_observed_sessions_are_no_losses(
    period: str, requests: int, tmp_path: Path
) -> None:
    now, costs = 100.5 * DAY, {"holdout": Holdout.PLANNED, "cost_before": 10, "cost_after": 20}
    with (
        closing(Rows(tmp_path / "rows.db", 16 << 20)) as rows,
        closing(Reader(tmp_path / "rows.db")) as reader,
    ):
        for number, age in enumerate((60.0, 0.2 * DAY, 5.0 * DAY, 25.0 * DAY, 40.0 * DAY)):
            rows.write([Recorded(now - age, outcome(number, **costs), number)])
        rows.write([Recorded(now - 9, outcome(9, kind=Kind.OBSERVED, status=200, **costs), 9)])
        found = savings(reader, period, now, lambda tenant, model: 2.0)
    assert (
        found["models"][0]["rewritten"]
        == sum(one["requests"] for one in found["course"])
        == requests
    )
    assert [(one["sessions"], one["losses"]) for one in found["sessions"]] == [(requests, requests)]
    earlier = {"hour": 0, "day": 0, "week": 0, "month": 1}[period]
    assert found["before"]["tokens_before"] == earlier * found["course"][0]["tokens_before"]
    assert len(found["worst"]) == min(requests, 5) and found["models"][0]["observed"] == 1
    assert {row["price"] for row in (*found["models"], *found["worst"])} == {2.0}


@pytest.mark.parametrize(
    ("caller", "said"), [("stranger", "not listed"), ("four", "Nothing is kept"), ("x", "")]
)
def test_a_key_without_requests_of_its_own_opens_nothing(
    caller: str, said: str, proxy: Proxy
) -> None:
    """A namespace is the digest of a key: any made-up one would have its own."""
    reply = httpx.get(
        f"{proxy.root}/_offload/api/requests", headers={**STRANGER, **key(caller)}, verify=PLAIN
    )
    assert reply.status_code == 401
    refused = login(proxy, key=caller)
    assert (refused.status_code, said in refused.text) == (403, True)


def test_the_login_sets_a_cookie_that_only_the_browser_and_the_proxy_see(proxy: Proxy) -> None:
    done = login(proxy, token=ADMIN)
    assert (done.status_code, done.headers["location"]) == (303, "./")
    [cookie] = SimpleCookie(done.headers["set-cookie"]).values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (
        True,
        "strict",
        "/_offload/",
    )
    assert not cookie["secure"]
    assert ADMIN not in str(done.headers)
    with_it = {"headers": STRANGER, "cookies": {cookie.key: cookie.value}}
    assert seen(proxy, **with_it) == ALL
    assert [dashboard(proxy, "me", **given)["logged_in"] for given in ({}, with_it)] == [
        False,
        True,
    ]

    safe = login(proxy, {"origin": "https://localhost"}, token=ADMIN)
    assert SimpleCookie(safe.headers["set-cookie"])[cookie.key]["secure"]

    own = SimpleCookie(login(proxy, key="two").headers["set-cookie"])[cookie.key].value
    assert seen(proxy, headers=STRANGER, cookies={cookie.key: own}) == ["model-of-two"]


async def test_a_login_that_does_not_end_is_refused(tmp_path: Path) -> None:
    """Connections of strangers who send nothing more would keep out everybody else."""
    clock = Clock(goes=True)
    begun = b"POST /_offload/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\ntoken"
    with served(dashboard=tmp_path / "rows.db", clock=clock, body_timeout=60) as proxy:
        async with connection(proxy.port) as (reader, writer):
            writer.write(begun)
            await heard(proxy.port)
            clock.move(61)
            assert (await soon(read_message(reader))).status == 408


def test_a_wrong_login_says_so(proxy: Proxy) -> None:
    for form, said in (
        ({"token": "wrong"}, "This is not the admin token."),
        ({"key": ""}, "This key is not listed"),
        ({}, "This key is not listed"),
    ):
        refused = login(proxy, **form)
        assert refused.status_code == 403 and said in refused.text
        assert "set-cookie" not in refused.headers
    large = httpx.post(f"{proxy.root}/_offload/login", data={"token": "x" * 10_000}, verify=PLAIN)
    assert large.status_code == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
    ids=str,
)
def test_pages_of_other_sites_get_nothing(proxy: Proxy, headers: dict[str, str]) -> None:
    for path in ("", "api/requests", "static/dashboard.js", "login"):
        assert (
            httpx.get(f"{proxy.root}/_offload/{path}", headers=headers, verify=PLAIN).status_code
            == 403
        )
    refused = httpx.post(
        f"{proxy.root}/_offload/login", data={"token": ADMIN}, headers=headers, verify=PLAIN
    )
    assert refused.status_code == 403


def test_every_page_forbids_foreign_code_and_frames(proxy: Proxy) -> None:
    for path in ("", "login", "api/me", "static/dashboard.js", "static/charts.js"):
        reply = httpx.get(f"{proxy.root}/_offload/{path}", verify=PLAIN)
        policy = reply.headers["content-security-policy"]
        assert (
            policy.startswith("default-src 'none'")
            and "unsafe" not in policy
            and "frame-ancestors 'none'" in policy
        )
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"


def test_only_static_files_are_served(proxy: Proxy) -> None:
    for path in ("static/../pages.py", "static/%2e%2e/pages.py", "static/vendor", "static/"):
        assert httpx.get(f"{proxy.root}/_offload/{path}", verify=PLAIN).status_code == 404, path


ODD = (
    "savings?days=0", "savings?period=x", "savings?period=%00", "sessions/zz", "sessions/-1", "sessions/" + "f" * 400,
    "requests?sort=id;drop&outcome='&text=%27%22&tenant=%00&offset=" + "9" * 18, "requests?limit=0&session=zz",
    "requests?period=x&text=" + "a" * 5_000, "latency?outcome=errors&text=%25", "sessions?session=" + "f" * 99,
    "names?x",
)  # fmt: skip
NOWHERE = (
    "requests/" + "9" * 400,
    "requests/" + "9" * 5_000,
    "requests/-1",
    "requests/%D9%A3",
    "requests/0x1",
)
NO_NUMBERS = ("limit=x", "limit=", "offset=-1", f"after={10**18}", "after=%D9%A3x")


def test_odd_parameters_are_harmless(proxy: Proxy) -> None:
    answers = {path: 200 for path in ODD} | {path: 404 for path in NOWHERE}
    answers |= {f"requests?{asked}": 400 for asked in NO_NUMBERS}
    for path, status in answers.items():
        reply = httpx.get(f"{proxy.root}/_offload/api/{path}", headers=OPERATOR, verify=PLAIN)
        assert (path, reply.status_code) == (path, status)
        assert status != 400 or "int" in reply.json()["error"]["message"]


async def test_viewers_are_bounded_and_never_keep_the_operator_waiting(tmp_path: Path) -> None:
    path, go_on = tmp_path / "rows.db", threading.Event()
    with closing(Rows(path, 1 << 20)) as rows:
        rows.write([Recorded(1.0, outcome())])
    board = Dashboard(Settings(dashboard=path), MagicMock(), MagicMock())

    def waits(reader: Reader) -> int:
        go_on.wait(PATIENCE)
        return 1

    waiting = []
    for number in range(VIEWERS // AT_ONCE):
        viewer = Viewer(f"acme-{number}")
        waiting += [asyncio.create_task(board.read(waits, viewer)) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await board.read(waits, viewer)
    with pytest.raises(Overloaded):
        await board.read(waits, Viewer("another-1"))
    assert len(await board.read(lambda reader: reader.requests(), Viewer())) == 1
    go_on.set()
    assert sum(await asyncio.gather(*waiting)) == VIEWERS
    assert await board.read(waits, Viewer("another-1")) == 1, "those that are done make place"
    board.close()
    with pytest.raises(DashboardFault, match="The process ends"):
        await board.read(waits, Viewer())


def test_without_a_token_a_printed_link_opens_the_pages_of_all_workers_once(tmp_path: Path) -> None:
    flags = ["--workers=2", f"--dashboard={tmp_path / 'rows.db'}"]
    with (
        StrictUpstream() as upstream,
        spawned({"default": tight(upstream.url)}, flags=flags) as proxy,
    ):
        [link] = re.findall(r"opens, once, at (\S+)", proxy.log())
        assert link.startswith(f"{proxy.root}/_offload/login?once=")
        with httpx.Client(follow_redirects=True, verify=PLAIN) as browser:
            assert browser.get(link).status_code == 200
            cookies = dict(browser.cookies)
        again = httpx.get(link, verify=PLAIN)
        assert (
            again.status_code,
            "has been used" in again.text,
            "set-cookie" in again.headers,
        ) == (403, True, False)

        upstream.respond(lambda request: text("Served."))
        for number in range(40):
            turn(proxy, begin(), number)
        # with a new connection each, to any of the workers
        asked = {"headers": {}, "cookies": cookies}
        wait_until(lambda: len(dashboard(proxy, "requests", **asked)) == 40)
        rows = dashboard(proxy, "requests", **asked)
        assert len({row["worker"] for row in rows}) > 1
        assert [
            dashboard(proxy, "savings", **asked)["models"][0]["requests"] for _ in range(8)
        ] == [40] * 8
        assert dashboard(proxy, "me", **asked)["operator"] and "dashboard cannot" not in proxy.log()
        for path in ("api/me", "api/requests", "api/health"):
            assert httpx.get(f"{proxy.root}/_offload/{path}", verify=PLAIN).status_code == 401
        form = {"token": ""}
        assert (
            httpx.post(f"{proxy.root}/_offload/login", data=form, verify=PLAIN).status_code == 403
        )


def test_logins_of_two_proxies_on_one_host_are_kept_side_by_side(tmp_path: Path) -> None:
    """A browser sends a cookie to all ports, and these links open only once."""
    with StrictUpstream() as upstream, httpx.Client(verify=PLAIN) as browser:
        policies = {"default": tight(upstream.url)}
        flags = [[f"--dashboard={tmp_path / name}"] for name in ("one.db", "two.db")]
        with spawned(policies, flags=flags[0]) as one, spawned(policies, flags=flags[1]) as two:
            for proxy in (one, two):
                [link] = re.findall(r"opens, once, at (\S+)", proxy.log())
                assert browser.get(link).status_code == 303
            for proxy in (one, two):
                assert browser.get(f"{proxy.root}/_offload/api/me").json()["operator"]


def test_on_loopback_the_link_is_printed_and_the_login_names_no_other(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path), "OFFLOAD_DASHBOARD": ""}
    with StrictUpstream() as upstream:
        policies = {"default": tight(upstream.url)}
        with spawned(policies, environment=state) as proxy:
            login = f"{proxy.root}/_offload/login"
            [link] = re.findall(r"opens, once, at (\S+)", proxy.log())
            assert "Open the link that the proxy printed" in httpx.get(login, verify=PLAIN).text
            assert httpx.get(link, verify=PLAIN).status_code == 303
            assert "This link has been used" in httpx.get(link, verify=PLAIN).text
            assert "No link is left" in httpx.get(login, verify=PLAIN).text
        assert len([*(tmp_path / "offload-proxy").glob("dashboard-*.db")]) == 1
        with spawned(policies, environment=state, flags=["--dashboard=off"]) as proxy:
            assert "once" not in proxy.log()
            asked = httpx.get(f"{proxy.root}/_offload/", follow_redirects=True, verify=PLAIN)
            assert "The dashboard is off" in asked.text and "Open the link" not in asked.text


@pytest.mark.parametrize(
    ("address", "replica", "reached"),
    [
        ("http://127.0.0.1:8787", None, "http://127.0.0.1:8787"),
        ("http://0.0.0.0:8787", None, "http://localhost:8787"),
        ("http://[::]:8787", None, "http://localhost:8787"),
        ("http://0.0.0.0:8787", "http://10.0.0.7:80/", "http://10.0.0.7:80"),
    ],
)
def test_the_printed_link_leads_to_an_address_that_a_browser_may_name(
    tmp_path: Path, address: str, replica: str | None, reached: str
) -> None:
    settings = Settings(dashboard=tmp_path / "rows.db", replica_url=replica)
    link = invitation(settings, address).removeprefix("the dashboard opens, once, at ")
    assert link.startswith(f"{reached}/_offload/login?once=")
    named = [(b"host", urlsplit(link).netloc.encode())]
    Process(msgspec.structs.replace(settings, store=str(tmp_path))).check_origin(named, b"/")


def test_a_later_start_replaces_the_link(tmp_path: Path) -> None:
    settings = Settings(dashboard=tmp_path / "rows.db")
    first, second = (new_link(settings, "http://here") or "" for _ in range(2))
    assert not use_link(settings, first.partition("=")[2]) and not use_link(settings, "")
    assert use_link(settings, second.partition("=")[2]) and not use_link(
        settings, second.partition("=")[2]
    )
    assert new_link(msgspec.structs.replace(settings, admin_token=ADMIN), "http://here") is None
    (tmp_path / "damaged.db").write_bytes(b"no database" * 999)
    assert new_link(Settings(dashboard=tmp_path / "damaged.db"), "http://here") is None


@pytest.mark.parametrize("token", [ADMIN, None])
def test_a_default_nginx_on_this_machine_opens_nothing(token: str | None, tmp_path: Path) -> None:
    """It adds no header and replaces `Host` with the address of the upstream, as if a browser here
    had asked."""
    settings = {"dashboard": tmp_path / "rows.db", "admin_token": token, "monitor_networks": ()}
    with served(
        {"default": {"upstream": {"base_url": "http://127.0.0.1:9/v1"}}}, **settings
    ) as proxy:
        behind = {"host": f"127.0.0.1:{proxy.port}", "connection": "close"}
        public = httpx.Client(base_url=proxy.root, headers=behind, verify=PLAIN)
        found = {
            path: public.get(path).status_code
            for path in ("/metrics", "/health?deep=1", "/_offload/")
        }
        assert found == {"/metrics": 403, "/health?deep=1": 403, "/_offload/": 303}
        for path in ("me", "requests", "sessions", "savings", "health"):
            assert public.get(f"/_offload/api/{path}").status_code == 401
        assert public.post("/_offload/login", data={"key": "made up"}).status_code == 403
        if token:
            assert (
                public.get("/metrics", headers={"authorization": f"Bearer {token}"}).status_code
                == 200
            )
