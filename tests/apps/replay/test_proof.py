"""`replay --verify`: captured requests are asked again, within a budget, and one page says what came
of it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proxy.apps.replay import proof
from proxy.cli import FAILED, MISTAKE, OK, main
from tests.acceptance.test_archive import APIS, FACT, LOGS, body
from tests.clients.apis import Asked, api
from tests.clock import wait_until
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, error, text
from tests.serving import served, tight

Json = dict[str, Any]
POLICY = """\
upstream: {{base_url: {url}}}
offload: {{mode: compact, max_total_tokens: 300, max_tool_message_tokens: 50, {more}}}
tools: {{inject: when_offloading}}
"""
PRICED = "input_price: 1.0, cached_read: 0.1, cache_write: 1.25"
BETA = "one-2026-01-01"
SECRET = "sk-of-the-user"


class World:
    """A folder with 36 captures of nine sessions and a policy for a scripted upstream."""

    def __init__(self, upstream: StrictUpstream, capsys: pytest.CaptureFixture[str]) -> None:
        self.upstream = upstream
        self.asked: list[Asked] = []
        self._capsys = capsys
        self.policy("chat", PRICED)

    def policy(self, name: str, more: str) -> None:
        base = self.upstream.url if name != "messages" else self.upstream.url.removesuffix("/v1")
        Path("plan.yaml").write_text(POLICY.format(url=base, more=more))

    def capture(self, name: str = "chat", count: int = 36, **more: Any) -> None:
        lines = []
        for number in range(count):
            logs = [*LOGS[:2], (f"/{number // 4}.log", f"session {number // 4}")]
            path, made = body(name, logs, f"And {number}?")
            made |= more
            url = f"/v1{path}"
            about = {"url": url, "method": "POST", "namespace": f"{number // 4}", "beta": BETA}
            lines.append({**about, "body": made})
        Path("captures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def answer(self, model: Callable[[Asked], Message], name: str = "chat") -> None:
        def heard(asked: Asked) -> Message:
            self.asked.append(asked)
            return model(asked)

        self.upstream.respond(api(name, heard))

    def run(
        self, *more: str, code: int = OK, source: Sequence[str] = ("captures.jsonl",)
    ) -> tuple[str, str]:
        given = ["replay", "--verify", "--policy", "plan.yaml", *source, *more]
        assert main(given) == code
        out, err = self._capsys.readouterr()
        assert SECRET not in out + err
        return out, err


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    with StrictUpstream() as upstream:
        yield World(upstream, capsys)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fewer requests be enough to begin. Figures need 30 all the same."""
    monkeypatch.setattr(proof, "NEEDED", 4)


def steady(asked: Asked) -> Message:
    return calls(("look", {"path": "/next.log"}))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_captures_are_asked_twice_as_they_were_and_once_as_planned(
    world: World, name: str, streams: bool, few: None
) -> None:
    world.policy(name, PRICED)
    world.capture(name, 8, stream=streams)
    world.answer(
        lambda asked: calls(("look", {"path": "/a" if FACT in asked.shown else "/b"})), name
    )
    out, err = world.run("--budget", "20", "--json")
    found = json.loads(out)
    assert (found["asked"], found["sessions"], found["failed"]) == (8, 2, {})
    sums = found["sums"]
    assert (sums["again_exact"], sums["whole_exact"], sums["whole_tools"]) == (8, 0, 8)
    assert sums["measured"] == 8
    assert 0 < found["spent"] < found["budget"]
    assert sum(FACT in asked.shown for asked in world.asked) == 16 and len(world.asked) == 24
    assert f"Asks {world.upstream.url.removesuffix('/v1')}" in err and "at most $" in err
    keys = {
        one.header("authorization") or one.header("x-api-key") for one in world.upstream.requests
    }
    betas = {one.header("anthropic-beta") for one in world.upstream.requests}
    assert betas == {BETA}
    assert keys == {SECRET if name == "messages" else f"Bearer {SECRET}"}


def test_one_page_says_what_was_asked_and_what_came_of_it(world: World) -> None:
    chance = Random(7)

    def model(asked: Asked) -> Message:
        longer = 1.0 if FACT in asked.shown else 2.0
        return text("word " * round(200 * longer * chance.lognormvariate(0, 0.1)))

    world.capture()
    world.answer(model)
    out, _ = world.run("--budget", "20", "--html", "page.html")
    page = Path("page.html").read_text()
    assert "36 recorded requests went to the model three times each" in page
    assert re.search(r"Length of replies</dt><dd><div class=\"figure\">(9\d|10\d)", page), page
    assert "Same next action: 100 %" in out and "Spent: at most $" in out and "of $20.00" in out
    assert "36 requests of 9 sessions, drawn from 36 that the plan changes, of 36 read" in out
    assert (
        "default-src 'none'" in page
        and "<script" not in page
        and "http" not in page.split("<main>")[1]
    )
    assert "vault" not in page and "And 1?" not in page and "plan.yaml" in page


