"""A short run of the benchmark of memory: its callers are served through each API, and all caches count something."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import memory
from tests.serving import spawned, tight


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.sweep
async def test_callers_of_all_apis_fill_all_caches(capsys: pytest.CaptureFixture[str]) -> None:
    with memory.reading() as upstream, spawned({"default": tight(upstream)}) as proxy:
        [(rss, cached)] = await memory.fill(proxy, minutes=0.05, lines=1)
    assert 0 < cached < rss
    line = capsys.readouterr().out
    assert all(f"{cache} " in line and f"{cache} 0.0" not in line for cache in ("compacted", "histories", "store"))
