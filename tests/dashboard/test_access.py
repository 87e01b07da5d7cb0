"""Who may see what: the operator everything, a caller's key its own namespace, and pages of other sites nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from http.cookies import SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bench.dashboard import Recorded, batch_of
from proxy.dashboard import live as live_module
from proxy.dashboard.access import VALID, Access, Viewer
from proxy.dashboard.database import Database
from proxy.dashboard.events import LIVE, LiveRows
from proxy.dashboard.live import ALIVE, BEGINNING, VIEWERS, Live
from proxy.dashboard.pages import DAY, savings_page
from proxy.dashboard.reader import Reader
from proxy.dashboard.rows import Seen
from proxy.dashboard.writer import LOOKING
from proxy.errors import Fault
from proxy.telemetry.outcome import Holdout, Kind
from tests.dashboard.test_faults import outcome
from tests.dashboard.traffic import apart, begin, dashboard, recorded, session, turn, until
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


@pytest.mark.parametrize(
    "path", ["", "api/me", "api/requests", "api/live", "api/savings", "api/sessions", "api/health"]
)
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


def test_a_request_for_a_head_gets_what_a_get_would(proxy: Proxy) -> None:
    """A stream has no end, so a reply without a body must not wait for it."""
    with httpx.Client(base_url=f"{proxy.root}/_offload/", verify=PLAIN, timeout=30) as client:
        for path in ("", "login", "api/me", "api/live", "static/dashboard.js"):
            assert client.head(path).status_code == 200, path
            assert client.get("api/me").status_code == 200, "on the same connection"


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
    database = Database(tmp_path / "rows.db", 16 << 20)
    for number, namespace in enumerate(("acme-1", "acme-2")):
        found = outcome(number, namespace, holdout=Holdout.PLANNED, cost_before=10, cost_after=20, tokens_before=30)
        database.write(batch_of([Recorded(5.0, found, Seen(number))]))
    reader = Reader(tmp_path / "rows.db")
    everything, own = (savings_page(0.0, name, lambda tenant, model: None, reader) for name in (None, "acme-1"))
    for seen, count in ((everything, 2), (own, 1)):
        assert [row["requests"] for row in seen["models"]] == [row["requests"] for row in seen["hours"]] == [count]
        assert (seen["sessions"], seen["groups"][0]["sessions"]) == ({"sessions": count, "losses": count}, count)
    reader.close()
    database.close()


def test_all_of_the_savings_are_of_the_same_days_and_observed_sessions_are_no_losses(tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.db", 16 << 20)
    costs = {"holdout": Holdout.PLANNED, "cost_before": 10, "cost_after": 20}
    for number, at in enumerate((DAY - 1, DAY + 1, DAY + 50_000)):
        database.write(batch_of([Recorded(at, outcome(number, **costs), Seen(number))]))
    seen = msgspec.structs.replace(outcome(3, **costs), kind=Kind.OBSERVED)
    database.write(batch_of([Recorded(DAY + 60_000, seen, Seen(3))]))
    with closing(Reader(tmp_path / "rows.db")) as reader:
        found = savings_page(DAY + 40_000.0, None, lambda tenant, model: None, reader)
    database.close()
    assert found["models"][0]["rewritten"] == sum(hour["requests"] for hour in found["hours"]) == 2
    assert found["sessions"] == {"sessions": 2, "losses": 2}
    assert found["groups"][0]["sessions"] == 3


async def test_a_viewers_stream_has_its_own_rows() -> None:
    async def rows(last: int) -> list[LiveRows]:
        return [event(id, f"acme-{id}") for id in (1, 2)] if last == 0 else []

    async def newest() -> int:
        return 0

    for viewer, ids in ((Viewer("acme-1"), [1]), (Viewer(), [1, 2])):
        stream = Live(rows, newest).events(viewer, lambda: 0.0)
        await anext(stream)
        assert await anext(stream) == streamed(*ids)
        await stream.aclose()


@pytest.mark.parametrize("order", ["the look first", "the stream first"])
@pytest.mark.parametrize("push", [None, lambda piece: False])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_stream_goes_on_after_the_rows_that_a_viewer_has(
    order: str, others: int, push: Callable[[bytes], bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are added at each step: none is missing and none comes twice, whoever reads the file first."""
    monkeypatch.setattr(live_module, "EVERY", 0.001)
    ids, late = [1, 2, 3], [4, 5, 6, 7, 8, 9]

    async def found(read: Callable[[], Any]) -> Any:
        for _ in range(3 if (order == "the look first") == (asyncio.current_task() is viewing) else 0):
            await asyncio.sleep(0)
        result = read()
        if late:
            ids.append(late.pop(0))
        return result

    async def rows(last: int) -> list[LiveRows]:
        return await found(lambda: [event(id) for id in ids if id > last])

    async def newest() -> int:
        return await found(lambda: max(ids))

    viewing, live, text = asyncio.current_task(), Live(rows, newest), b""
    already = [live.events(Viewer(), lambda: 0.0) for _ in range(others)]
    for one in already:
        await anext(one)
    stream = live.events(Viewer(), lambda: 0.0, push, after=1)
    while b"id: 9\n" not in text:
        text += await anext(stream)
    assert [int(id) for id in re.findall(rb'"ids":\[(\d+)', text)] == [2, 3, 4, 5, 6, 7, 8, 9]
    for one in (stream, *already):
        await one.aclose()


