"""What is vendored is what its package contains."""

from __future__ import annotations

import hashlib
from importlib.resources import files


def test_vendored_files_are_unchanged() -> None:
    vendor = files("proxy.dashboard") / "static" / "vendor"
    recorded = [line.split() for line in (vendor / "SHA256SUMS").read_text(encoding="utf-8").splitlines()]
    assert {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for _, name in recorded} == {
        name: digest for digest, name in recorded
    }
    present = {file.name for file in vendor.iterdir()} - {"SHA256SUMS", "README.md"}
    assert present == {name for _, name in recorded} and "uPlot.LICENSE" in present
