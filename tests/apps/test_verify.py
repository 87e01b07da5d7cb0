"""A share of requests is asked again: in the same bytes, and as planned or as it came. What the model
does next, the tokens of its replies and the costs are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import httpx
import pytest

from proxy.apps.dashboard import writer
from proxy.apps.verify import Spending, pairs
from proxy.requests import observing
from tests.acceptance.test_archive import APIS, FACT, LOGS, REFERENCE, ask, body
from tests.apps.dashboard.traffic import dashboard
from tests.clients.apis import Asked, api
from tests.clock import PATIENCE
from tests.fake_upstream import Message, Pieces, Recorded, StrictUpstream, calls, error, hang, text
from tests.serving import PLAIN, Proxy, served, tight, wait_until

Json = dict[str, Any]
Answer = Callable[[Asked, int], Message]
"""What a model does, by what it sees and how often it was asked before."""

NUMBER = 50
VERSION = {"anthropic-version": "2023-06-01"}
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


@pytest.mark.parametrize("headers", [{}, {"x-offload": "observe"}])
def test_a_count_of_tokens_is_not_asked_again(headers: dict[str, str], tmp_path: Path) -> None:
    """No model replies to it, so there is nothing to compare."""
    with world(steady, "messages", tmp_path) as made:
        path, asked = asking("messages", "And?")
        del asked["max_tokens"]
        made.proxy.post(f"{path}/count_tokens", asked, **VERSION, **headers)
        ask(made.proxy, "messages", LOGS, "And?")
        made.same()
        paths = [one.path.rpartition("/")[2] for one in made.upstream.requests]
    assert paths == ["count_tokens", "messages", "messages", "messages"]


def test_money_ends_for_the_day(tmp_path: Path) -> None:
    """Asking again costs some 0.01 here, and 0.05 are kept back for it: for 2,000 tokens of each
    reply."""
    uncached = {"cached_read": 1.0, "cache_write": 1.0}
    with world(steady, "chat", tmp_path, verify_budget=0.055, **uncached) as made:
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
        found = dashboard(made.proxy, "savings?period=day")["verified"]
        assert (found["asked"], found["failed"]) == (0, 1)


def test_the_first_page_shows_no_figure_of_few_requests(tmp_path: Path) -> None:
    with world(elsewhere, "chat", tmp_path) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        made.same()
        found = dashboard(made.proxy, "savings?period=day")["verified"]
        assert made.proxy.metric("verified_whole_tools_total", 'tenant="default"') == 1
        assert made.proxy.metric("verified_cost_total", 'tenant="default"') > 0
        assert made.proxy.metric("requests_total", 'dialect="chat",kind="verify",status="200"') == 1
    missing = "1 of the 30 compared requests that a figure needs"
    spent = found.pop("spent")
    assert found == {"asked": 1, "failed": 0, "figures": [], "missing": missing}
    assert 0 < spent < 0.05


# -- where requests are only observed --------------------------------------------------------------


OBSERVED = {"x-offload": "observe"}


def asking(name: str, question: str, **more: Any) -> tuple[str, Json]:
    path, made = body(name, LOGS, question)
    return f"/v1{path}", {**made, **more}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_an_observed_request_is_asked_again_as_planned(
    name: str, streams: bool, tmp_path: Path
) -> None:
    """The client's own request twice, and then the plan, which alone lacks the fact."""
    with world(elsewhere, name, tmp_path, cached_read=0.5) as made:
        path, asked = asking(name, "And?", stream=streams)
        reply = made.proxy.post(path, asked, **VERSION, **OBSERVED)
        assert reply.headers["x-offload-mode"] == "observe" and "/a.log" in reply.text
        assert made.same() == (1, 1, 1, 0)
        row = made.row
    assert [FACT in one.shown for one in made.asked] == [True, True, False]
    assert ["read_file" in one.tools for one in made.asked] == [False, False, True]
    assert row["measured"] == 1 and row["whole_reply"] == row["planned_reply"] > 0
    assert 0 < row["planned_cost"] < row["whole_cost"]


def test_an_observing_policy_asks_again_too(tmp_path: Path) -> None:
    only_moves = {"mode": "observe", "compact_ratio_threshold": 1.0}
    with world(reading, "chat", tmp_path, **only_moves) as made:
        ask(made.proxy, "chat", LOGS, "And?")
        assert made.same() == (1, 1, 1, 1)
        row = made.row
        assert not [path for path in tmp_path.rglob("store/default*/**/*") if path.is_file()]
    assert len(made.asked) == 4, "the plan is read back from"
    assert row["planned_reply"] > row["whole_reply"], "with what the hidden round wrote"


def test_what_a_summary_is_wanted_for_is_not_asked_again(tmp_path: Path) -> None:
    """None is made for what is only observed, so there is nothing to compare."""
    with world(steady, "chat", tmp_path, mode="compress") as made:
        made.proxy.post(*asking("chat", "And?"), **OBSERVED)
    assert len(made.asked) == 1