@pytest.mark.parametrize("after", [3, 1_000])
async def test_a_stream_goes_on_in_a_file_whose_ids_begin_anew(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "EVERY", 0.001)
    ids, looks = [1, 2, 3], asyncio.Semaphore(0)

    async def rows(last: int) -> list[LiveRows]:
        return [event(id) for id in ids if id > last]

    async def newest() -> int:
        looks.release()
        return max(ids)

    stream = Live(rows, newest).events(Viewer(), lambda: 0.0, after=after)
    assert await anext(stream) == BEGINNING
    coming = asyncio.create_task(_event(stream))
    for _ in range(5):
        await looks.acquire()
    ids[:] = [1]
    for _ in range(5):
        await looks.acquire()
    ids.append(2)
    assert await coming == streamed(2)
    await stream.aclose()


def test_a_browser_that_connects_again_gets_what_came_meanwhile(tmp_path: Path) -> None:
    with StrictUpstream() as upstream, served({"default": tight(upstream.url)}, dashboard=tmp_path / "rows.db") as one:
        upstream.respond(lambda request: text("Hello."))
        for number in range(4):
            turn(one, begin(), number, key="other" if number == 2 else "k")
        recorded(one, 4)
        for asked, headers, expected in (
            ("?after=1", {}, [2, 3, 4]),
            ("?after=1", {"last-event-id": "3"}, [4]),
            ("?after=1", {"authorization": "Bearer k"}, [2, 4]),
        ):
            address = f"{one.root}/_offload/api/live{asked}"
            with httpx.stream("GET", address, headers=headers, verify=PLAIN, timeout=10) as stream:
                lines, ids = stream.iter_lines(), list[int]()
                while len(ids) < len(expected):
                    line = next(lines)
                    kind, _, data = line.partition(": ")
                    ids += sorted(id for rows in json.loads(data) for id in rows["ids"]) if kind == "data" else []
            assert ids[: len(expected)] == expected


async def test_viewers_beyond_the_limit_are_refused_however_fast_they_come(tmp_path: Path) -> None:
    with served({"default": tight("http://127.0.0.1:9")}, dashboard=tmp_path / "rows.db") as proxy:
        host, port = proxy.root.removeprefix("http://").split(":")
        lines = [await asyncio.open_connection(host, int(port)) for _ in range(VIEWERS + 20)]
        for _, writer in lines:
            writer.write(b"GET /_offload/api/live HTTP/1.1\r\nHost: %b:%b\r\n\r\n" % (host.encode(), port.encode()))
        heads = [await reader.readuntil(b"\r\n") for reader, _ in lines]
        for _, writer in lines:
            writer.close()
            await writer.wait_closed()
        assert Counter(head.split()[1] for head in heads) == {b"200": VIEWERS, b"503": 20}
        until(lambda: _status(f"{proxy.root}/_offload/api/live") == 200)  # those who left make room


async def test_many_viewers_get_the_rows_less_often() -> None:
    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    live, paces = Live(never, never), []
    for viewers in (1, 5, 10, 20, 100):
        streams = [live.events(Viewer(), lambda: 0.0) for _ in range(viewers)]
        for stream in streams:
            await anext(stream)
        paces.append(live.pace)
        for stream in streams:
            await stream.aclose()
    assert paces == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert live_module.SLOWEST < LOOKING, "other processes notice that somebody watches, and write at once"


