"""Which build this is: the version, and the commit where it is known."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from proxy import __version__

FOLDER = Path(__file__).parent

SHORT = 12
"""Digits of a commit that are shown."""


@cache
def version() -> str:
    """Return `1.0.0 (c56b526d1f2e)`, or the version alone if the commit is not known."""
    commit = _commit()
    return f"{__version__} ({commit[:SHORT]})" if commit else __version__


def _commit() -> str:
    """Return the commit that the build wrote down, or that of the checkout; otherwise an empty
    text."""
    written = FOLDER / "commit"
    if written.exists():
        return written.read_text(encoding="ascii").strip()
    checkout = FOLDER.parent
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or somebody else's checkout
        return ""
    return done.stdout.strip()


def install(extra: str) -> str:
    """Return the command that installs one of our extras."""
    checkout = (FOLDER.parent / "pyproject.toml").exists()
    return f"pip install '.[{extra}]'" if checkout else f"pip install 'offload-proxy[{extra}]'"