def test_a_reply_that_is_too_long_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "HEARD", 100)
    with world(steady, "chat", tmp_path) as made:
        assert "/next.log" in made.proxy.post(*asking("chat", "And?"), **OBSERVED).text
    assert len(made.asked) == 1


def test_a_reply_that_cannot_be_read_is_a_fault_and_no_answer(tmp_path: Path) -> None:
    with world(steady, "chat", tmp_path) as made:
        made.upstream.respond(lambda request: Pieces([b"data: {\n\n"]))
        made.proxy.post(*asking("chat", "And?"), **OBSERVED)
        wait_until(lambda: bool(made.rows))
        assert made.row["fault"] == "broken" and len(made.upstream.requests) == 1


def test_a_client_that_hangs_up_is_not_asked_for(tmp_path: Path) -> None:
    def slow(asked: Asked, _: int) -> Message:
        return replace(look("/next.log"), pause=0.05)

    with world(slow, "chat", tmp_path) as made:
        path, asked = asking("chat", "And?", stream=True)
        with httpx.stream(
            "POST", made.proxy.root + path, json=asked, headers=OBSERVED, verify=PLAIN
        ) as reply:
            next(reply.iter_bytes())
        made.upstream.requests[0].done.wait(PATIENCE)
        wait_until(lambda: bool(dashboard(made.proxy, "requests?outcome=all")))
    assert len(made.asked) == 1


def test_the_end_of_the_proxy_does_not_wait_for_it(tmp_path: Path) -> None:
    """Nobody sees these replies, and upstream may hang."""
    answer = api("chat", lambda asked: look("/next.log"))

    with StrictUpstream() as upstream:
        upstream.respond(lambda one: hang() if len(upstream.requests) > 1 else answer(one))
        policies = {"default": tight(upstream.url, offload=PRICED)}
        with served(policies, store=tmp_path, drain_timeout=10 * PATIENCE) as proxy:
            ask(proxy, "chat", LOGS, "And?")
            wait_until(lambda: len(upstream.requests) == 2)
        assert upstream.requests[1].left.wait(PATIENCE)


def test_after_a_refusal_nothing_is_asked_again_for_a_while(tmp_path: Path) -> None:
    """What is left of upstream's limits is the clients'."""
    with world(steady, "chat", tmp_path) as made:
        answer, seen = api("chat", lambda asked: look("/next.log")), list[Recorded]()

        def limited(request: Recorded) -> Any:
            seen.append(request)
            return error(429) if len(seen) == 2 else answer(request)

        made.upstream.respond(limited)
        made.proxy.post(*asking("chat", "And?"), **OBSERVED)
        wait_until(lambda: bool(made.rows))
        assert (made.row["status"], made.row["detail"]) == (502, "upstream answered 429")
        made.proxy.post(*asking("chat", "And now?"), **OBSERVED)
    assert len(seen) == 3


def test_known_noise_and_a_known_effect_are_found(tmp_path: Path) -> None:
    """By chance the model does something else in a fifth of its replies; as planned, in another
    quarter, and then it writes a fifth more."""
    chance = Random(52)

    def model(asked: Asked, _: int) -> Message:
        whole = FACT in asked.shown
        other = chance.random() < (0.2 if whole else 0.45)
        words = (1.0 if whole else 1.2) * 300 * chance.lognormvariate(0, 0.5)
        made = look(f"/{chance.random() if other else 0}.log")
        return replace(made, content="word " * round(words))

    with world(model, "chat", tmp_path, verify_budget=1000, cached_read=0.5) as made:
        for number in range(NUMBER):
            made.proxy.post(*asking("chat", f"And {number}?"), **OBSERVED)
            wait_until(lambda wanted=number + 1: len(made.rows) == wanted)
        sums = {name: sum(row[name] for row in made.rows) for name in pairs.SUMMED}
        shown = dashboard(made.proxy, "savings?period=day")["verified"]["figures"]
    found = pairs.changed(NUMBER, sums["again_exact"], sums["whole_exact"], sums["both_exact"])
    assert found.low < 0.8 * 0.8 - 0.8 * 0.55 < found.high
    ratio = pairs.typical(NUMBER, sums["reply_ratio"], sums["reply_ratio_squared"])
    assert ratio.low < 1.2 < ratio.high and ratio.high < 1.5
    assert sums["planned_cost"] < sums["whole_cost"]
    titles = ["Same tools called", "Same next action", "Length of replies", "Cost with its reply"]
    assert [one["title"] for one in shown] == titles


def test_a_tenants_money_is_its_own_and_comes_back_the_next_day() -> None:
    now = [1_000_000.0]
    spending = Spending(lambda: now[0])
    spending.add("a", 0.75)
    spending.add("a", 0.25)
    assert (spending.today("a"), spending.today("b")) == (1.0, 0.0)
    now[0] += 86_400
    assert spending.today("a") == 0.0
