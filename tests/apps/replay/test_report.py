"""`replay --html`: one file that needs nothing else, and shows what strangers wrote as text."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from proxy.apps.replay import report
from proxy.cli import MISTAKE, OK, main
from tests.apps.dashboard.browser import BINARY, MISSING, browser
from tests.apps.replay.test_replay import EARLY, lines, session

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
        self.text += f" {data}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early.yaml").write_text(EARLY)
    (tmp_path / "other.yaml").write_text("offload: {mode: off}\n")
    return tmp_path


def reported(folder: Path, *arguments: str, model: str = "gpt-4o") -> str:
    bodies = [body | {"model": model} for topic in ("one", "two") for body in session(topic)]
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
    assert "fewer tokens" in page.text and "0 of 2 sessions cost more" in page.text
    assert (
        f"{found['cost_before']:,} as it came, and {found['cost_after']:,} as planned" in page.text
    )
    assert page.text.count("the plan in words") == 2 and "a<b>.jsonl" in page.text
    assert [tag for tag, _ in page.elements].count("li") == found["events"]
    assert [tag for tag, _ in page.elements].count("polyline") == 2
    assert "This policy plans none of these requests" in page.text


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
    plain, hostile = Page(reported(folder)), Page(reported(folder, model=HOSTILE))
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
    await asyncio.to_thread(reported, folder, model=HOSTILE)
    address = (folder / "r.html").as_uri()
    async with browser(folder / "profile") as page:
        for scheme, width in (("light", 1_000), ("dark", 400)):
            await page.scheme(scheme)
            await page.size(width)
            await page.call("Page.navigate", url=address)
            await page.until("document.querySelectorAll('polyline').length === 2")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert "<script>alert(1)</script>" in await page.text()
    assert set(page.asked) == {address} and not page.complaints


def test_charts_and_sessions_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "POINTS", 3)
    monkeypatch.setattr(report, "SESSIONS", 1)
    page = Page(reported(folder))
    assert "1 more are left out" in page.text and page.text.count("the plan in words") == 1
    [line, _] = [one["points"] for tag, one in page.elements if tag == "polyline"]
    assert line is not None and len(line.split()) <= 4
