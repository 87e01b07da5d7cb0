"""`replay --html`: one file that needs nothing else, and shows what strangers wrote as text."""

from __future__ import annotations

import asyncio
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from proxy.apps import report as pages
from proxy.apps.replay import report
from proxy.cli import MISTAKE, OK, main
from proxy.terminal import change, in_money, percent
from tests.apps.dashboard.browser import BINARY, MISSING, browser
from tests.apps.replay.test_replay import EARLY, lines, session

SCREEN = 844
"""The height of a phone whose width is 390."""
WIDER = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
"""Tables that are wider than their frame."""
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m</script><!--"


class Page(HTMLParser):
    """What a browser takes for elements, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}".replace("\xa0", " ")

    def count(self, tag: str, kind: str = "") -> int:
        return sum(one == tag and kind in (said.get("class") or "") for one, said in self.elements)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early.yaml").write_text(EARLY)
    (tmp_path / "other.yaml").write_text("offload: {mode: off}\n")
    return tmp_path


def dated(topic: str, day: int, model: str = "gpt-4o") -> list[dict[str, Any]]:
    """A session's requests, a minute apart from noon on."""
    return [
        {
            "url": "/v1/chat/completions",
            "time": f"2026-11-{day:02}T12:{minute:02}:00Z",
            "body": body | {"model": model},
        }
        for minute, body in enumerate(session(topic))
    ]


def reported(folder: Path, *arguments: str, model: str = "gpt-4o") -> str:
    bodies = [
        one for day, topic in enumerate(("one", "two"), 3) for one in dated(topic, day, model)
    ]
    recorded = lines(folder / "a<b>.jsonl", bodies)
    assert (
        main(["replay", "--html", "r.html", "--policy", "early.yaml", *arguments, recorded]) == OK
    )
    return (folder / "r.html").read_text(encoding="utf-8")


def test_the_report_has_the_figures_of_the_table_and_of_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(reported(folder, "--policy", "other.yaml", "--json"))
    found, _ = json.loads(capsys.readouterr().out)["policies"]
    for name in ("tokens_before", "tokens_after", "cost_before", "cost_after"):
        assert f" {found[name]:,} " in page.text
    money = [in_money(found[f"money_{side}"]) for side in ("before", "after")]
    less = change(found["money_before"], found["money_after"])
    assert less.endswith(" % less") and f" {less} " in page.text
    worst = percent(found["worst_session"])
    said = f"{money[0]} → {money[1]}, {less}; 0 of 2 sessions dearer, the worst at {worst}"
    assert page.text.count(said) == 2, "at the top, and among the policies"
    assert f"as it came: {money[0]}" in page.text and f"as planned: {money[1]}" in page.text
    assert [tag for tag, _ in page.elements].count("li") == found["events"] + 2 + 3
    assert page.count("path", "fill-came") == page.count("path", "fill-sent") == 1
    assert "other.yaml" in page.text and "no request is planned" in page.text


def test_sessions_and_the_chart_are_dated(folder: Path) -> None:
    page = Page(reported(folder))
    assert "from 2026-11-03 12:00 to 2026-11-04 12:07 UTC" in page.text
    assert "2026-11-03 12:00, a<b>" in page.text and "2026-11-04 12:00, a<b>" in page.text
    assert "in USD" in page.text and "$0.00" in page.text
    marks = [one for one in re.findall(r'class="tick"[^>]*>([^<]+)<', reported(folder))]
    assert marks[-2:] == ["2026-11-03", "2026-11-04"]


def test_without_times_and_prices_there_are_numbers_and_tokens(folder: Path) -> None:
    (folder / "plain.jsonl").write_text(
        "".join(f"{json.dumps(body | {'model': 'odd'})}\n" for body in session("one"))
    )
    assert main(["replay", "--html", "r.html", "--policy", "early.yaml", "plain.jsonl"]) == OK
    page = Page((folder / "r.html").read_text())
    assert "$" not in page.text and "session 1, plain" in page.text
    assert "in plain input tokens" in page.text and " request 8 " in page.text


