"""Write the commit into what is built, for `offload-proxy --version` and the dashboard's Health
page.

An sdist and an image have no git to ask: their `proxy/commit` is there already.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the file `proxy/commit` where the build runs in a git checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        command = ["git", "-C", self.root, "rev-parse", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return
        self._made = tempfile.NamedTemporaryFile("w", encoding="ascii")  # noqa: SIM115
        self._made.write(done.stdout)
        self._made.flush()
        build_data["force_include"][self._made.name] = "proxy/commit"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_made"):
            self._made.close()