def test_the_money_is_enough_or_nothing_is_asked(world: World) -> None:
    world.capture()
    world.answer(steady)
    _, err = world.run(code=MISTAKE)
    enough = float(re.search(r"--budget (\d+\.\d\d), which is nearly always enough", err)[1])  # type: ignore[index]
    _, err = world.run("--budget", "0.01", code=MISTAKE)
    assert "30 requests, the fewest of which a figure is shown, cost at least $0.017" in err
    assert not world.asked
    out, err = world.run("--budget", str(enough), "--json")
    found = json.loads(out)
    assert found["asked"] >= 30 and found["spent"] <= enough
    assert "no figure is shown" not in err
    out, err = world.run("--budget", "0.5", "--json")
    assert (
        "30 requests cost at most" in err and "if the money ends before, no figure is shown" in err
    )
    assert json.loads(out)["spent"] <= 0.5


def test_it_ends_where_the_next_request_may_cost_too_much(world: World, few: None) -> None:
    """Nothing of it is cached here, so each request costs what it may cost at most."""
    world.capture()
    world.answer(lambda asked: text("word " * 1_990))
    world.policy("chat", "input_price: 1.0, cached_read: 1.0, cache_write: 1.0")
    out, _ = world.run("--budget", "0.5", "--json")
    found = json.loads(out)
    assert 4 <= found["asked"] < 36
    assert found["ended"] == "the next request may have cost more than was left"
    assert found["figures"] == [] and found["missing"].endswith("that a figure needs")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": [{"type": "web_search"}]}, "upstream runs tools of its own for it"),
        ({"previous_response_id": "resp_1"}, "not planned: field previous_response_id"),
        ({"input": "Hi."}, "the plan changes nothing"),
    ],
)
def test_what_is_not_asked_again_is_counted(world: World, more: Json, why: str) -> None:
    world.capture("responses", **more)
    _, err = world.run("--budget", "2", code=MISTAKE)
    assert f"36 left out: {why}" in err


def test_without_a_price_nothing_is_asked(world: World) -> None:
    world.capture(model="house-model")
    Path("plan.yaml").write_text(
        POLICY.format(url="https://gateway.example/v1", more="keep_views: 2")
    )
    _, err = world.run("--budget", "2.00", code=MISTAKE)
    assert (
        "the price of house-model is not known: give a --policy with `offload.input_price`" in err
    )


def test_a_key_is_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    world.capture()
    Path("plan.yaml").write_text(POLICY.format(url="https://gateway.example/v1", more=PRICED))
    _, err = world.run("--budget", "20", code=MISTAKE)
    assert "asks https://gateway.example/v1 with your key: set OPENAI_API_KEY" in err


def test_a_refusal_of_every_request_ends_it_early(world: World, few: None) -> None:
    world.capture()
    world.upstream.respond(lambda request: error(401))
    out, _ = world.run("--budget", "20", "--json", code=FAILED)
    found = json.loads(out)
    assert found["ended"] == "5 requests failed one after the other"
    assert (found["asked"], found["spent"]) == (0, 0)
    assert found["failed"].keys() == {"upstream answered 401"}
    assert len(world.upstream.requests) < 36


def test_what_a_proxy_has_captured_is_asked_again(world: World, few: None, tmp_path: Path) -> None:
    """The costs rest on what upstream billed then."""
    world.answer(steady)
    store = tmp_path / "store"
    policy = tight(world.upstream.url, capture=True, offload={"input_price": 1.0})
    with served({"default": policy}, store=store, capture=64 << 20) as proxy:
        for number in range(8):
            path, made = body("chat", LOGS[:2], f"And {number}?")
            reply = proxy.post(
                f"/v1{path}", made, f"caller {number % 4}", **{"x-offload": "observe"}
            )
            assert reply.status_code == 200
        wait_until(lambda: len([*store.glob("*/captures/*.jsonl")]) == 8)
    kept = sorted(store.rglob("*.*"))
    out, _ = world.run("--budget", "20", "--json", source=("--store", str(store)))
    found = json.loads(out)
    assert (found["asked"], found["sessions"], found["failed"]) == (8, 4, {})
    assert found["sums"]["measured"] == 8
    assert sorted(store.rglob("*.*")) == kept


def test_another_proxy_is_no_upstream(world: World, few: None) -> None:
    """It would move results itself, also where the whole history is asked for."""
    world.capture(count=8)
    world.answer(lambda asked: replace(steady(asked), headers=(("x-offload-mode", "auto"),)))
    found = json.loads(world.run("--budget", "20", "--json", code=FAILED)[0])
    assert found["failed"].keys() == {"upstream is an Offload Proxy, and changes requests itself"}


