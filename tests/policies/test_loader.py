"""A directory of policies: who has which, whole or not at all, and the book that follows
changes."""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy import policies as book_module
from proxy.errors import PolicyError
from proxy.policies import INTERVAL, Policies, PolicyLoader, load
from proxy.policy import LISTED, Policy, Upstream
from tests.clock import Clock, turns, until

BUILT_IN = load(None, {})
SHIPPED = Path(__file__).parents[2] / "policies"
ENVIRONMENT = {"ACME": "sk-acme", "GLOBEX": "sk-globex"}
ACME = "api_keys: [{env: ACME}]\n"
GLOBEX = "api_keys: [{env: GLOBEX}]\n"


def put(directory: Path, **files: str) -> Path:
    directory.mkdir(exist_ok=True)
    for stem, text in files.items():
        (directory / f"{stem}.yaml").write_text(text)
    return directory


def refused(directory: Path) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load(directory, ENVIRONMENT)
    return str(caught.value).replace(f"{directory}/", "").splitlines()


# --- who has which --------------------------------------------------------------------------------


def test_a_key_finds_its_tenant_and_strangers_the_default(tmp_path: Path) -> None:
    policies = load(put(tmp_path, acme=ACME, globex=GLOBEX, default="{}"), ENVIRONMENT)
    names = [
        policy and policy.tenant
        for policy in map(
            policies.tenant_for_key, [b"sk-acme", b"sk-globex", b"sk-other", b"", None]
        )
    ]
    assert names == ["acme", "globex", "default", "default", "default"]
    assert [policy.tenant for policy in policies.all()] == ["default", "acme", "globex"]


def test_without_a_default_strangers_have_none(tmp_path: Path) -> None:
    policies = load(put(tmp_path, acme=ACME), ENVIRONMENT)
    assert [policies.tenant_for_key(key) for key in (b"sk-other", b"", None)] == [None, None, None]
    assert [policy.tenant for policy in policies.all()] == ["acme"]


def test_default_yaml_is_the_default_under_any_name(tmp_path: Path) -> None:
    policies = load(
        put(tmp_path, default="tenant: public", acme=ACME + "tenant: default"), ENVIRONMENT
    )
    assert policies.default is not None
    assert [policy.tenant for policy in policies.all()] == ["public", "default"]
    assert policies.default.tenant == "public"


def test_no_key_and_no_digest_is_shown(tmp_path: Path) -> None:
    policies = load(put(tmp_path, acme=ACME + "upstream: {api_key: '${ACME}'}"), ENVIRONMENT)
    assert repr(policies) == "Policies(acme)"
    assert "sk-acme" not in f"{policies.all()!r}"


def test_the_builtin_serves_everybody_at_the_given_address() -> None:
    assert Policies(default=Policy(listed=LISTED), named=(), by_digest={}) == BUILT_IN
    elsewhere = load(None, {}, "https://x.example/v1").tenant_for_key(b"any")
    assert elsewhere == Policy(upstream=Upstream(base_url="https://x.example/v1"), listed=LISTED)


# --- what is refused ------------------------------------------------------------------------------


def test_each_bad_file_has_its_line(tmp_path: Path) -> None:
    put(tmp_path, acme=ACME + "open: maybe", default="{}", globex="api_keys: 3", odd="a: [")
    assert refused(tmp_path) == [
        "acme.yaml:2: open: expected true or false, got text (default.yaml only: strangers may use upstream.api_key)",
        "globex.yaml:1: api_keys: expected a list, got a whole number (whose requests these are: a list with `env` or "
        "`sha256` of each key)",
        "odd.yaml:1: not valid YAML: expected the node content, but found '<stream end>'",
    ]


