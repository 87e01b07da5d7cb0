"""Loads all policies of a directory or none of them, and reloads them when they change."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from proxy.errors import PolicyError
from proxy.policies.file import PolicySource, parse
from proxy.policy import Policy

INTERVAL = 0.5
"""Seconds between two looks at the directory. A change takes effect at the second look, within the promised 2 s."""

logger = logging.getLogger(__name__)


class Policies(msgspec.Struct, frozen=True):
    """One set of policies. `default` applies to keys that no file names. If it is None, they are refused."""

    default: Policy | None
    named: tuple[Policy, ...]
    by_digest: Mapping[bytes, Policy]
    """Policies by the SHA-256 of the client's key."""
    warnings: tuple[str, ...] = ()
    """What is written in the files without an effect, each with its file and line."""

    def __repr__(self) -> str:
        return f"Policies({', '.join(policy.tenant for policy in self.all())})"

    def all(self) -> tuple[Policy, ...]:
        return self.named if self.default is None else (self.default, *self.named)

    def tenant_for_key(self, key: bytes | None) -> Policy | None:
        """Return the policy of this key, else the default policy. None means that the caller is refused."""
        if key is None:
            return self.default
        # A table lookup is safe without a constant-time comparison. Its timing can only reveal something about the
        # digest, which no caller can steer towards that of a key. And Python compares bytes only after a hash with a
        # random seed has matched.
        return self.by_digest.get(hashlib.sha256(key).digest(), self.default)


def builtin(base_url: str | None = None) -> Policies:
    """Return the policies used without a directory: one for everybody, with all defaults and the client's own key."""
    return Policies(default=defaults(base_url), named=(), by_digest={})


def defaults(base_url: str | None = None) -> Policy:
    return parse("{}", "built-in", "default", {}, base_url).policy


def load(directory: pathlib.Path | None, environment: Mapping[str, str], base_url: str | None = None) -> Policies:
    """Load every `*.yaml` in `directory`, or without one what is built in. `base_url` is used if a file has none.

    Raises PolicyError with a line for each bad file.
    """
    return _parsed(_read(directory), environment, base_url) if directory else builtin(base_url)


def load_alone(path: pathlib.Path, environment: Mapping[str, str]) -> Policy:
    """Load one file as a policy that is not served. Raises PolicyError."""
    return parse(_text(path), str(path), path.stem, environment, alone=True).policy


class PolicyLoader:
    """Holds the policies in force. A reload replaces `current` as a whole. Requests keep the set they began with."""

    def __init__(
        self,
        directory: pathlib.Path | None,
        environment: Mapping[str, str],
        base_url: str | None = None,
        told: Callable[[bool], None] = lambda taken: None,
    ) -> None:
        """Load the policies, or without a directory use `builtin`, which never changes. Raises PolicyError.

        `told` is called after every reload, in any thread, with whether the reload succeeded.
        """
        self._directory = directory
        self._environment = environment
        self._base_url = base_url
        self._told = told
        self._files = _Files({}, ())
        self.last: tuple[float, str] | None = None
        """When the last reload was, in seconds since the epoch, and why it failed; empty if it did not."""
        self.current = self._load()

    def reload(self) -> bool:
        """Load the directory again. If it is bad, keep the old policies, log the reason, and return False."""
        fault = ""
        try:
            self.current = self._load()
            logger.info("policies in force: %s", ", ".join(policy.tenant for policy in self.current.all()))
        except PolicyError as error:
            fault = str(error)
        except Exception as error:
            # A bug in reading one version must not stop the watch for the next.
            logger.exception("a bug, in reading the policies")
            fault = repr(error)
        if fault:
            logger.error("policies not taken, the old ones stay in force: %s", fault)
        self.last = time.time(), fault
        self._told(not fault)
        return not fault

    async def watch(self) -> None:
        """Reload after every change and on SIGHUP, until cancelled."""
        hangup, loop = asyncio.Event(), asyncio.get_running_loop()
        with _on_hangup(hangup.set):
            before = self._files
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL):
                        await hangup.wait()
                now = await loop.run_in_executor(None, _read, self._directory)
                # Wait until nothing changes between two looks, because a half-written file is not an error.
                if hangup.is_set() or (now == before and now != self._files):
                    hangup.clear()
                    await loop.run_in_executor(None, self.reload)
                before = now

    def _load(self) -> Policies:
        self._files = _read(self._directory)
        if self._directory is None:
            return builtin(self._base_url)
        policies = _parsed(self._files, self._environment, self._base_url)
        for warning in policies.warnings:
            logger.warning("%s", warning)
        return policies


class _Files(NamedTuple):
    """The texts of a directory's policies, and why others cannot be read, which may pass without a change of theirs."""

    texts: Mapping[pathlib.Path, str]
    faults: Sequence[str]


def _read(directory: pathlib.Path | None) -> _Files:
    """Read the policies; hidden files are editors' locks and, in a mounted ConfigMap, what the links point to."""
    try:
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith(".")) if directory else []
    except OSError as error:
        return _Files({}, [f"{directory}: expected a directory of policies: {error.strerror}"])
    texts, faults = dict[pathlib.Path, str](), list[str]()
    for path in paths:
        if path.suffix == ".yml":
            faults.append(f"{path}: only *.yaml is read; name it {path.stem}.yaml")
        if path.suffix == ".yaml":
            try:
                texts[path] = _text(path)
            except PolicyError as error:
                faults.append(str(error))
    if directory and not texts and not faults:
        faults.append(f"{directory}: expected at least one policy, such as default.yaml")
    return _Files(texts, faults)


def _text(path: pathlib.Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise PolicyError(f"{path}: cannot be read: Not a regular file")
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: expected text in UTF-8") from error


def _parsed(files: _Files, environment: Mapping[str, str], base_url: str | None) -> Policies:
    sources, faults = list[PolicySource](), [*files.faults]
    for path, text in files.texts.items():
        try:
            sources.append(parse(text, str(path), path.stem, environment, base_url))
        except PolicyError as error:
            faults.append(str(error))
    faults = faults or list(_collisions(sources))
    if faults:
        raise PolicyError("\n".join(faults))
    return Policies(
        default=next((source.policy for source in sources if source.is_default), None),
        named=tuple(source.policy for source in sources if not source.is_default),
        by_digest={digest: source.policy for source in sources for digest, _ in source.keys},
        warnings=tuple(warning for source in sources for warning in source.warnings),
    )


def _collisions(sources: Sequence[PolicySource]) -> Iterator[str]:
    tenants: dict[str, str] = {}
    keys: dict[bytes, str] = {}
    for source in sources:
        name, tenant = source.document.name, source.policy.tenant
        if tenants.setdefault(tenant, name) != name:
            yield str(source.document.error(("tenant",), f"{tenant} is the tenant of {tenants[tenant]} already"))
        for digest, path in source.keys:
            if digest in keys:
                yield str(source.document.error(path, f"the same key as {keys[digest]}"))
            keys.setdefault(digest, source.document.place(path))


@contextlib.contextmanager
def _on_hangup(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` on SIGHUP, if the system has that signal and this is the main thread."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
