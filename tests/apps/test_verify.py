"""A share of requests is asked again as it was sent and as it came, and only what the model does
next is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from proxy.apps.dashboard import writer
from proxy.apps.verify import Spending
from tests.acceptance.test_archive import FACT, LOGS, REFERENCE, ask
from tests.apps.dashboard.traffic import dashboard
from tests.clients.apis import Asked, api
from tests.clock import PATIENCE
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, error, text
from tests.serving import Proxy, served, tight, wait_until

Json = dict[str, Any]
Answer = Callable[[Asked, int], Message]
"""What a model does, by what it sees and how often it was asked before."""

PRICED = {"verify": 1.0, "input_price": 1.0}


class World:
    """A proxy whose model is asked again. `asked`: all that it was asked, in order."""

    def __init__(self, proxy: Proxy, asked: list[Asked], upstream: StrictUpstream) -> None:
        self.proxy, self.asked, self.upstream = proxy, asked, upstream

    @property
    def row(self) -> Json:
        """The newest row of a request that was asked again."""
        return self.rows[0]

    @property
    def rows(self) -> list[Json]:
        return [
            row
            for row in dashboard(self.proxy, "requests?outcome=other")
            if row["kind"] == "verify"
        ]

    def same(self) -> tuple[int, int, int, int]:
        wait_until(lambda: bool(self.rows))
        row = self.row
        return row["again_tools"], row["again_exact"], row["whole_tools"], row["whole_exact"]


@pytest.fixture(autouse=True)
def soon_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows reach the file at once, not within a second."""
    monkeypatch.setattr(writer, "LATEST", 0.01)


@contextmanager
def world(
    answer: Answer, name: str = "chat", folder: Path | None = None, **offload: Any
) -> Iterator[World]:
    asked: list[Asked] = []

    def model(one: Asked) -> Message:
        asked.append(one)
        return answer(one, len(asked) - 1)

    with StrictUpstream() as upstream:
        upstream.respond(api(name, model))
        policy = tight(upstream.url, offload=PRICED | offload)
        assert folder
        with served(
            {"default": policy}, dashboard=folder / "rows.db", store=folder / "store"
        ) as proxy:
            yield World(proxy, asked, upstream)


def look(path: str) -> Message:
    return calls(("look", {"path": path}))


def steady(asked: Asked, _: int) -> Message:
    return look("/next.log")


def seeing(asked: Asked, _: int) -> Message:
    """Needs the fact, and looks for it where it is not there."""
    return text("7741 it is.") if FACT in asked.shown else look("/logs/0.log")


def elsewhere(asked: Asked, _: int) -> Message:
    return look("/a.log" if FACT in asked.shown else "/b.log")


def fickle(asked: Asked, number: int) -> Message:
    return look(f"/{number}.log") if number % 2 else text("Done.")


def reading(asked: Asked, _: int) -> Message:
    """Reads back what was moved, and then does what it would have done."""
    moved = [path for path in REFERENCE.findall(asked.shown) if "0.log" in path]
    if FACT not in asked.shown and moved and "read_file" in asked.tools:
        return calls(("read_file", {"path": moved[0]}))
    return look("/fact.log" if FACT in asked.shown else "/blind.log")


@pytest.mark.parametrize(
    ("name", "answer", "same"),
    [
        ("chat", seeing, (1, 1, 0, 0)),
        ("responses", elsewhere, (1, 1, 1, 0)),
        ("messages", fickle, (0, 0, 1, 1)),
        ("messages", reading, (1, 1, 1, 1)),
    ],
)
def test_only_what_the_model_does_next_is_compared(
    name: str, answer: Answer, same: tuple[int, ...], tmp_path: Path
) -> None:
    with world(answer, name, tmp_path) as made:
        ask(made.proxy, name, LOGS, "And?")
        assert made.same() == same
    assert FACT in made.asked[-1].shown and "read_file" not in made.asked[-1].tools


def test_nothing_that_nobody_saw_is_kept(tmp_path: Path) -> None:
    """A hidden round is stored once: that of the reply which the client got."""
    with world(reading, "chat", tmp_path) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        made.same()
        rounds = sorted(path.name for path in tmp_path.rglob("*/rounds/*"))
    with world(reading, "chat", tmp_path / "other", verify=0) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        assert sorted(path.name for path in tmp_path.rglob("other/store/**/rounds/*")) == rounds


def test_the_client_does_not_wait(tmp_path: Path) -> None:
    """Its reply ends while the model still thinks about the others."""

    replied = Event()

    def slow(asked: Asked, number: int) -> Message:
        if not number:
            return look("/next.log")
        assert replied.wait(PATIENCE)
        return Message("Hm.")

    with world(slow, "chat", tmp_path) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        assert not made.rows
        replied.set()
        assert made.same() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "offload",
    [
        {"verify": 0.0},
        {"verify_budget": 0.0},
        {"verify_budget": 0.001},
        {"mode": "observe"},
        {"max_total_tokens": 10**6},
    ],
)
def test_it_asks_nothing_again_without_a_share_money_or_a_plan(
    offload: Json, tmp_path: Path
) -> None:
    with world(steady, "chat", tmp_path, **offload) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        ask(made.proxy, "chat", LOGS[:4], "Again?")
    assert len(made.asked) == 2  # the proxy has ended, and with it what it still had to ask


def test_money_ends_for_the_day(tmp_path: Path) -> None:
    """Asking again costs some 0.01 here, and 0.03 are kept back for it."""
    with world(steady, "chat", tmp_path, verify_budget=0.037) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        made.same()
        for number in range(3):
            ask(made.proxy, "chat", LOGS, f"And {number}?")
    assert len(made.asked) == 3 + 3


def test_a_model_on_this_machine_costs_nothing(tmp_path: Path) -> None:
    with world(steady, "chat", tmp_path, verify_budget=0, input_price=None) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        assert made.same() == (1, 1, 1, 1)


def test_a_refusal_is_no_answer_and_reaches_nobody(tmp_path: Path) -> None:
    with world(steady, "chat", tmp_path) as made:
        answer, seen = api("chat", lambda asked: look("/next.log")), list[Recorded]()

        def refusing(request: Recorded) -> Any:
            seen.append(request)
            return answer(request) if len(seen) == 1 else error(400)

        made.upstream.respond(refusing)
        assert "/next.log" in ask(made.proxy, "chat", LOGS, "And?")
        assert made.same() == (0, 0, 0, 0)
        assert made.row["fault"] and made.row["status"] == 502
        assert dashboard(made.proxy, "savings?period=day")["verified"]["asked"] == 0


def test_the_first_page_shows_it_with_its_noise(tmp_path: Path) -> None:
    with world(elsewhere, "chat", tmp_path) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        made.same()
        found = dashboard(made.proxy, "savings?period=day")["verified"]
        assert made.proxy.metric("verified_whole_tools_total", 'tenant="default"') == 1
        assert made.proxy.metric("requests_total", 'dialect="chat",kind="verify",status="200"') == 1
    assert found == {
        "asked": 1,
        "again_tools": 1,
        "again_exact": 1,
        "whole_tools": 1,
        "whole_exact": 0,
    }


def test_a_tenants_money_is_its_own_and_comes_back_the_next_day() -> None:
    now = [1_000_000.0]
    spending = Spending(lambda: now[0])
    spending.add("a", 0.75)
    spending.add("a", -0.25)
    spending.add("b", -1.0)
    assert (spending.today("a"), spending.today("b")) == (0.5, 0.0)
    now[0] += 86_400
    assert spending.today("a") == 0.0