def test_two_files_can_share_neither_a_tenant_nor_a_key(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-acme").hexdigest().upper()
    put(
        tmp_path,
        acme="\n" + ACME,
        zeta=f"tenant: acme\napi_keys:\n- env: GLOBEX\n- sha256: {digest}",
    )
    assert refused(tmp_path) == [
        "zeta.yaml:1: tenant: acme is the tenant of acme.yaml already",
        "zeta.yaml:4: api_keys[1]: the same key as acme.yaml:2",
    ]


def test_directories_that_cannot_be_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(
        PolicyError, match="missing: expected a directory of policies: No such file"
    ):
        load(tmp_path / "missing", {})
    with pytest.raises(
        PolicyError, match="file: expected a directory of policies: Not a directory"
    ):
        load(tmp_path / "file", {})
    with pytest.raises(PolicyError, match="expected at least one policy"):
        load(tmp_path, {})
    (tmp_path / "acme.yml").write_text(ACME)
    with pytest.raises(PolicyError, match=r"acme\.yml: only \*\.yaml is read; name it acme\.yaml"):
        load(tmp_path, {})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"tenant: b\xfccher")
    (tmp_path / "lost.yaml").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refused(tmp_path) == [
        "default.yaml: cannot be read: Not a regular file",
        "latin.yaml: expected text in UTF-8",
        "lost.yaml: cannot be read: No such file or directory",
        "pipe.yaml: cannot be read: Not a regular file",
    ]


def test_what_is_no_policy_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path, default="{}", **{".hidden": "a: ["})
    (tmp_path / "schema.json").write_text("{")
    (tmp_path / "examples").mkdir()
    put(tmp_path / "examples", acme="a: [")
    (tmp_path / "default.yaml").write_bytes(b"\xef\xbb\xbftenant: marked")
    assert repr(load(tmp_path, {})) == "Policies(marked)"


# --- what we ship ---------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [None, "http://x/v1"])
def test_the_shipped_default_says_the_defaults(address: str | None) -> None:
    assert load(SHIPPED, {}, address) == load(None, {}, address)


def test_the_shipped_examples_load_together() -> None:
    environment = {
        "ACME_CLIENT_KEY": "a",
        "ACME_OPENAI_KEY": "b",
        "AZURE_OPENAI_API_KEY": "c",
        "AZURE_RESOURCE": "contoso",
        "LOCAL_CLIENT_KEY": "d",
    }
    policies = load(SHIPPED / "examples", environment)
    assert [policy.tenant for policy in policies.named] == ["acme", "azure", "small-window"]
    for variable in environment:
        with pytest.raises(PolicyError, match=variable):
            load(
                SHIPPED / "examples",
                {name: value for name, value in environment.items() if name != variable},
            )


def test_keys_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, default="offload: {mode: compress, keep_views: 2}", acme=ACME)
    why = "`keep_views` (2) has no effect in the mode compress, where results do not move by themselves"
    warning = f"{tmp_path}/default.yaml:1: offload.keep_views: {why}"
    assert PolicyLoader(tmp_path, ENVIRONMENT).current.warnings == (warning,)
    assert caplog.messages == [warning]


# --- the book -------------------------------------------------------------------------------------


class Watched:
    """A book that is watched, by a clock that stands still between two looks."""

    def __init__(self, book: PolicyLoader, clock: Clock) -> None:
        self._book, self._clock = book, clock

    async def look(self, times: int = 1) -> None:
        """Let the time between two looks pass, and return when one more is over."""
        for _ in range(times):
            self._clock.move(INTERVAL)
            await self.settled()

    async def settled(self) -> None:
        """Let the only thread come to the end of what it has to do: to look, and then to load."""
        for _ in range(3):
            await turns()
            await asyncio.to_thread(lambda: None)

    async def becomes(self, expected: str) -> None:
        """Within the two seconds that are promised."""
        await self.look(int(2 / INTERVAL))
        assert repr(self._book.current) == f"Policies({expected})"


