"""`store forget`: everything of one namespace goes, and nothing of another's."""

from __future__ import annotations

import asyncio
import io
import time
from contextlib import closing
from pathlib import Path

import pytest

from proxy.apps.dashboard.rows import Rows
from proxy.cli import FAILED, MISTAKE, OK, main
from proxy.settings import read
from proxy.stores import open_store
from tests.apps.dashboard.traffic import ended

CALLER, OTHER = "acme-0123456789abcdef", "acme-0123456789abcde0"
KEYS = [f"{CALLER}/rounds/{number}" for number in range(5)] + [
    f"{CALLER}/originals/b",
    f"{CALLER}/captures/20010909T014640.000000-0123abcd.jsonl",
    f"{OTHER}/rounds/1",
    "acme/files/f",
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for more to come."""
    monkeypatch.setattr("proxy.cli.store.SETTLED", 0.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def _fill(url: str) -> None:
    store = open_store(url)
    for key in KEYS:
        await store.put(key, b"12345")
    await store.close()


async def _keys(url: str) -> set[str]:
    store = open_store(url)
    found = {entry.key async for entry in store.list("")}
    await store.close()
    return found


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    asyncio.run(_fill(url))
    return url


def test_everything_of_one_namespace_goes(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "forget", CALLER, "--store", store, "--yes"]) == OK
    assert capsys.readouterr() == ("deleted 7 records\n", "")
    assert asyncio.run(_keys(store)) == {f"{OTHER}/rounds/1", "acme/files/f"}
    assert main(["store", "forget", CALLER, "--store", store, "--yes"]) == FAILED
    assert capsys.readouterr() == ("", f"nothing is kept of {CALLER}\n")


def test_what_is_still_being_written_goes_too_and_is_told(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy stores the texts that a request moved after its reply, and that can take longer than
    a look."""
    monkeypatch.setattr("time.sleep", lambda seconds: asyncio.run(_fill(store)))
    assert main(["store", "forget", CALLER, "--store", store, "--yes"]) == FAILED
    out, error = capsys.readouterr()
    assert out == "deleted 7 records\n" * 2
    assert error == f"more of {CALLER} may come: end its conversations, then run this again\n"
    assert asyncio.run(_keys(store)) == {f"{OTHER}/rounds/1", "acme/files/f"}


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", OK), ("Yes\n", OK), ("\n", 1), ("", 1), (None, MISTAKE)]
)
def test_a_terminal_is_asked(
    store: str,
    answer: str | None,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one, --yes has to be given."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n") if answer is None else Terminal(answer))
    assert main(["store", "forget", CALLER, "--store", store]) == code
    out, error = capsys.readouterr()
    kept = "7 records"
    if answer is None:
        assert f"would delete {kept}: there is no terminal to ask, so add --yes" in error
    else:
        assert out.startswith(f"{kept}\nDelete all of this of acme-") and ("deleted" in out) == (
            code == OK
        )
    assert len(asyncio.run(_keys(store))) == (2 if code == OK else len(KEYS))


def test_rows_of_all_of_this_users_proxies_go_too(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept = [read({"upstream": f"http://h/v{number}"}).dashboard for number in (1, 2)]
    for path in filter(None, kept):
        with closing(Rows(path, 16 << 20)) as rows:
            rows.write(ended(3, namespace=CALLER))
    assert main(["store", "forget", CALLER, "--store", store, "--yes"]) == OK
    assert "6 rows of the dashboard" in capsys.readouterr().out
    for path in filter(None, kept):
        with closing(Rows(path, 16 << 20)) as rows:
            assert rows.count(CALLER) is None


def test_rows_of_the_dashboard_go_too(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.db"
    with closing(Rows(path, 16 << 20)) as rows:
        for namespace in (CALLER, OTHER):
            rows.write(ended(3, namespace=namespace))
        assert (
            main(["store", "forget", CALLER, "--store", store, "--dashboard", str(path), "--yes"])
            == OK
        )
        assert "3 rows of the dashboard" in capsys.readouterr().out
        assert (rows.count(CALLER), rows.count(OTHER)) == (None, 3)
        rows.connection.execute("DELETE FROM requests")  # as when the file is full
        assert (
            main(["store", "forget", OTHER, "--store", store, "--dashboard", str(path), "--yes"])
            == OK
        )
        assert rows.connection.execute("SELECT count(*) FROM sums").fetchone() == (0,)
        assert (
            main(["store", "forget", OTHER, "--store", store, "--dashboard", str(path), "--yes"])
            == FAILED
        )
        rows.write(ended(1, at=time.time() - 1, namespace=OTHER))
        assert rows.count(OTHER) is None, (
            "nor comes what a proxy had yet to write when nothing was kept"
        )
    assert OTHER.encode() not in path.read_bytes()
    missing = tmp_path / "none"
    assert (
        main(["store", "forget", OTHER, "--store", store, "--dashboard", str(missing), "--yes"])
        == MISTAKE
    )
    assert f"--dashboard {missing}: there is no such file" in capsys.readouterr().err
