"""Agents that `offload-proxy run` starts, unmodified: each works, its results move and are read
back, and no address of the proxy is left in its files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.apps.dashboard.test_pages import SCREENSHOTS
from tests.apps.run import picture
from tests.apps.run.terminal import missing
from tests.clients.agents import AGENTS, ENVIRONMENTS, HERE, NODE, Agent
from tests.clients.apis import api
from tests.clients.running import ended
from tests.clients.test_agents import policy, squeezed
from tests.clients.test_codex_compaction import STAMP
from tests.clients.worker import CODE, KEY, NEVER, prompts, write_logs
from tests.dialects.responses.api import ITEM_FIELDS
from tests.fake_upstream import StrictUpstream, text
from tests.serving import write_policies

ROOT = Path(__file__).parents[2]
OURS = ".local/state/offload-proxy"


@dataclass(frozen=True)
class Started:
    """How `run` starts an agent of `AGENTS`: its program, and its arguments before what it is
    told."""

    agent: str
    program: Path
    arguments: tuple[str, ...]
    api: str = ""
    """Where its own provider speaks another API than the one with which it is tested otherwise."""
    settings: Mapping[str, str] = field(default_factory=dict)


def package(name: str, program: str) -> Path:
    return HERE / name / "node_modules" / ".bin" / program


def program(name: str) -> Path:
    return next(Path(part) for part in reversed(BY_NAME[name].command) if isinstance(part, Path))


BY_NAME = {agent.name: agent for agent in AGENTS}
STARTED = (
    Started(
        "claude_code",
        program("claude_code"),
        ("--print", "--allowedTools", "Read", "--model", "claude-opus-5-5", "--"),
        settings={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    Started(
        "codex",
        program("codex"),
        (
            *("exec", "--disable", "plugins", "-c", "analytics.enabled=false"),
            *("-c", "check_for_update_on_startup=false", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5.5"),
        ),
    ),
    Started("opencode", program("opencode"), ("run", "-m", "openai/gpt-4.1"), api="responses"),
    Started(
        "copilot",
        program("copilot"),
        ("--allow-all-tools", "--silent", "--model", "gpt-4.1", "--prompt"),
    ),
    Started(
        "kimi",
        package("kimi", "kimi"),
        ("--prompt",),
        settings={
            "KIMI_MODEL_NAME": "gpt-4.1",
            "KIMI_MODEL_API_KEY": "a-key",
            "KIMI_MODEL_PROVIDER_TYPE": "openai",
        },
    ),
    Started(
        "qwen_code_continue",
        package("qwen_code", "qwen"),
        ("--yolo", "--model", "gpt-4.1", "--prompt"),
    ),
    Started(
        "pi",
        package("pi", "pi"),
        ("--offline", "--provider", "anthropic", "--model", "claude-sonnet-4-5", "--print"),
        api="messages",
    ),
    Started(
        "gptme_tool",
        ENVIRONMENTS / "gptme" / "bin" / "gptme",
        (
            "-n",
            "-t",
            "read",
            "--tool-format",
            "tool",
            "--system",
            "short",
            "--no-workspace",
            "-m",
            "openai/gpt-4.1",
        ),
    ),
    Started(
        "mini_swe_agent",
        ENVIRONMENTS / "mini_swe_agent" / "bin" / "mini",
        ("--yolo", "--exit-immediately", "--model", "openai/gpt-4.1", "--task"),
    ),
)

pytestmark = pytest.mark.clients

PROBE = """\
import { writeFileSync } from "node:fs";
export default (pi) => pi.on("turn_start", (_, ctx) => writeFileSync("window", String(ctx.model.contextWindow)));
"""
"""An extension of pi that writes down which window pi takes its model to have."""


@pytest.fixture(params=STARTED, ids=lambda started: started.agent)
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Started:
    """An agent that is installed, with logs to read, next to a home."""
    made: Started = request.param
    if not made.program.exists():
        pytest.skip(f"{made.agent} is not installed: make test-clients")
    for name in ("home", "work", "bin"):
        (tmp_path / name).mkdir()
    write_logs(tmp_path / "work")
    (tmp_path / "bin" / made.program.name).symlink_to(made.program.absolute())
    (tmp_path / "bin" / "node").symlink_to(NODE.absolute())
    return made


async def test_an_agent_works_as_before_and_keeps_nothing_of_the_proxy(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, fields in ITEM_FIELDS.items():
        monkeypatch.setitem(ITEM_FIELDS, kind, fields | {STAMP})
    agent: Agent = BY_NAME[started.agent]
    worker = agent.worker(tmp_path / "work")
    with StrictUpstream(agent.rules) as upstream:
        upstream.respond(served := api(started.api or agent.api, worker))
        chosen = {**policy(upstream.url, agent), "rules": [], "share_namespace": True}
        write_policies(tmp_path / "policies", {"default": chosen})
        said = "\n".join(prompts("gpt"))
        words = [
            sys.executable,
            "-m",
            "proxy",
            "run",
            "--policies",
            str(tmp_path / "policies"),
            "--",
        ]
        settings = {name: value for name, value in agent.settings.items() if "PORT" not in value}
        settings |= {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            **started.settings,
        }
        code, output, errors = await ended(
            [*words, started.program.name, *started.arguments, said],
            upstream.port,
            tmp_path / "work",
            settings,
            agent.unreachable,
        )
    assert code == 0, f"{errors}\n{output}"
    assert not [one for one in served.refused if "bound to a different conversation" not in one]
    assert squeezed(f"{CODE}, {KEY}, {NEVER}") in squeezed(output), output
    last = errors.splitlines()[-1]
    assert re.match(
        r"offload-proxy: \S+ k tokens came, \S+ k were sent .* results moved, [1-9]\d* read back$",
        last,
    ), last
    left = {path for path in (tmp_path / "home").rglob("*") if path.is_file()}
    ours = {path for path in left if path.is_relative_to(tmp_path / "home" / OURS)}
    packed = {path for path in left if path.is_relative_to(tmp_path / "home" / ".cache")}
    assert ours
    # What an agent writes into its own files may be read again: an address there would be dead.
    settings_files = {
        path
        for path in left - ours - packed
        if path.suffix in (".json", ".toml", ".yaml", ".yml", ".env")
    }
    assert not [path for path in settings_files if b"127.0.0.1" in path.read_bytes()]


async def test_pi_takes_the_window_to_be_the_proxys(tmp_path: Path) -> None:
    pi = next(one for one in STARTED if one.agent == "pi")
    if not pi.program.exists():
        pytest.skip("pi is not installed: make test-clients")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "probe.js").write_text(PROBE)
    agent = BY_NAME["pi"]
    with StrictUpstream(agent.rules) as upstream:
        upstream.respond(api("messages", agent.worker(tmp_path / "work")))
        words = [sys.executable, "-m", "proxy", "run", "--", str(pi.program.absolute())]
        words += ["-e", str(tmp_path / "probe.js"), *pi.arguments, "Say hello."]
        path = f"{NODE.absolute().parent}:{os.environ['PATH']}"
        settings = {**agent.settings, "PYTHONPATH": str(ROOT), "PATH": path}
        code, output, errors = await ended(words, upstream.port, tmp_path / "work", settings)
    assert code == 0, f"{errors}\n{output}"
    assert (tmp_path / "work" / "window").read_text() == "1000000"


@pytest.mark.skipif(missing(), reason="tmux is not installed")
def test_a_terminal_shows_what_the_first_picture_of_the_readme_shows() -> None:
    if not program("claude_code").exists():
        pytest.skip("claude_code is not installed: make test-clients")
    rows = picture.rows()
    assert rows[0].startswith("$ offload-proxy run -- claude")
    shown = " ".join(rows)
    assert shown.count("offload-proxy: ") == 2 and CODE in shown and " tokens came, " in shown
    if SCREENSHOTS:
        (Path(SCREENSHOTS) / "run.svg").write_text(picture.drawn(rows))


AIDER = (
    *("--model", "openai/gpt-4.1", "--no-git", "--yes-always", "--no-check-update"),
    *("--analytics-disable", "--no-show-model-warnings", "--map-tokens", "0", "--no-detect-urls"),
    *("--no-pretty", "--no-fancy-input", "--edit-format", "ask"),
    *("--load", "commands", "--message", "What do the logs say?"),
)


async def test_aider_is_led_with_what_its_commands_wrote(tmp_path: Path) -> None:
    """It has no tools: what commands write are messages of the user."""
    aider = ENVIRONMENTS / "aider" / "bin" / "aider"
    if not aider.exists():
        pytest.skip("aider is not installed: make test-clients")
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    write_logs(tmp_path / "work")
    (tmp_path / "work" / "commands").write_text("/run cat part0.log\n/run cat part1.log\n")
    with StrictUpstream() as upstream:
        upstream.respond(lambda request: text("They moved crates."))
        agent = BY_NAME["aider"]
        words = [sys.executable, "-m", "proxy", "run", "--", str(aider.absolute()), *AIDER]
        settings = {**agent.settings, "PYTHONPATH": str(ROOT)}
        code, output, errors = await ended(
            words, upstream.port, tmp_path / "work", settings, agent.unreachable
        )
        [asked] = upstream.chats
    assert code == 0 and "They moved crates." in output, f"{errors}\n{output}"
    assert b"part0.log" in asked.body and b"part1.log" in asked.body
    assert re.search(r"offload-proxy: \S+ k tokens came in 1 request, and nothing moved", errors)
