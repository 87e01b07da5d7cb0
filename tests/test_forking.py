"""The process that tests fork proxies from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clock import PATIENCE
from tests.forking import Nursery


def test_what_one_test_patches_is_in_no_other_tests_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of a run may be that of a test that makes something hang in it."""
    nursery = Nursery()
    patched = tmp_path / "patched"
    (tmp_path / "sitecustomize.py").write_text(f"open({str(patched)!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with nursery, (tmp_path / "said").open("w+b") as said:
        assert nursery.start(["--version"], os.environ, said, said).wait(PATIENCE) == 0
        said.seek(0)
        assert said.read().startswith(b"offload-proxy")
    assert not patched.exists()
