"""Captures: what is written, for whom, how much and for how long, and that requests never wait for it."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.apps import capture
from proxy.apps.capture import CaptureFolder, Captures
from proxy.apps.replay import recordings
from proxy.dialects.chat import CHAT
from proxy.errors import UserMistake
from proxy.plan.turn import Request
from proxy.policies import Policies
from proxy.policy import Policy
from proxy.settings import Settings
from proxy.telemetry.logs import Limited
from proxy.telemetry.outcome import Basis, Kind, Outcome
from tests.clock import PATIENCE

DAY = 86_400.0
POLICY = Policy(tenant="acme", capture=True)
BODY = b'{\r\n "model": "m",\n "messages": [{"role": "user", "content": "a \\n \\ud83d \xc3\xa9"}]\n}'
OUTCOME = Outcome(
    request_id="req_1",
    tenant="acme",
    namespace="acme-0123456789abcdef",
    kind=Kind.OBSERVED,
    method="POST",
    path="/v1/chat/completions",
    status=200,
    usage=Basis.BILLED,
    prompt_tokens=100,
    completion_tokens=7,
    cached_tokens=40,
)


CHAT_REQUEST = CHAT.parse(BODY)


def policies(*named: Policy) -> Callable[[], Policies]:
    return lambda: Policies(default=None, named=named or (POLICY,), by_digest={})


@contextmanager
def capturing(root: Path | None, **settings: Any) -> Iterator[Captures]:
    """Captures that run; at the end, what was taken has been written."""
    taken = Captures(Settings(capture=root, **settings), policies())
    taken.start()
    try:
        yield taken
    finally:
        taken.close()


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.jsonl"))


def written(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files(root) for line in file.read_text().splitlines()]


def test_a_capture_is_what_replay_reads(tmp_path: Path) -> None:
    with capturing(tmp_path) as taken:
        taken.take(OUTCOME, POLICY, CHAT_REQUEST)
        taken.take(replace(OUTCOME, kind=Kind.OFFLOADED), POLICY, CHAT_REQUEST)
    [file] = files(tmp_path)
    assert file.parent == tmp_path / "acme-0123456789abcdef"
    billed, changed = recordings.Recordings().requests(file)
    assert billed.chat is not None and json.loads(billed.chat.body) == json.loads(BODY)
    assert billed.said is not None and (billed.said.prompt, billed.said.cached) == (100, 40)
    assert changed.chat is not None and changed.said is None, "what was billed is not the client's request"
    assert billed.caller == changed.caller == OUTCOME.namespace
    first, _ = written(tmp_path)
    assert (first["custom_id"], first["tenant"], first["url"]) == ("req_1", "acme", "/v1/chat/completions")


def test_files_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with capturing(tmp_path / "new" / "folder") as taken:
            taken.take(OUTCOME, POLICY, CHAT_REQUEST)
    finally:
        os.umask(before)
    root = tmp_path / "new" / "folder"
    [file] = files(root)
    assert [path.stat().st_mode & 0o777 for path in (root, file.parent, file)] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize(
    ("outcome", "policy", "chat", "root"),
    [
        (OUTCOME, replace(POLICY, capture=False), CHAT_REQUEST, "captures"),
        (OUTCOME, POLICY, CHAT_REQUEST, None),
        (replace(OUTCOME, status=429), POLICY, CHAT_REQUEST, "captures"),
        (replace(OUTCOME, kind=Kind.RELAY), POLICY, CHAT_REQUEST, "captures"),
        (OUTCOME, POLICY, None, "captures"),
    ],
    ids=["the policy does not agree", "no folder", "refused", "only counted", "not understood"],
)
def test_what_is_not_captured(
    tmp_path: Path, outcome: Outcome, policy: Policy, chat: Request | None, root: str | None
) -> None:
    with capturing(root and tmp_path / root) as taken:
        taken.take(outcome, policy, chat)
    assert not written(tmp_path)


def test_the_log_warns_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with capturing(tmp_path):
        pass
    [record] = caplog.records
    assert record.levelname == "WARNING" and "requests are captured" in record.message
    fields: Any = record
    assert fields.fields == {"folder": str(tmp_path), "tenants": ["acme"]}


def test_a_first_look_that_fails_does_not_end_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may delete a namespace's folder while this one looks into it."""
    sweep, looks = CaptureFolder.sweep, list[int]()

    def vanishing(folder: CaptureFolder, coming: int = 0) -> None:
        looks.append(coming)
        if len(looks) == 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        sweep(folder, coming)

    monkeypatch.setattr(CaptureFolder, "sweep", vanishing)
    with capturing(tmp_path) as taken:
        taken.take(OUTCOME, POLICY, CHAT_REQUEST)
    assert len(written(tmp_path)) == 1


