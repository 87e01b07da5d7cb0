"""The start-up benchmark's arithmetic, and that serving loads no optional package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.startup import SERVING, Import, Start, imports, table

SEEN = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   zipimport
import time:      2000 |       2100 | proxy.errors
Something else
import time:       300 |        300 |     re._compiler
"""


def test_imports_are_read_and_ordered_by_their_own_time() -> None:
    found = imports(SEEN)
    assert found[0] == Import("proxy.errors", 2000, 2100)
    assert [one.name for one in found] == ["proxy.errors", "re._compiler", "zipimport"]


def test_the_startup_table_shows_medians() -> None:
    starts = [
        Start(healthy, idle << 20, 0.4, 0.3, 0.002, 100 << 20) for healthy, idle in ((0.5, 50), (9, 70), (0.7, 51))
    ]
    lines = table(starts, imports(SEEN)).splitlines()
    shown = {line[:44].strip(): line[44:].split() for line in lines}
    assert shown["up: start to /health"] == ["700", "ms"]
    assert shown["RSS idle"] == ["51", "MiB"]
    assert shown["proxy.errors"] == ["2.0", "2.1"]


def test_serving_does_not_import_optional_packages() -> None:
    said = f"{SERVING}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", said], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    spared = {"tiktoken", "numpy", "redis", "obstore", "httpx", "rich", "proxy.demo"}
    assert spared.isdisjoint(done.stdout.split())