def test_a_request_that_a_client_repeated_counts_once(world: World, few: None) -> None:
    world.capture(count=8)
    captures = Path("captures.jsonl")
    captures.write_text(captures.read_text() * 2)
    world.answer(steady)
    found = json.loads(world.run("--budget", "20", "--json")[0])
    assert (found["read"], found["asked"]) == (16, 8)


def test_a_batch_is_asked_again(world: World, few: None) -> None:
    world.policy("messages", PRICED)
    world.capture("messages", 4)
    captures = Path("captures.jsonl")
    bodies = [json.loads(line)["body"] for line in captures.read_text().splitlines()]
    batch = {"requests": [{"custom_id": "1", "params": body} for body in bodies]}
    captures.write_text(json.dumps(batch))
    world.answer(steady, "messages")
    found = json.loads(world.run("--budget", "20", "--json")[0])
    assert (found["asked"], found["failed"]) == (4, {})


def test_a_full_upstream_is_asked_again(world: World, few: None) -> None:
    world.capture(count=8)
    answer = api("chat", steady)
    refused = set[bytes]()

    def limited(request: Recorded) -> Any:
        if request.body in refused:
            return answer(request)
        refused.add(request.body)
        return error(429, headers={"retry-after": "0"})

    world.upstream.respond(limited)
    found = json.loads(world.run("--budget", "20", "--json")[0])
    assert (found["asked"], found["failed"]) == (8, {}) and refused


def test_sessions_are_drawn_evenly(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each first, and the same ones each time."""
    monkeypatch.setattr(proof, "MOST", 9)
    monkeypatch.setattr(proof, "NEEDED", 9)
    world.capture()
    world.answer(steady)
    found = json.loads(world.run("--budget", "20", "--json")[0])
    assert (found["asked"], found["sessions"], found["changed"]) == (9, 9, 36)
    first = {asked.shown for asked in world.asked}
    world.asked.clear()
    world.run("--budget", "20")
    assert {asked.shown for asked in world.asked} == first


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--budget", "two"], "--budget two: expected USD, such as 2.00"),
        (["--budget", "nan"], "--budget nan: expected USD, such as 2.00"),
        (["--profile", "--budget", "2"], "--verify takes one --policy, and no --profile"),
        (["--budget", "2"], "0 requests of 2 can be asked again, and a figure needs 30"),
    ],
)
def test_mistakes_are_named(world: World, arguments: list[str], fault: str) -> None:
    session = [{"role": "user", "content": "Hi."}]
    Path("captures.jsonl").write_text(
        f"{json.dumps({'model': 'gpt-4.1', 'messages': session})}\n" * 2
    )
    _, err = world.run(*arguments, code=MISTAKE)
    assert fault in err


def test_a_model_on_this_machine_needs_no_budget(world: World, few: None) -> None:
    world.policy("chat", "keep_views: 2")
    world.capture(count=8)
    world.answer(steady)
    out, _ = world.run("--json")
    found = json.loads(out)
    assert (found["asked"], found["spent"]) == (8, 0)


@pytest.mark.parametrize(
    ("happens", "asked", "ended"),
    [
        (lambda: 1 // 0, [7], ""),
        (lambda: signal.raise_signal(signal.SIGINT), range(2, 8), "it was interrupted"),
    ],
    ids=["bug", "interrupt"],
)
def test_what_was_paid_is_reported_whatever_ends_it(
    happens: Callable[[], Any],
    asked: Any,
    ended: str,
    world: World,
    few: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug costs one request, and Ctrl-C those that are under way."""
    compared = proof.compared
    times = iter(range(8))

    def third(*given: Any, **more: Any) -> dict[str, int]:
        if next(times) == 2:
            happens()
        return compared(*given, **more)

    monkeypatch.setattr(proof, "compared", third)
    world.capture(count=8)
    world.answer(steady)
    out, _ = world.run("--budget", "20", "--json")
    found = json.loads(out)
    assert found["asked"] in asked
    assert found["ended"] == ended and found["spent"] > 0
    assert found["failed"] == ({} if ended else {"a bug of the proxy: ZeroDivisionError": 1})


def test_a_page_that_cannot_be_written_hides_nothing_that_was_paid(world: World, few: None) -> None:
    """Its folder is gone by then."""
    folder = Path("pages")
    folder.mkdir()

    def model(asked: Asked) -> Message:
        if folder.is_dir():
            folder.rmdir()
        return steady(asked)

    world.capture(count=8)
    world.answer(model)
    out, err = world.run("--budget", "20", "--html", "pages/page.html", code=MISTAKE)
    assert "Spent: at most $" in out and "pages/page.html: cannot be written" in err
