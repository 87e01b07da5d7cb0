"""How many files a request visits: it is counted in every thread, and does not grow unnoticed."""

from __future__ import annotations

import pytest

from bench import visited


def test_what_is_visited_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        name: {path.removeprefix(visited.OURS) for path in files}
        for name, (files, _) in visited.counts().items()
    }
    passed, turn, reading = found.values()
    assert "requests/handler.py" in passed and "plan/summary.py" not in passed
    assert "dialects/turn.py" in turn - passed
    assert any(path.startswith("tools/") for path in reading - turn)
    assert len(passed) <= 45 and len(turn) <= 75