@contextlib.asynccontextmanager
async def watched(book: PolicyLoader, clock: Clock) -> AsyncIterator[Watched]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    task = asyncio.create_task(book.watch())
    await turns()
    try:
        yield Watched(book, clock)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_files_changed_added_and_removed_are_taken(tmp_path: Path, clock: Clock) -> None:
    book = PolicyLoader(put(tmp_path, default="{}"), ENVIRONMENT)
    async with watched(book, clock) as watch:
        put(tmp_path, acme=ACME)
        await watch.becomes("default, acme")
        put(tmp_path, default="tenant: public")
        await watch.becomes("public, acme")
        (tmp_path / "default.yaml").unlink()
        await watch.becomes("acme")


async def test_a_bad_set_leaves_the_old_one_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    book = PolicyLoader(put(tmp_path, default="{}"), ENVIRONMENT)
    old = book.current
    async with watched(book, clock) as watch:
        put(tmp_path, acme=ACME, default="retention: soon")
        await watch.look(4)
        assert book.current is old
        errors = [
            record.getMessage() for record in caplog.records if record.levelno == logging.ERROR
        ]
        assert len(errors) == 1
        assert f"{tmp_path}/default.yaml:1: retention: expected" in errors[0]
        put(tmp_path, default="tenant: mended")
        await watch.becomes("mended, acme")
    assert "sk-acme" not in caplog.text


async def test_a_bug_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    told: list[bool] = []
    book = PolicyLoader(put(tmp_path, default="{}"), {}, report=told.append)
    with monkeypatch.context() as patched:
        patched.setattr(book_module, "_parsed", lambda *_: {}["bug"])
        assert not book.reload()
    assert "a bug, in reading the policies" in caplog.text
    async with watched(book, clock) as watch:
        put(tmp_path, default="tenant: later")
        await watch.becomes("later")
    assert told == [False, True]


async def test_the_swap_of_a_mounted_configmap_is_seen(tmp_path: Path, clock: Clock) -> None:
    """As the kubelet does it: files are links through `..data`, which is replaced by a rename."""
    put(tmp_path / "..one", default="tenant: one")
    put(tmp_path / "..two", default="tenant: two")
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "default.yaml").symlink_to("..data/default.yaml")
    book = PolicyLoader(tmp_path, {})
    async with watched(book, clock) as watch:
        (tmp_path / "..next").symlink_to("..two")
        (tmp_path / "..next").rename(tmp_path / "..data")
        await watch.becomes("two")


async def test_a_file_that_is_still_being_written_is_not_taken(
    tmp_path: Path, clock: Clock
) -> None:
    """Half a file can be a policy too: here one that sends keys to the default address."""
    book = PolicyLoader(put(tmp_path, default="{}"), {})
    seen = set()
    async with watched(book, clock) as watch:
        for length in range(12):
            put(tmp_path, default="tenant: " + "x" * (length + 1))
            await watch.look()
            seen.add(repr(book.current))
        await watch.becomes("x" * 12)
    assert seen == {"Policies(default)"}


async def test_a_file_that_cannot_be_read_for_a_while_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """Nothing about the file changes when the process has file descriptors again."""
    read, refuse, tries = Path.read_text, True, 0

    def exhausted(*arguments: Any, **more: Any) -> bytes:
        nonlocal tries
        tries += refuse
        if refuse:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(*arguments, **more)

    told: list[bool] = []
    book = PolicyLoader(put(tmp_path, default="{}"), {}, report=told.append)
    monkeypatch.setattr(Path, "read_text", exhausted)
    async with watched(book, clock) as watch:
        put(tmp_path, default="tenant: later")
        await watch.look(6)
        assert tries >= 3
        assert repr(book.current) == "Policies(default)"
        refuse = False
        await watch.becomes("later")
    assert told == [False, True]
    assert caplog.text.count("cannot be read: Too many open files") == 1


async def test_sighup_takes_the_directory_at_once(tmp_path: Path, clock: Clock) -> None:
    book = PolicyLoader(put(tmp_path, default="{}"), {})
    async with watched(book, clock):
        put(tmp_path, default="tenant: now")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: repr(book.current) == "Policies(now)")
