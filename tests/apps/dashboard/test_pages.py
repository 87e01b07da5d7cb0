"""Every page in a real browser, with the data of a session. Skipped, with the reason, where there
is no Chromium."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from proxy.apps.dashboard.rows import Recorded, Rows
from proxy.apps.verify import pairs
from proxy.errors import Fault
from proxy.telemetry.outcome import Basis, Kind
from tests import transcripts
from tests.apps.dashboard.browser import BINARY, MISSING, SHOWN, Page, browser
from tests.apps.dashboard.filled import TENANTS, fill
from tests.apps.dashboard.speaking import READ, SAY, Model, ask, play
from tests.apps.dashboard.traffic import (
    RESULT,
    begin,
    dashboard,
    key,
    outcome,
    recorded,
    session,
    turn,
)
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import ADMIN, Proxy, served, tight

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(BINARY is None, reason=MISSING)]

HOSTILE = '<img src="http://evil.example/x" onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
CONTROL = "\x00\x07\x1b[31m\u202etxt"

NOWHERE = {"default": {"upstream": {"base_url": "http://127.0.0.1:9/v1"}}}

SCREENSHOTS = os.environ.get("OFFLOAD_SCREENSHOTS")
"""A folder for screenshots, for the docs."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[StrictUpstream]:
    with StrictUpstream() as one:
        yield one