def test_the_stream_has_what_the_live_page_shows(tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.db", 16 << 20)
    moved = outcome(1, "acme-1", tokens_before=30, tokens_after=20, compacted=2, new_event=True, events=1)
    failed = outcome(2, "acme-2", fault=Fault.BROKEN, detail="broken")
    called = msgspec.structs.replace(outcome(3, "acme-1"), kind=Kind.OPERATION)
    database.write(
        batch_of([Recorded(5.0, moved, Seen(7)), Recorded(6.0, failed, Seen()), Recorded(7.0, called, Seen())])
    )
    with closing(Reader(tmp_path / "rows.db")) as reader:
        whole, came = reader.before(9)[::-1], reader.after(0)
        [newer] = reader.after(1)[1:]
        [partly] = reader.after(2)
    database.close()
    assert [(one.id, one.namespace, len(apart(one))) for one in came] == [(2, "acme-2", 1), (3, "acme-1", 2)]
    assert newer == partly
    kept = ("id", "time", "worker", "session")
    shown = (*kept, *LIVE)
    live = {row["id"]: row for one in came for row in apart(one)}
    assert apart(partly) == [live[3]]
    for row in whole:
        found = live[row["id"]]
        assert {name: value for name, value in found.items() if value} == {
            name: row[name] for name in shown if row[name]
        }
        assert set(kept) <= set(found) <= set(shown)
    script = (files("proxy.dashboard") / "static" / "live.js").read_text()
    common = (files("proxy.dashboard") / "static" / "common.js").read_text()
    words = common[common.index("export function happened") :]
    assert set(re.findall(r"\brow\.(\w+)", script + words)) <= set(shown)


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
    for path in ("", "api/requests", "api/live", "static/dashboard.js", "login"):
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
    one, two = Database(tmp_path / "one", 1 << 20), Database(tmp_path / "two", 1 << 20)
    again = Database(tmp_path / "one", 1 << 20)
    assert one.secret() == again.secret() != two.secret()
    for database in (one, two, again):
        database.close()


async def test_a_slow_viewer_misses_nothing_and_an_idle_one_hears_that_the_stream_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "EVERY", 0.001)
    monkeypatch.setattr(live_module, "SILENCE", 0.01)
    ids: list[int] = []

    async def rows(last: int) -> list[LiveRows]:
        return [event(id) for id in ids if id > last]

    async def newest() -> int:
        return max(ids, default=0)

    live = Live(rows, newest)
    slow, other, stranger = (
        live.events(viewer, lambda: 0.0) for viewer in (Viewer(), Viewer("acme"), Viewer("somebody"))
    )
    for stream in (slow, other, stranger):
        assert await anext(stream) == BEGINNING
    assert await anext(stranger) == ALIVE
    ids.append(1)
    first = streamed(1)
    assert await _event(slow) == first
    ids.append(2)
    text = b""
    while b"id: 2" not in text:  # the slow one asks for nothing meanwhile
        text += await _event(other)
    assert text in (first + streamed(2), streamed(1, 2)) and await _event(slow) == streamed(2)
    assert await anext(stranger) == ALIVE
    live.end()
    for stream in (slow, other, stranger):
        assert not b"".join([one async for one in stream]).strip(b": still here\n")
    assert live.viewers == 0


async def test_a_look_writes_to_viewers_itself_unless_they_are_behind_or_their_login_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "EVERY", 0.001)
    monkeypatch.setattr(live_module, "SILENCE", 0.01)
    ids: list[int] = []
    heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    now = 0.0

    async def rows(last: int) -> list[LiveRows]:
        return [event(id, namespace) for id in ids for namespace in ("acme", "other") if id > last]

    async def newest() -> int:
        return max(ids, default=0)

    def reads(piece: bytes) -> bool:
        heard.put_nowait(("pushed", piece))
        return True

    def behind(piece: bytes) -> bool:
        return False

    async def view() -> None:
        async for piece in live.events(Viewer("acme", until=5.0), lambda: now, lambda piece: push(piece)):
            heard.put_nowait(("yielded", piece))

    async def row() -> tuple[str, bytes]:
        while (found := await heard.get())[1] == ALIVE:
            pass
        return found

    live, push = Live(rows, newest), reads
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(view())
        assert await heard.get() == ("yielded", BEGINNING)
        assert await heard.get() == ("pushed", ALIVE)
        steps = ((reads, "pushed"), (behind, "yielded"), (reads, "pushed"), (_broken, "yielded"))
        for id, (answer, way) in enumerate(steps, 1):
            push = answer
            ids.append(id)
            assert await row() == (way, streamed(id))
        now = 6.0
    assert live.viewers == 0


def event(id: int, namespace: str = "acme") -> LiveRows:
    return LiveRows(id, namespace, b'{"ids":[%d]}' % id)


def streamed(*ids: int) -> bytes:
    return b"id: %d\ndata: [%b]\n\n" % (ids[-1], b",".join(event(id).text for id in ids))


def _status(url: str) -> int:
    with httpx.stream("GET", url, verify=PLAIN, timeout=10) as reply:
        return reply.status_code


def _broken(piece: bytes) -> bool:
    raise ValueError("a bug")


async def _event(stream: AsyncIterator[bytes]) -> bytes:
    """Return the next part of a stream that is no comment."""
    return await anext(part async for part in stream if not part.startswith(b":"))
