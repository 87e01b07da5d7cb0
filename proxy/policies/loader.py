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

import msgspec

from proxy.errors import PolicyError, UnreadablePolicy
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
        """Return every policy, the default first."""
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
    """Return the policy of a file that says nothing."""
    return parse("{}", "built-in", "default", {}, base_url).policy


def load(directory: pathlib.Path, environment: Mapping[str, str], base_url: str | None = None) -> Policies:
    """Load every `*.yaml` in `directory`. `base_url` is used if a file has none.

    Raises PolicyError with a line for each bad file; UnreadablePolicy if one of them cannot be read.
    """
    sources, faults, kind = [], list[str](), PolicyError
    for path in _files(directory):
        try:
            sources.append(parse(_text(path), str(path), path.stem, environment, base_url))
        except PolicyError as error:
            faults.append(str(error))
            kind = UnreadablePolicy if isinstance(error, UnreadablePolicy) else kind
    faults = faults or list(_collisions(sources))
    if faults:
        raise kind("\n".join(faults))
    return Policies(
        default=next((source.policy for source in sources if source.is_default), None),
        named=tuple(source.policy for source in sources if not source.is_default),
        by_digest={digest: source.policy for source in sources for digest, _ in source.keys},
        warnings=tuple(warning for source in sources for warning in source.warnings),
    )


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
        self._seen: object = None
        self.last: tuple[float, str] | None = None
        """When the last reload was, in seconds since the epoch, and why it failed; empty if it did not."""
        self.current = self._load()

    def reload(self) -> bool:
        """Load the directory again. If it is bad, keep the old policies, log the reason, and return False."""
        try:
            self.current = self._load()
        except PolicyError as error:
            if isinstance(error, UnreadablePolicy):
                self._seen = None  # read it at every look: the reason may pass without a change of the file
            return self._failed(error)
        except Exception as error:
            # A bug in reading one version must not stop the watch for the next.
            logger.exception("a bug, in reading the policies")
            return self._failed(error)
        self.last = time.time(), ""
        self._told(True)
        logger.info("policies in force: %s", ", ".join(policy.tenant for policy in self.current.all()))
        return True

    async def watch(self) -> None:
        """Reload after every change, on SIGHUP, and where something could not be read, until cancelled."""
        hangup = asyncio.Event()
        with _on_hangup(hangup.set):
            before = self._seen
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL):
                        await hangup.wait()
                now = await asyncio.get_running_loop().run_in_executor(None, _signature, self._directory)
                # Wait until nothing changes between two looks, because a half-written file is not an error.
                if hangup.is_set() or (now == before and now != self._seen):
                    hangup.clear()
                    await asyncio.get_running_loop().run_in_executor(None, self.reload)
                before = now

    def _failed(self, error: Exception) -> bool:
        known = isinstance(error, UnreadablePolicy) and self.last is not None and self.last[1] == str(error)
        if not known:
            logger.error("policies not taken, the old ones stay in force: %s", error)
            self._told(False)
        self.last = time.time(), str(error)
        return False

    def _load(self) -> Policies:
        # Take this before reading, so that the next look notices a change made during the reading.
        self._seen = _signature(self._directory)
        if self._directory is None:
            return builtin(self._base_url)
        policies = load(self._directory, self._environment, self._base_url)
        for warning in policies.warnings:
            logger.warning("%s", warning)
        return policies


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    try:
        paths = _visible(directory)
    except OSError as error:
        raise UnreadablePolicy(f"{directory}: expected a directory of policies: {error.strerror}") from error
    if odd := next((path for path in paths if path.suffix == ".yml"), None):
        raise PolicyError(f"{odd}: only *.yaml is read; name it {odd.stem}.yaml")
    found = [path for path in paths if path.suffix == ".yaml"]
    if not found:
        raise PolicyError(f"{directory}: expected at least one policy, such as default.yaml")
    return found


def _visible(directory: pathlib.Path) -> list[pathlib.Path]:
    """Return all but hidden files: editors' locks and, in a mounted ConfigMap, the directories that links point to."""
    return sorted(path for path in directory.iterdir() if not path.name.startswith("."))


def _text(path: pathlib.Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise UnreadablePolicy(f"{path}: cannot be read: Not a regular file")
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise UnreadablePolicy(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: expected text in UTF-8") from error


def _collisions(sources: Sequence[PolicySource]) -> Iterator[str]:
    """Yield an error for each tenant or key that two places name."""
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


def _signature(directory: pathlib.Path | None) -> object:
    """Return a value that changes when a policy does. It follows links, so it notices a swapped link of a ConfigMap."""
    try:
        paths = _visible(directory) if directory else []
    except OSError:
        return None
    return [(path.name, _stamp(path)) for path in paths if path.suffix in (".yaml", ".yml")]


def _stamp(path: pathlib.Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


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