@pytest.fixture(scope="module")
def proxy(upstream: StrictUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy that has served a session, and one with hostile names and texts."""
    folder = tmp_path_factory.mktemp("dashboard")
    policy = tight(upstream.url, offload={"input_price": 2.0})
    with served({"default": policy}, dashboard=folder / "rows.db") as running:
        upstream.respond(model := Model())  # to other APIs than chat
        session(running, upstream, 12, read=True)
        for api in ("responses", "messages"):
            play(
                running,
                model,
                api,
                6,
                task=f"In {api}.",
                model=f"model-of-{api}",
                moves={4: READ},
                stream=True,
            )
        messages = begin(HOSTILE)
        for number, result in enumerate((HOSTILE * 20, CONTROL * 300, RESULT)):
            upstream.script(text("I look."))
            turn(running, messages, number, result=result, model=HOSTILE + CONTROL)
        recorded(running, 27)
        yield running


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with browser(tmp_path / "profile") as one:
        yield one


def address(proxy: Proxy) -> str:
    return f"{proxy.root}/_offload/"


async def shoot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        shot = await page.screenshot()
        await asyncio.to_thread((Path(SCREENSHOTS) / f"{name}.png").write_bytes, shot)


def assert_clean(page: Page, proxy: Proxy) -> None:
    """No request went to another host, nothing is said on the console, and no hostile text was
    taken for HTML."""
    assert page.complaints == []
    hosts = {urlsplit(asked).netloc for asked in page.asked if not asked.startswith("data:")}
    assert hosts == {f"127.0.0.1:{proxy.port}"}


async def find(page: Page, text: str) -> str:
    """Return the address behind the first link of the row with this text."""
    row = f"[...document.querySelectorAll('tbody tr')].find((one) => one.innerText.includes({json.dumps(text)}))"
    place: str = await page.evaluate(f"{row}.querySelector('a').hash")
    return place


async def test_every_page_shows_the_session(proxy: Proxy, page: Page) -> None:
    await page.size(1280)
    await page.open(address(proxy), ADMIN)
    shown = await page.text()
    for said in (
        "Saved", "tokens that clients sent", "Sessions that cost more", "Moved results read back",
        "whose cost is known", "Saved most", "Cost more", "gpt-4.1-mini", "is not measured", "of this replica",
    ):  # fmt: skip
        assert said in shown, said
    assert "tokens came and" in await page.evaluate(
        "document.querySelector('.chart svg').getAttribute('aria-label')"
    )

    shown = await page.show("#live")
    assert "gpt-4.1-mini" in shown and "event 1: " in shown
    assert "waiting: the history is" in shown, "why nothing was done"
    shown = await page.show("#savings")
    assert "Money saved" in shown and "is not measured" in shown and "model-of-messages" in shown

    assert "gpt-4.1-mini" in await page.show("#sessions")
    shown = await page.show(await find(page, "gpt-4.1-mini"))
    assert (
        "Moved " in shown
        and "because" in shown
        and "previews" in shown
        and "of them by the model" in shown
    )
    assert "12 requests; sent:" in await page.evaluate(
        "document.querySelector('.chart svg').getAttribute('aria-label')"
    )

    links = (
        "[...document.querySelectorAll('td a')].filter((one) => one.hash.startsWith('#request'))"
    )
    shown = await page.show(await page.evaluate(f"{links}.at(-1).hash"))
    assert (
        "a reference, since event 1" in shown
        and "Texts are not kept" in shown
        and "the same" in shown
    )
    assert "result of lookup" in shown and "lookup." in shown and "as it came, waiting" in shown
    assert "grep: ok" in shown, "what was read back"
    assert "topic number" not in shown, "no content by default"

    shown = await page.show("#health")
    for said in ("answers", "records", "Policies in force", "Upstreams", "Caches", "works"):
        assert said in shown, said
    assert await page.evaluate("document.title") == "Health - Offload Proxy"
    assert_clean(page, proxy)


async def test_a_request_has_the_same_figures_everywhere(proxy: Proxy, page: Page) -> None:
    row = next(
        one
        for one in dashboard(proxy, "requests")
        if one["model"] == "gpt-4.1-mini" and one["compacted"]
    )
    came, sent = (f"{row[name]:,}" for name in ("tokens_before", "tokens_after"))
    await page.size(1280)
    await page.open(address(proxy), ADMIN)
    await page.show("#live")
    line = await page.evaluate(
        f"document.querySelector('a[href=\"#request/{row['id']}\"]').closest('tr').innerText"
    )
    assert f"{came} → {sent}" in line
    for place in (f"#session/{row['session']}", f"#request/{row['id']}"):
        shown = await page.show(place)
        assert came in shown and sent in shown
    rows = [
        one for one in dashboard(proxy, "requests") if one["kind"] in ("offloaded", "untouched")
    ]
    before, after = (sum(one[name] for one in rows) for name in ("tokens_before", "tokens_after"))
    label = "document.querySelector('.chart svg').getAttribute('aria-label')"
    await page.show("#overview/hour")
    assert f"{_short(before)} tokens came and {_short(after)} were sent" in await page.evaluate(
        label
    )


def _short(number: int) -> str:
    return f"{number:,}" if number < 10_000 else f"{number / 1_000:.1f} k"


@transcripts.needed
async def test_a_recorded_run_fills_every_page(page: Page, tmp_path: Path) -> None:
    """Also makes the pictures of the docs: `OFFLOAD_SCREENSHOTS=docs/images`."""
    run = next(transcripts.load(60_000, "sweagent-claude35"))
    prices = {"cached_read": 0.1, "cache_write": 1.25, "input_price": 3.0}
    policy: dict[str, Any] = {
        "offload": {"profile": "balanced", "compress": {"wait": "always"}, **prices}
    }
    with StrictUpstream() as upstream:
        upstream.respond(model := Model())
        policy["upstream"] = {"base_url": upstream.url}
        with served({"default": policy}, dashboard=tmp_path / "rows.db") as proxy:
            histories = [history for history, _ in transcripts.requests_of(run)]
            for number, history in enumerate(histories):
                model.next.extend([READ, SAY] if number % 30 == 29 else [])
                assert (
                    ask(
                        proxy, "chat", history, tools=run.tools, model="claude-3-5-sonnet"
                    ).status_code
                    == 200
                )
            wait_until(lambda: dashboard(proxy, "me")["written"] >= len(histories))
            [one] = dashboard(proxy, "sessions")
            newest = dashboard(proxy, f"sessions/{one['session']}")[-1]["id"]
            await page.size(1280, 980)
            await page.open(address(proxy), ADMIN)
            pages = {
                "savings": ("#savings", "Money saved"),
                "session": (f"#session/{one['session']}", "because"),
                "request": (f"#request/{newest}", "Digest as it was sent"),
            }
            for name, (place, said) in pages.items():
                assert said in await page.show(place), name
                await shoot(page, name)
            assert_clean(page, proxy)


SCROLLING = """[...document.querySelectorAll('main *')].filter((one) => one.scrollWidth > one.clientWidth
    && ['auto', 'scroll'].includes(getComputedStyle(one).overflowX)).map((one) => one.outerHTML.slice(0, 200))"""
"""What is wider than its frame."""

PERIODS = ("#overview/hour", "#overview/day", "#overview/week", "#overview/month")
PAGES = (*PERIODS, "#live", "#sessions", "#savings", "#health", "#nonsense")


@pytest.mark.parametrize(
    ("count", "period"), [(0, 0.0), (1, 60.0), (34, 3_000.0), (40_000, 29 * 86_400.0)]
)
async def test_pages_are_clean_with_any_number_of_requests(
    count: int, period: float, page: Page, tmp_path: Path
) -> None:
    """Each page fits a screen and a phone, by day and by night, and axe-core finds nothing wrong
    with it. Also makes the pictures of the overview and the live page."""
    path = tmp_path / "rows.db"
    await asyncio.to_thread(fill, path, count, time.time(), period)
    with served(NOWHERE, dashboard=path) as proxy:
        await page.size(1280, 980)
        await page.open(address(proxy), ADMIN)
        await page.show("#sessions")
        places = [*PAGES]
        if count:
            newest = dashboard(proxy, "requests")[0]["id"]
            session = await page.evaluate("document.querySelector('td a').hash")
            places += [session, f"#request/{newest}"]
        for width, scheme in ((1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")):
            await page.size(width, 980)
            await page.scheme(scheme)
            for place in places:
                shown = await page.show(place)
                assert (
                    "cannot be shown" not in shown
                    and "NaN" not in shown
                    and "undefined" not in shown
                ), place
                assert await page.evaluate("document.documentElement.scrollWidth") <= width, (
                    place,
                    width,
                )
                if (width, scheme) in ((1280, "light"), (390, "dark")):
                    assert await page.faults() == [], (place, width, scheme)
                if count == 40_000 and place in ("#overview/month", "#live") and scheme == "light":
                    await shoot(
                        page, place[1:].partition("/")[0] + ("" if width == 1280 else "-phone")
                    )
                await page.evaluate(
                    "document.querySelectorAll('details').forEach((one) => (one.open = true))"
                )
                assert await page.evaluate(SCROLLING) == [], (place, width)
        assert_clean(page, proxy)


async def test_the_first_page_shows_how_often_the_model_does_the_same(
    page: Page, tmp_path: Path
) -> None:
    """Only where requests are asked again, and no figure of few."""
    path = tmp_path / "rows.db"
    longer = pairs.measured([pairs.Took(400, 9_000)], [pairs.Took(440, 4_500)])
    same = [
        outcome(
            number,
            kind=Kind.VERIFY,
            status=200,
            again_tools=1,
            both_tools=int(number > 9),
            whole_tools=int(number > 9),
            again_exact=1,
            both_exact=int(number > 19),
            whole_exact=int(number > 19),
            **longer,
        )
        for number in range(40)
    ]
    await asyncio.to_thread(fill, path, 34, time.time(), 3_000.0)
    with served(NOWHERE, dashboard=path) as proxy:
        await page.size(1280, 980)
        await page.open(address(proxy), ADMIN)
        assert "Same next action" not in await page.show("#overview/day")
        ticks = await page.evaluate(
            "[...document.querySelectorAll('.chart .tick')].map((one) => one.textContent)"
        )
        assert {"500 k", "1 M"} <= {*ticks} or {"200 k", "400 k"} <= {*ticks}, ticks
        with closing(Rows(path, 10**8)) as rows:
            refused = outcome(99, kind=Kind.VERIFY, status=502, fault=Fault.PROTOCOL)
            rows.write([Recorded(time.time(), one) for one in [refused, *same[:29]]])
            shown = (await page.show("#overview/hour")).replace("\n\n", "\n")
            few = "29 of the 30 compared requests that a figure needs"
            vain = "1 more request had no reply to compare"
            assert f"Same next action\nnot known yet\n{few}\n{vain}" in shown
            rows.write([Recorded(time.time(), one) for one in same[29:]])
        await page.show("#live")
        shown = (await page.show("#overview/hour")).replace("\n\n", "\n")
        assert "Same tools called\n75 %\nthe same tools with and without the plan" in shown
        assert "Same next action\n50 %" in shown and "100 % where the same request" in shown
        assert (
            "Length of replies\n10 % longer\nbetween 9 and 10 % longer, in the typical one of 40"
            in shown
        )
        assert "Cost with its reply\n50 % less" in shown
        for width in (1280, 400):
            await page.size(width, 980)
            await page.show("#live")
            assert "Same next action" in await page.show("#overview/hour")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.faults() == []
        assert_clean(page, proxy)


def dear(number: int, **fields: Any) -> Recorded:
    """Return a request of one session that sends fewer tokens for more money."""
    sizes = {
        "tokens_before": 90_000 + number,
        "tokens_after": 30_000 - number,
        "compacted": 5,
        "events": 1,
    }
    costs = {
        "cost_before": 1_000_000,
        "cost_after": 1_300_000,
        "usage": Basis.BILLED,
        "new_event": number == 1,
    }
    one = outcome(number, "default-1", **sizes, **costs, **fields)
    return Recorded(time.time(), one, 7, [0, 0, 0, 0, one.tokens_after, 0, 0, 0])


@pytest.mark.parametrize("price", [2.0, None])
async def test_there_is_money_only_where_there_is_a_price(
    price: float | None, page: Page, tmp_path: Path
) -> None:
    """One headline, and never green and red for the same requests."""
    path = tmp_path / "rows.db"
    with closing(Rows(path, 10**8)) as rows:
        rows.write(
            [
                dear(number, missed_tokens=12_000, miss="event" if number == 1 else "")
                for number in range(3)
            ]
        )
    local: dict[str, Any] = {"upstream": {"base_url": "http://127.0.0.1:9/v1"}}
    with served(
        {"default": {**local, "offload": {"input_price": price} if price else {}}}, dashboard=path
    ) as proxy:
        await page.size(1280)
        await page.open(address(proxy), ADMIN)
        for place in (
            "#overview/hour",
            "#sessions",
            f"#session/{7:016x}",
            "#savings/hour",
            "#request/1",
        ):
            shown = (await page.show(place)).replace("\n\n", "\n")
            colours = [
                await page.evaluate(f"document.querySelectorAll('.{one}').length")
                for one in ("good", "bad")
            ]
            assert 0 in colours, (place, colours)
            assert not re.search(r"-\$|-[\d.]+ [kMG%]", shown), "what is more is no negative saving"
            if price is None:
                assert (
                    "$" not in shown and "cost more" not in shown.lower() and "price" not in shown
                ), place
        shown = (await page.show("#overview/hour")).replace("\n\n", "\n")
        tiles = "document.querySelector('.tiles .figure').innerText"
        if price is None:
            assert await page.evaluate(tiles) == "67 %"
            assert "Prompt read again\n1 time\nin 3 requests" in shown
            assert "12.0 k tokens, as the server counted them" in shown
            assert "Largest prompt\n30.0 k tokens\n90.0 k tokens without the proxy" in shown
        else:
            assert await page.evaluate(tiles) == "30 % more"
            assert "$1.80 more than $6.00 for the input" in shown
            assert "67 % of the tokens: 180 k of 270 k tokens that clients sent" in shown
            assert "Sessions that cost more\n1\nof 1 session whose cost is known (100 %)" in shown
            assert "$1.80 more (+30 %)" in shown and "$1.80 more (+30 %)" in await page.show(
                "#sessions"
            )
        assert_clean(page, proxy)


async def test_tables_of_everything_fit_their_frames(proxy: Proxy, page: Page) -> None:
    """Also with long names, reasons and all kinds."""
    await page.open(address(proxy), ADMIN)
    rows = dashboard(proxy, "requests")
    sessions = {f"#session/{row['session']}": f"#request/{row['id']}" for row in rows}
    for width in (1280, 390):
        await page.size(width)
        for place in (*PAGES, *sessions, *sessions.values()):
            await page.show(place)
            await page.evaluate(
                "document.querySelectorAll('details').forEach((one) => (one.open = true))"
            )
            assert await page.evaluate(SCROLLING) == [], (place, width)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, (
                place,
                width,
            )
        assert_clean(page, proxy)


@pytest.mark.parametrize(
    "place", ["#nonsense", "#overview/nonsense", "#<img src=x>", "#constructor"]
)
async def test_a_page_that_there_is_not_says_so(place: str, proxy: Proxy, page: Page) -> None:
    await page.open(address(proxy), ADMIN)
    await page.evaluate(f"location.hash = {json.dumps(place)}")
    await page.until("document.querySelector('h1')?.textContent === 'There is no such page'")
    assert await page.evaluate(
        "[...document.querySelectorAll('main a')].map((one) => one.hash)"
    ) == ["#overview"]
    await page.call("Page.navigate", url=f"{address(proxy)}?#content")
    await page.until("document.querySelector('h1')?.textContent === 'Overview'")
    await page.evaluate("document.querySelector('.skip').click()")
    assert await page.evaluate("document.querySelector('h1').textContent") == "Overview"
    assert_clean(page, proxy)


async def test_the_cache_line_is_that_of_one_round(page: Page, tmp_path: Path) -> None:
    """All rounds of a request together read more from the cache than the prompt has tokens."""
    path, usage = (
        tmp_path / "rows.db",
        {"prompt_tokens": 96_000, "cached_tokens": 90_000, "rounds": 2},
    )
    one = outcome(1, "default-1", tokens_before=90_000, tokens_after=32_000, **usage)
    with closing(Rows(path, 10**8)) as rows:
        rows.write([Recorded(time.time(), one, 7, [32_000] + [0] * 7)])
    with served(NOWHERE, dashboard=path) as proxy:
        await page.open(address(proxy), ADMIN)
        await page.show(f"#session/{7:016x}")
        label = await page.evaluate(
            "document.querySelector('.chart svg').getAttribute('aria-label')"
        )
        assert label.endswith("read from upstream's cache, in a round: 30,000 at most.")


async def test_the_live_page_filters_sorts_and_turns_pages(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    await asyncio.to_thread(fill, path, 500, time.time(), 3_000.0)
    with served(NOWHERE, dashboard=path) as proxy:
        await page.size(1280)
        await page.open(address(proxy), ADMIN)
        every = dashboard(proxy, "requests?limit=500")
        column = (
            "[...document.querySelectorAll('.live tbody tr')].map((one) => one.cells[{}].innerText)"
        )
        await page.show("#live/tenant=build&model=gpt-5.5")
        assert {*await page.evaluate(column.format(1))} == {"gpt-5.5 build"}
        await page.show("#live/outcome=errors")
        wrong = [row for row in every if row["fault"]]
        assert len(await page.evaluate(column.format(6))) == len(wrong) > 0
        assert f"{len(wrong)}\nof the newest {len(wrong)} request" in (await page.text()).replace(
            "\n\n", "\n"
        )
        await page.show("#live/sort=saved")
        most = max(every, key=lambda row: row["tokens_before"] - row["tokens_after"])
        assert (
            await page.evaluate("document.querySelector('.live td a').hash")
            == f"#request/{most['id']}"
        )
        await page.show("#live/text=Sending%20them%20seven")
        found = await page.evaluate(column.format(6))
        assert found and all(one.startswith(("event ", "error: ")) for one in found)

        await page.show("#live")
        firsts = [await page.evaluate("document.querySelector('.live td a').hash")]
        for button, place in (("Older", 50), ("Older", 100), ("Newer", 50)):
            await page.evaluate(
                f"[...document.querySelectorAll('button')].find((one) => one.textContent === '{button}').click()"
            )
            first = f"#request/{every[place]['id']}"
            await page.until(f"document.querySelector('.live td a').hash === '{first}'")
        assert firsts == [f"#request/{every[0]['id']}"]

        select = "document.querySelectorAll('.filters select')[1]"
        await page.evaluate(
            f"{select}.value = 'qwen3-coder', {select}.dispatchEvent(new Event('change'))"
        )
        await page.until(f"{SHOWN} === '#live/model=qwen3-coder'")
        assert {*await page.evaluate(column.format(1))} <= {
            f"qwen3-coder {tenant}" for tenant in TENANTS
        }
        assert_clean(page, proxy)


async def test_tables_sort_turn_pages_and_are_saved_as_csv(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    await asyncio.to_thread(fill, path, 3_000, time.time(), 3_000.0)
    with closing(Rows(path, 16 << 20)) as rows:
        rows.write(
            [Recorded(time.time(), outcome(1, model='=HYPERLINK("http://x","a")'), 10**9, [1] * 8)]
        )
    with served(NOWHERE, dashboard=path) as proxy:
        await page.size(1280)
        await page.open(address(proxy), ADMIN)
        every = dashboard(proxy, "sessions")
        assert len(every) > 60
        await page.show("#sessions")
        assert await page.evaluate("document.querySelectorAll('tbody tr').length") == 50
        click = "[...document.querySelectorAll('button')].find((one) => one.textContent === '{}').click()"
        await page.evaluate(click.format("Next"))
        assert await page.evaluate("document.querySelectorAll('tbody tr').length") == min(
            len(every) - 50, 50
        )
        await page.evaluate(click.format("Requests"))
        assert (
            await page.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')")
            == "descending"
        )
        shown = await page.evaluate(
            "[...document.querySelectorAll('tbody tr')].map((one) => one.cells[2].innerText)"
        )
        assert shown == [
            str(count) for count in sorted((row["requests"] for row in every), reverse=True)[:50]
        ]

        await page.evaluate(
            "URL.createObjectURL = (blob) => (window.saved = blob, 'blob:none'), true"
        )
        await page.evaluate(
            "HTMLAnchorElement.prototype.click = function () { window.named = this.download; }, true"
        )
        await page.evaluate(click.format("CSV"))
        lines = [*csv.reader((await page.evaluate("window.saved.text()")).splitlines())]
        assert len(lines) == 1 + len(every) and lines[0][:3] == [
            "Last request (UTC)",
            "Model",
            "Requests",
        ]
        assert {row[2] for row in lines[1:]} == {str(row["requests"]) for row in every}
        assert '\'=HYPERLINK("http://x","a")' in {row[1] for row in lines[1:]}, (
            "a spreadsheet would run it"
        )
        assert (
            await page.evaluate("window.named")
            == "offload-the-sessions-with-the-newest-requests.csv"
        )

        await page.show("#live/tenant=build")
        await page.evaluate(click.format("CSV"))
        await page.until("window.named === 'offload-requests.csv'")
        lines = [*csv.reader((await page.evaluate("window.saved.text()")).splitlines())]
        assert len(lines) > 500 and {row[2] for row in lines[1:]} == {"build"}
        assert_clean(page, proxy)


async def test_a_chart_is_read_by_keyboard(proxy: Proxy, page: Page) -> None:
    await page.open(address(proxy), ADMIN)
    await page.show("#sessions")
    await page.show(await find(page, "gpt-4.1-mini"))
    await page.until("document.querySelector('.chart svg') !== null")
    await page.evaluate("document.querySelector('.chart svg').focus()")
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{}', bubbles: true }}))"
    for key_, said in (
        ("ArrowRight", "Request of the session 1:"),
        ("End", "Request of the session 12:"),
    ):
        await page.evaluate(press.format(key_))
        assert (await page.evaluate("document.querySelector('.readout').textContent")).startswith(
            said
        )


async def test_requests_without_a_list_say_why(
    proxy: Proxy, upstream: StrictUpstream, page: Page
) -> None:
    upstream.script(text("Hello."))
    turn(proxy, begin("Left alone."), 1, model="left-alone", headers={"x-offload": "off"})
    wait_until(lambda: any(row["model"] == "left-alone" for row in recorded(proxy, 1)))
    [row] = [row for row in recorded(proxy, 1) if row["model"] == "left-alone"]
    await page.open(address(proxy), ADMIN)
    shown = await page.show(f"#request/{row['id']}")
    assert (
        "the client sent `x-offload: off`" in shown and "messages are only listed with one" in shown
    )
    assert_clean(page, proxy)


async def test_hostile_text_is_shown_as_text(proxy: Proxy, page: Page) -> None:
    await page.open(address(proxy), ADMIN)
    assert "<img src=" in await page.show("#live")
    await page.show("#savings")
    await page.show("#sessions")
    shown = await page.show(await find(page, "<img"))
    assert "<script>" in shown and "\\u0007" in shown and "\\u202e" in shown
    await page.show(await page.evaluate("[...document.querySelectorAll('td a')].at(-1).hash"))
    assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in await page.evaluate("document.title")
    assert_clean(page, proxy)


async def test_new_requests_appear_by_themselves(
    proxy: Proxy, upstream: StrictUpstream, page: Page
) -> None:
    await page.open(address(proxy), ADMIN)
    await page.show("#live")
    await page.until(
        "document.querySelector('[role=status]').textContent === 'Waiting for requests.'"
    )
    upstream.script(text("Hello."))
    turn(proxy, begin("Something new."), 1, model="newcomer")
    await page.until("document.querySelector('tbody tr').textContent.includes('newcomer')")
    assert "1 request since" in await page.evaluate(
        "document.querySelector('[role=status]').textContent"
    )
    await page.evaluate("document.querySelector('button[aria-pressed]').click()")
    for model in ("while-paused", "later"):
        if model == "later":
            await page.evaluate("document.querySelector('button[aria-pressed]').click()")
        upstream.script(text("Hello."))
        turn(proxy, begin("Something new."), 1, model=model)
        wait_until(lambda model=model: dashboard(proxy, "requests")[0]["model"] == model)
    await page.until("document.querySelector('tbody tr').textContent.includes('later')")
    assert "while-paused" in await page.evaluate(
        "document.querySelector('tbody tr:nth-child(2)').textContent"
    )
    assert_clean(page, proxy)


async def test_the_keyboard_reaches_everything(proxy: Proxy, page: Page) -> None:
    await page.size(1280)
    await page.open(address(proxy), ADMIN)
    await page.show("#live")
    await page.call("Page.reload")
    await page.until(f"{SHOWN} === '#live' && document.activeElement === document.body")
    reached = []
    for _ in range(12):
        await page.press("Tab")
        reached.append(await page.evaluate("document.activeElement.textContent.trim()"))
    expected = [
        "Skip to the content",
        "Offload Proxy",
        "Overview",
        "Live",
        "Sessions",
        "Savings",
        "Health",
        "Log out",
    ]
    assert reached[:9] == [*expected, "Pause"]
    await page.evaluate("document.querySelector('button[aria-pressed]').focus()")
    await page.press("Enter")
    assert (
        await page.evaluate(
            "document.querySelector('button[aria-pressed]').getAttribute('aria-pressed')"
        )
        == "true"
    )
    await page.evaluate("document.querySelector('.scroll').focus()")
    await page.press("Tab")
    place = await page.evaluate("document.activeElement.hash")
    assert place.startswith("#request/")
    await page.press("Enter")
    await page.until(f"{SHOWN} === '{place}'")
    assert await page.evaluate("document.activeElement.id") == "content", (
        "the next Tab goes on within the page"
    )
    unnamed = "[...document.querySelectorAll('table')].filter((one) => !one.caption).length"
    assert await page.evaluate(unnamed) == 0, "every table has a caption"
    assert await page.evaluate("document.documentElement.lang") == "en"


async def test_others_log_in_and_see_their_own_requests(
    proxy: Proxy, upstream: StrictUpstream, page: Page
) -> None:
    upstream.script(text("Mine."))
    turn(proxy, begin("Mine."), 1, key="mine", model="my-model")
    wait_until(lambda: any(row["model"] == "my-model" for row in recorded(proxy, 1)))
    # What a reverse proxy on this machine adds makes the browser a stranger.
    await page.call("Network.setExtraHTTPHeaders", headers={"x-forwarded-for": "192.0.2.1"})
    await page.call("Page.navigate", url=address(proxy))
    await page.until(
        "document.querySelector('#key') !== null && document.readyState === 'complete'"
    )
    assert await page.evaluate("fetch('api/me').then((reply) => reply.status)") == 401
    assert await page.faults() == []

    await page.enter("token", "wrong")
    await page.until("document.body?.innerText.includes('This is not the admin token')")
    await page.enter("key", "mine")
    await page.until(f"{SHOWN} === '#overview'")
    assert await page.evaluate("document.cookie") == "", "scripts do not see it"
    shown = await page.show("#live")
    assert "my-model" in shown and "gpt-4.1-mini" not in shown
    assert "gpt-4.1-mini" not in await page.show("#savings")
    assert "gpt-4.1-mini" not in await page.show("#sessions")
    assert await page.evaluate("document.querySelector('nav a[href=\"#health\"]').hidden")
    assert "This page is the operator's" in await page.show("#health")

    await page.evaluate("document.querySelector('header form').submit()")
    await page.until("document.querySelector('#token') !== null")
    await page.enter("token", ADMIN)
    await page.until(f"{SHOWN} === '#overview'")
    assert "gpt-4.1-mini" in await page.show("#live")
    assert key("mine")["authorization"] not in str(page.asked)


def calls(proxy: Proxy, rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return what results are called by their calls' arguments, which are content, for each
    model."""
    found: dict[str, set[str]] = {}
    for row in rows:
        messages = dashboard(proxy, f"requests/{row['id']}")["detail"]["messages"]
        found.setdefault(row["model"], set()).update(
            one["about"] for one in messages if one["files"]
        )
    return found


async def test_texts_are_shown_where_operator_and_policy_allow_it(
    upstream: StrictUpstream, page: Page, tmp_path: Path
) -> None:
    policies = {
        "default": tight(upstream.url),
        "open": tight(upstream.url, api_keys=[{"env": "OPEN"}], dashboard_content=True),
    }
    path, large = tmp_path / "rows.db", HOSTILE + "5 MB of text. " * 400_000
    with served(
        policies, dashboard=path, dashboard_content=True, environment={"OPEN": "open"}
    ) as proxy:
        for caller in ("open", "closed"):
            messages = begin(HOSTILE)
            for number, result in enumerate((large, CONTROL * 300, RESULT)):
                upstream.script(text("I look."))
                turn(proxy, messages, number, result=result, key=caller, model=caller)
        found = calls(proxy, recorded(proxy, 6))
        assert "result of lookup" in found["open"] and found["closed"] == {""}
        await page.open(address(proxy), ADMIN)
        shown = {}
        for caller in ("open", "closed"):
            await page.show("#sessions")
            find = f"[...document.querySelectorAll('tbody tr')].find((row) => row.innerText.includes('{caller}'))"
            await page.show(await page.evaluate(f"{find}.querySelector('a').hash"))
            place = "[...document.querySelectorAll('td a')].at(-1).hash"
            shown[caller] = await page.show(await page.evaluate(place))
            assert (
                await page.evaluate("document.querySelectorAll('main img, main script').length")
                == 0
            )
        assert "5 MB of text." in shown["open"] and "<script>" in shown["open"]
        assert "detailed result is stored in" in shown["open"], "as it was sent"
        assert "5 MB of text." not in shown["closed"] and "Texts are not kept" in shown["closed"]
        assert_clean(page, proxy)
    assert b"5 MB of text." * 3 not in path.read_bytes(), "what is kept is bounded, and packed"
    with served(policies, dashboard=path, environment={"OPEN": "open"}) as proxy:
        await page.open(address(proxy), ADMIN)
        await page.show(await page.evaluate("location.hash") or "#live")
        rows = recorded(proxy, 6)
        assert calls(proxy, rows) == {"open": {""}, "closed": {""}}
        place = next(row["id"] for row in rows if row["model"] == "open" and row["compacted"])
        assert "5 MB of text." not in await page.show(f"#request/{place}"), (
            "the operator has forbidden it since"
        )
