"""Draws docs/images/run.svg: a terminal in which Claude Code runs behind a proxy, before a scripted
model.

`OFFLOAD_SCREENSHOTS=docs/images make test-clients` makes it anew.
"""

from __future__ import annotations

import os
import sys
import tempfile
from html import escape
from pathlib import Path

from tests.apps.run.terminal import COLUMNS, terminal
from tests.apps.run.test_run import environment
from tests.clients.agents import AGENTS
from tests.clients.apis import api
from tests.clients.worker import FACTS, LOGS, prompts
from tests.fake_upstream import StrictUpstream

LINES = 1_000
"""Of each log: the six have some 100,000 tokens, above the ceiling of 30,000."""
WIDTH, HEIGHT, EDGE = 8.4, 20, 16
"""Pixels of a character, of a row, and around the text."""


def rows() -> list[str]:
    """Return the rows of the terminal. It needs tmux and Claude Code."""
    claude = next(agent for agent in AGENTS if agent.name == "claude_code")
    with tempfile.TemporaryDirectory() as made, StrictUpstream() as upstream:
        home, work, programs = (Path(made, name) for name in ("home", "work", "bin"))
        for folder in (home, work, programs):
            folder.mkdir()
        write_logs(work)
        (programs / "claude").symlink_to(Path(claude.command[0]).absolute())
        ours = programs / "offload-proxy"
        ours.write_text(f'#!/bin/sh\nexec {sys.executable} -m proxy "$@"\n')
        ours.chmod(0o755)
        (work / "task.txt").write_text("\n".join(prompts("claude")))
        upstream.respond(api("messages", claude.worker(work)))
        known = environment(
            home,
            upstream.url,
            ANTHROPIC_API_KEY="a-key",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        with terminal(work, {**known, "PATH": f"{programs}:{os.environ['PATH']}"}) as shown:
            shown.type("offload-proxy run -- claude -p --allowedTools Read < task.txt")
            shown.until("read back")
            return [row for row in shown.rows() if row.strip()]


def write_logs(folder: Path) -> None:
    for number in range(LOGS):
        lines = [
            f"{number}:{at:03} the quick worker {at * 37 % 101} moved {at * 53 % 997} crates"
            for at in range(LINES)
        ]
        lines[50] += f"; {FACTS[number]}" if number in FACTS else ""
        (folder / f"part{number}.log").write_text("\n".join(lines) + "\n")


def drawn(rows: list[str]) -> str:
    """Return the rows as an SVG."""
    width, height = round(COLUMNS * WIDTH + 2 * EDGE), len(rows) * HEIGHT + 2 * EDGE
    style = (
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" xml:space="preserve"'
    )
    lines = [
        f'<text x="{EDGE}" y="{EDGE + (number + 0.75) * HEIGHT:g}" fill="{colour(row)}">{escape(row)}</text>'
        for number, row in enumerate(rows)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {style}>\n'
        f'<title>offload-proxy run</title>\n<rect width="{width}" height="{height}" rx="8" fill="#1b1f24"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def colour(row: str) -> str:
    return "#ffffff" if row.startswith("$ ") else "#c9d1d9"
