"""A terminal of 80 columns and 24 rows, driven by tmux."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.clock import wait_until

COLUMNS, ROWS = 80, 24


class Terminal:
    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-l", line)
        self.press("Enter")

    def press(self, key: str) -> None:
        """Press a key, such as `C-c`."""
        self.tmux("send-keys", key)

    def screen(self) -> str:
        """Return what is shown, with lines that the terminal wrapped in one piece."""
        return self.tmux("capture-pane", "-p", "-J")

    def rows(self) -> list[str]:
        """Return what is shown, row by row."""
        return self.tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def until(self, words: str) -> str:
        """Wait until these words are shown, and return the screen."""
        wait_until(lambda: words in self.screen())
        return self.screen()

    def until_foreground(self) -> None:
        """Wait until the shell has given the terminal to a command."""
        shown = ("display-message", "-p", "#{pane_current_command}")
        wait_until(lambda: self.tmux(*shown).strip() != "bash")


@contextmanager
def terminal(folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a shell in `folder`, with this environment."""
    with tempfile.TemporaryDirectory() as made:
        shown = Terminal(Path(made, "socket"))
        shell = [
            "env",
            "-i",
            *(f"{name}={value}" for name, value in environment.items()),
            "PS1=$ ",
            "TERM=screen",
        ]
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        shown.tmux(
            "-f",
            os.devnull,
            "new-session",
            "-d",
            *size,
            "-c",
            str(folder),
            *shell,
            "bash",
            "--norc",
            "-i",
        )
        try:
            shown.until("$ ")
            yield shown
        finally:
            shown.tmux("kill-server")


def missing() -> bool:
    return shutil.which("tmux") is None or shutil.which("bash") is None