def test_it_says_why_nothing_moves(folder: Path) -> None:
    recorded = lines(folder / "a.jsonl", session("one", 1))
    assert main(["replay", "--html", "r.html", recorded]) == OK
    said = Page((folder / "r.html").read_text()).text
    assert "Here nothing moves. In the largest request, the history is " in said


def test_it_has_base_names_only(folder: Path) -> None:
    deep = folder / "deep"
    deep.mkdir()
    for name in ("early.yaml", "a.jsonl"):
        (deep / name).write_text(EARLY if "yaml" in name else '{"model": "m"}\n[]\n')
    more = ["--policy", str(deep / "early.yaml"), str(deep / "a.jsonl"), str(folder / "none.jsonl")]
    text = reported(folder, *more)
    assert str(folder) not in text and "deep" not in text
    page = Page(text)
    assert "early.yaml (1)" in page.text and "early.yaml (2)" in page.text
    assert "a.jsonl:1: expected a request body" in page.text
    assert "Not in these figures: 2 parts" in page.text


def test_it_needs_nothing_else_and_allows_no_script(folder: Path) -> None:
    text = reported(folder)
    page = Page(text)
    assert not re.search(r"@import|url\(", text)
    assert not [
        name
        for _, one in page.elements
        for name in one
        if name in ("src", "href", "action", "style")
    ]
    [policy] = [
        one["content"]
        for _, one in page.elements
        if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert (
        policy is not None and policy.startswith("default-src 'none';") and "script" not in policy
    )


def test_names_from_strangers_are_text(folder: Path) -> None:
    plain, hostile = Page(reported(folder, model="odd")), Page(reported(folder, model=HOSTILE))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in plain.elements]
    assert "<script>alert(1)</script>\ufffd\ufffd[31m</script><!--" in hostile.text
    assert "\ufffd?" in reported(folder, model="\ud83d?")


@pytest.mark.parametrize("name", ["a.jsonl", "none/r.html", "folder.html", "r.html/x.html"])
def test_only_a_file_that_can_be_a_report_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    recorded = lines(folder / "a.jsonl", session("one", 1))
    before = Path(recorded).read_bytes()
    (folder / "folder.html").mkdir()
    (folder / "r.html").write_text("old")
    assert main(["replay", "--html", name, recorded]) == MISTAKE
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"offload-proxy: --html {name}: ")
    assert Path(recorded).read_bytes() == before and (folder / "r.html").read_text() == "old"


@pytest.mark.sweep
@pytest.mark.skipif(BINARY is None, reason=MISSING)
async def test_a_browser_shows_it_on_small_screens(folder: Path) -> None:
    """With three policies, more sessions than are seen at once, and files that are left out."""
    for day in range(1, 13):
        lines(folder / f"a-longer-name-of-a-session-{day}.jsonl", dated(f"topic {day}", day))
        (folder / f"bad-{day}.json").write_text("{")
    named = [f"{folder}/{name}" for name in os.listdir(folder) if "-" in name]
    await asyncio.to_thread(reported, folder, "--profile", *named, model=HOSTILE)
    address = (folder / "r.html").as_uri()
    async with browser(folder / "profile") as page:
        for scheme, width in (("light", 1_280), ("dark", 1_280), ("light", 390), ("dark", 390)):
            await page.scheme(scheme)
            await page.size(width, SCREEN)
            await page.call("Page.navigate", url=address)
            await page.until("document.querySelectorAll('path.fill-sent').length === 4")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate("document.documentElement.scrollHeight") <= 4 * SCREEN
            assert not await page.evaluate(WIDER)
            assert await page.faults() == []
            await page.evaluate(
                "document.querySelectorAll('details').forEach((one) => one.open = true)"
            )
            assert "<script>alert(1)</script>" in await page.text()
            assert await page.faults() == []
    assert set(page.asked) == {address} and not page.complaints


def test_charts_and_sessions_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "POINTS", 3)
    monkeypatch.setattr(report, "SEEN", 1)
    monkeypatch.setattr(report, "SESSIONS", 2)
    text = reported(folder, lines(folder / "third.jsonl", dated("three", 1)))
    assert "1 more session; 1 cost less and are left out" in Page(text).text
    [line] = re.findall(r'class="fill-sent" d="([^"]+)"', text)
    assert line.count(" ") <= 3 + 4
