from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.errors import UserMistake
from proxy.stores import describe, expires_by_itself, open_store


@pytest.mark.parametrize(
    ("form", "made"),
    [
        ("{}/with space", "with space"),
        ("file://{}/with space", "with space"),
        ("file://localhost{}/x", "x"),
        ("FILE://{}/x", "x"),
        ("file://{}/a%20b", "a b"),  # a URL is unquoted, and a path is not
        ("{}/c%20d", "c%20d"),
        ("~/records", "records"),
    ],
)
async def test_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, made: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store(form.format(tmp_path))
    await store.put("a-1/round/k", b"1")
    await store.close()
    assert os.listdir(tmp_path) == [made]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/x", "no store is known for ftp://"),
        ("http://host/x", "redis://"),
        ("file://host/x", "three slashes"),
        ("file://", "three slashes"),
        ("redis://:secret@[::1", "IPv6 address in brackets"),
        (
            "redis+sentinel://a,b/mymaster",
            "known for redis\\+sentinel://.* redis://, .*; of Redis, a single server",
        ),
        ("rediss+cluster://a,b", "; of Redis, a single server"),
        ("s3://[b", "IPv6 address in brackets"),
        ("rediss://:secret@a\u2100b", "the store's URL: expected a host's name"),
    ],
)
def test_what_is_no_store(url: str, says: str) -> None:
    with pytest.raises(UserMistake, match=says) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "url", "extra"), [("redis", "redis://h", "redis"), ("obstore", "s3://b", "objects")]
)
def test_a_missing_client_is_named_with_the_line_that_installs_it(
    module: str, url: str, extra: str
) -> None:
    program = f"import sys; sys.modules[{module!r}] = None; from proxy.stores import open_store; open_store({url!r})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stderr.strip().endswith(f"pip install '.[{extra}]'")


def test_clients_are_imported_only_when_they_are_used(tmp_path: Path) -> None:
    program = f"import sys; from proxy.stores import open_store; open_store({str(tmp_path)!r}); print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"redis", "obstore"} & set(run.stdout.split())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0?ssl_password=secret", "redis://host:6379/0"),
        ("redis://:p@ss@a:1/2", "redis://a:1/2"),
        ("s3://bucket/prefix?secret_access_key=secret", "s3://bucket/prefix"),
        ("/var/lib/records", "/var/lib/records"),
        ("odd?#folder@name", "odd?#folder@name"),
    ],
)
def test_describe_shows_no_secret(url: str, shown: str) -> None:
    assert describe(url) == shown


def test_expires_by_itself() -> None:
    urls = "redis://h", "rediss://h", "s3://b", "folder"
    assert [expires_by_itself(url) for url in urls] == [True, True, False, False]
