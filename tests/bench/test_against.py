from __future__ import annotations

import pytest

from bench import against
from bench.systems import ROOT


def test_the_same_code_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    against.main([str(ROOT), "--pairs=2", "--seconds=0.25", "--only=relayed, bare relay"])
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["other", "this", "ratio", "(lowest,", "highest)"]
    assert line.startswith("relayed, bare relay") and line.count("µs") == 2
