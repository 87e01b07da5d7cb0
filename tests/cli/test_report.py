"""`replay --html`: one file that needs nothing else, and shows what strangers wrote as text."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import MISTAKE, OK, main, report, tally
from tests.cli.test_replay import EARLY, lines, session
from tests.dashboard.browser import BINARY, MISSING, browser

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m</script><!--"


class Page(HTMLParser):
    """What a browser takes for elements, and the texts of scripts, styles and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag and text.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early.yaml").write_text(EARLY)
    (tmp_path / "other.yaml").write_text("offload: {mode: off}\n")
    return tmp_path


def reported(folder: Path, *arguments: str, model: str = "gpt-4o") -> str:
    bodies = [body | {"model": model} for topic in ("one", "two") for body in session(topic)]
    recorded = lines(folder / "a<b>.jsonl", bodies)
    assert main(["replay", "--html", "r.html", "--policy", "early.yaml", *arguments, recorded]) == OK
    return (folder / "r.html").read_text(encoding="utf-8")


def test_the_report_has_the_figures_of_the_table_and_of_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page(reported(folder, "--json"))
    [found] = json.loads(capsys.readouterr().out)["policies"]
    cells = page.of("td")
    for name in ("tokens_before", "tokens_after", "cost_before", "cost_after"):
        assert f"{found[name]:,}" in cells
    data: Any = json.loads(next(text for text in page.of("script") if text.startswith('{"kinds"')))
    [policy] = data["policies"]
    assert (policy["before"][-1], policy["after"][-1]) == (found["cost_before"], found["cost_after"])
    assert sum(one["before"] for one in policy["sessions"]) == found["cost_before"]
    assert sum(one["events"] for one in policy["sessions"]) == found["events"]
    [first, _] = policy["sessions"]
    assert len(first["told"]) >= first["events"] == len(first["marks"]) > 0
    assert sum(found["causes"].values()) == found["events"]
    assert all(words[0].isupper() and words.endswith(".") for _, words in first["told"])
    assert next(sum(kinds) for kinds in zip(*first["kinds"], strict=True)) == first["came"][0]
    assert (first["requests"], len(first["came"]), len(first["costs"][1])) == (8, 8, 8)


def test_it_needs_nothing_else_and_allows_only_its_own_scripts(folder: Path) -> None:
    text = reported(folder)
    page = Page(text)
    assert not re.search(r"@import|url\(", text)
    assert not [name for _, one in page.elements for name in one if name in ("src", "href", "action")]
    [policy] = [one["content"] for _, one in page.elements if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';")
    inline = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", text, re.DOTALL)
    hashes = [f"'sha256-{b64encode(sha256(one.encode()).digest()).decode()}'" for one in inline]
    assert len(hashes) == 2 and sorted(re.findall(r"'sha256-[^']+'", policy)) == sorted(hashes)
    assert not [name for _, one in page.elements for name in one if name.startswith("on") or name == "style"]


def test_names_from_strangers_are_text(folder: Path) -> None:
    plain, hostile = Page(reported(folder)), Page(reported(folder, model=HOSTILE))
    assert hostile.elements[:4] == plain.elements[:4]
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in plain.elements]
    [data] = [json.loads(text) for text in hostile.of("script") if text.startswith('{"kinds"')]
    assert {one["model"] for one in data["policies"][0]["sessions"]} == {HOSTILE}
    assert any("a<b>.jsonl" in text for text in hostile.of("p"))


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
async def test_a_browser_shows_it_by_keyboard_and_on_small_screens(folder: Path) -> None:
    await asyncio.to_thread(reported, folder, "--policy", "other.yaml", model=HOSTILE)
    address = (folder / "r.html").as_uri()
    async with browser(folder / "profile") as page:
        for scheme, width in (("light", 1_000), ("dark", 400)):
            await page.scheme(scheme)
            await page.size(width)
            await page.call("Page.navigate", url=address)
            await page.until("document.querySelectorAll('.chart svg').length === 3")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            text = await page.text()
            assert "<script>alert(1)</script>\\u202e\\u001b[31m</script><!--" in text
            assert "Session 2" in text
        await page.evaluate("document.querySelectorAll('button[aria-pressed]')[0].focus()")
        await page.press("Tab")
        await page.press("Enter")
        await page.until("document.activeElement.tagName === 'H3'")
        assert await page.evaluate("document.querySelectorAll('button[aria-pressed]')[1].ariaPressed") == "true"
        await page.evaluate("document.getElementById('policy').value = 1")
        await page.evaluate("document.getElementById('policy').dispatchEvent(new Event('change'))")
        await page.until("document.body.innerText.includes('This policy plans none of these requests')")
    assert set(page.asked) == {address} and not page.complaints


def test_charts_and_sessions_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "POINTS", 3)
    monkeypatch.setattr(tally, "COURSES", 1)
    monkeypatch.setattr(report, "SESSIONS", 1)
    [data] = [json.loads(text) for text in Page(reported(folder)).of("script") if text.startswith('{"kinds"')]
    [policy] = data["policies"]
    assert (len(policy["sessions"]), policy["omitted"]) == (1, 1)
    assert len(policy["before"]) <= 4
    [one] = policy["sessions"]
    assert len(one["came"]) <= 3 and max(one["marks"], default=0) <= 3
