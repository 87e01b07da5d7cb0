"""Runs the demo as a user does: what it claims is true, and it leaves nothing running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.apps.demo.model import ScriptedUpstream
from tests.clock import PATIENCE, wait_until
from tests.sdks import Lazy, openai
from tests.serving import Proxy
from tests.test_cli import run

session = Lazy("proxy.apps.demo.session")

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "proxy", "demo"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables that would mislead the demo, which must ignore them. Its folder is made in
    `tmp_path`."""
    # A shell's background job ignores SIGINT, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    led = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "http_proxy", "OPENAI_BASE_URL")}
    return {**os.environ, **led, "TMPDIR": str(tmp_path), "COLUMNS": "120", "LINES": "30"}


def test_the_demo_exits_with_0_and_prints_its_claims(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = run("demo", **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout

    rows = re.findall(
        r"^ +(\d+)  (.{44}) +([\d,]+) +([\d,]+) *([\d,]*) *([\d,]*)$", done.stdout, re.MULTILINE
    )
    client, sent = ([int(row[column].replace(",", "")) for row in rows] for column in (2, 3))
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert client == sorted(client)
    assert client[-1] >= 95_000
    assert sent[-1] < client[-1] / 2
    assert all(one <= whole + 1_000 for one, whole in zip(sent, client, strict=True)), (
        "but for our tools, never larger"
    )

    assert (
        f"context       {client[-1]:,} tokens without the proxy, {sent[-1]:,} with it"
        in done.stdout
    )
    assert f"at no time more than {max(sent):,}\n" in done.stdout

    assert done.stdout.count("(right)") == 2
    assert "scripted" in done.stdout
    assert re.search(r"same prefix +\d\d%", done.stdout)
    assert re.search(r"nothing lost +[1-9]\d* results were moved", done.stdout)
    assert f"your agent    {sys.executable} -m proxy run -- claude\n" in done.stdout

    (store,) = re.findall(r"^files +(\S+),", done.stdout, re.MULTILINE)
    assert Path(store).is_relative_to(tmp_path)
    assert "originals" in run("store", "ls", "--store", store).stdout


@pytest.mark.sweep
def test_the_demo_serves_its_session_until_it_is_told_to_end(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*COMMAND, "--serve"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    ) as demo:
        assert demo.stdout
        said = (re.match(r"dashboard +(http:\S+) ", line) for line in demo.stdout)
        link = next(found[1] for found in said if found)
        with httpx.Client(follow_redirects=True) as browser:
            assert browser.get(link).status_code == 200
            api = f"{link.partition('login')[0]}api/"
            newest: list[dict[str, Any]] = []

            def whole() -> bool:
                newest[:] = browser.get(f"{api}requests?limit=1").json()
                return bool(newest) and newest[0]["messages"] >= 64

            wait_until(whole)
            shown = browser.get(f"{api}sessions").json()
        os.killpg(demo.pid, signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.returncode == 0
    assert [one["requests"] > 20 and one["events"] > 0 for one in shown] == [True]
    [last] = newest
    assert (
        f"{last['tokens_before']:,} tokens without the proxy, {last['tokens_after']:,} with it"
        in rest
    ), "one truth"
    assert "nothing lost" in rest


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.sweep),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.sweep),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, number: int, code: int
) -> None:
    """The signal goes to the demo alone, which is harder than Ctrl-C, where everything gets it."""
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().lstrip().startswith(b"2 "):
            assert demo.poll() is None
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=PATIENCE)
    assert (demo.returncode, errors) == (code, b"")
    assert not list(tmp_path.iterdir())
    wait_until(lambda: _gone(demo.pid))


@pytest.mark.sweep
def test_the_demo_session_runs_in_compact_mode(serve: Callable[..., Proxy]) -> None:
    """The demo itself takes the default; in this mode, too, what was taken away is found again."""
    with ScriptedUpstream().serving() as upstream:
        proxy = serve(
            {"default": {"upstream": {"base_url": upstream.url}, "offload": {"mode": "compact"}}}
        )
        with openai.OpenAI(base_url=proxy.url, api_key="k", max_retries=0) as client:
            agent = session.Agent(client, upstream)
            rows = list(agent.run())
    assert [one.line.strip() == said for one, said in agent.answers] == [True, True]
    assert rows[-1].sent < rows[-1].client / 2


def _gone(group: int) -> bool:
    """Return whether all processes of the demo's group have ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
