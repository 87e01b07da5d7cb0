"""The search benchmark on a few files. `python -m bench.grep_speed` prints the real figures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import grep_speed


def test_grep_speed_measures_a_few_files(tmp_path: Path) -> None:
    figures = grep_speed.run(10, 1)
    assert [row.name for row in figures.rows] == list(grep_speed.PATTERNS)
    matches = {row.name: row.matches for row in figures.rows}
    assert (matches["rare literal"], matches["no match"]) == (5, 0)
    assert all(row.waits and (row.ripgrep is None) is (shutil.which("rg") is None) for row in figures.rows)
    assert len(grep_speed.table(figures).splitlines()) >= 3 + len(figures.rows)
    grep_speed.draw(tmp_path / "chart.png", figures)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sweep
def test_without_ripgrep_the_table_shows_only_the_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    figures = grep_speed.run(2, 1)
    assert all(row.ripgrep is None and row.seconds > 0 for row in figures.rows)
    assert "ripgrep is not installed" in grep_speed.table(figures)
    grep_speed.draw(tmp_path / "chart.png", figures)