def test_a_folder_that_cannot_be_is_the_operators_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserMistake, match=r"--capture .*file: expected a directory"):
        Captures(Settings(capture=tmp_path / "file"), policies())


def test_a_disk_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "WAITING", 6 * len(BODY))
    monkeypatch.setattr(capture, "CLOSING", 0.01)
    free = threading.Event()
    monkeypatch.setattr(CaptureFolder, "write", lambda *_: free.wait(PATIENCE))
    with capturing(tmp_path) as taken:
        for _ in range(9):
            taken.take(OUTCOME, POLICY, CHAT_REQUEST)
        assert taken._came == 6 * len(BODY)
        assert "the disk does not keep up" in caplog.text
    free.set()


def test_a_disk_that_fails_is_told_of_and_loses_only_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = os.write, [False]

    def write(descriptor: int, data: bytes) -> int:
        if full[0]:
            real(descriptor, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    for full[0] in (False, True, False):
        with capturing(tmp_path) as taken:
            taken.take(OUTCOME, POLICY, CHAT_REQUEST)
    assert "requests are not captured: No space left on device" in caplog.text
    assert len(written(tmp_path)) == 2, "half a line would make the file unreadable"


# -- bounds ------------------------------------------------------------------------------------------------------------


class Disk:
    """A folder with a clock of its own, and a limit of 8 KB."""

    def __init__(self, root: Path, kept: float | None = None) -> None:
        self.root, self.now = root, 1_000_000_000.0
        warn = Limited(logging.getLogger("test"))
        self.folder = CaptureFolder(root, 8_000, lambda namespace: kept, warn, lambda: self.now)

    def write(self, namespace: str, size: int = 500) -> None:
        self.now += 1
        self.folder.write(namespace, b"x" * (size - 1) + b"\n")
        newest = max((self.root / namespace).iterdir(), key=lambda file: file.stat().st_mtime)
        os.utime(newest, (self.now, self.now))

    def size(self, namespace: str = "") -> int:
        return sum(file.stat().st_size for file in self.root.rglob(f"{namespace}*/*.jsonl"))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_the_folder_stays_within_its_size_at_the_cost_of_who_has_most(disk: Disk) -> None:
    for _ in range(3):
        disk.write("small-anonymous")
    for number in range(100):
        disk.write(f"large-{number % 7:016x}")
        assert disk.size() <= 8_000
    assert disk.size("small") == 1_500, "a busy tenant does not push out another's, however many keys it has"
    assert disk.size() > 4_000
    with pytest.raises(OSError, match="too large for --capture-limit"):
        disk.write("acme", 7_000)


def test_files_are_complete_after_a_size_and_after_a_time(disk: Disk) -> None:
    for _ in range(5):
        disk.write("acme")
    assert len(list(disk.root.rglob("*.jsonl"))) == 2
    disk.now += capture.EVERY
    disk.write("acme")
    names = sorted(file.name for file in disk.root.rglob("*.jsonl"))
    assert len(names) == 3 and names[0].startswith("20010909T0146")


@pytest.mark.parametrize(("kept", "days"), [(None, 7), (30 * DAY, 7), (2 * DAY, 2)])
def test_captures_end_with_their_age_or_their_tenants_retention(tmp_path: Path, kept: float | None, days: int) -> None:
    disk = Disk(tmp_path, kept)
    disk.write("acme")
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "acme" / "notes.txt").write_text("not ours")
    disk.now += days * DAY
    disk.folder.sweep()
    assert disk.size() == 500
    disk.now += 1
    disk.folder.sweep()
    assert disk.size() == 0 and len(list(tmp_path.rglob("notes.txt"))) == 2


def test_files_that_cannot_be_deleted_keep_no_others_captures(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in ("a", "b", "c"):
        disk.write(namespace)
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    disk.now += 8 * DAY
    disk.folder.sweep()
    assert (disk.size("a"), disk.size("b"), disk.size("c")) == (0, 500, 0)


def test_there_are_not_more_files_than_can_be_listed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "FILES", 20)
    for number in range(40):
        disk.write(f"acme-{number:016x}", 10)
    disk.folder.sweep()
    assert len(list(disk.root.rglob("*.jsonl"))) == 20
    assert len(list(disk.root.iterdir())) == 20, "folders that are empty are gone"


def test_a_folder_that_vanished_is_made_again(disk: Disk) -> None:
    disk.write("acme")
    capture.kept(disk.root, "acme", delete=True)
    disk.root.rmdir()
    disk.write("acme")
    assert disk.size() == 500


def test_links_are_not_followed(disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "a.jsonl").write_text("keep")
    os.utime(elsewhere / "a.jsonl", (0, 0))
    (disk.root / "acme").symlink_to(elsewhere)
    disk.folder.sweep()
    assert (elsewhere / "a.jsonl").read_text() == "keep"
