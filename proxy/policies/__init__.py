"""Loads all of policies/*.yaml or none of it, says what is wrong or contradicts itself, and reloads
when files change.

A rule's sections are overlaid when the file is loaded, so that a bad rule fails then and not at a
later request.
"""

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
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from proxy.errors import PolicyError
from proxy.plan.plan import CEILING_SHARE, Room
from proxy.plan.prices import ASSUMED, price_of
from proxy.plan.texts import ResultRole, ResultRule
from proxy.policies.format import Document, Path, PolicyFile, duration, explained, reference, schema
from proxy.policies.tenants import CALLER, Policies
from proxy.policy import (
    LISTED,
    PROFILES,
    ArchiveUse,
    Inject,
    Mode,
    Offload,
    Policy,
    Profile,
    Sections,
    Tools,
    Upstream,
)

__all__ = ["Policies", "duration", "reference", "schema"]

logger = logging.getLogger(__name__)

INTERVAL = 0.5
"""Seconds between two looks at the directory. A change takes effect at the second look, within the
promised 2 s."""

BUILT_IN: Mapping[str, str] = {"default": "{}"}
"""One policy for everybody, with all defaults and the client's own key."""

_OF_THE_ADDRESS = frozenset(("api_key", "context_window"))
"""Keys of an upstream that another address must not get."""

_convert = partial(msgspec.convert, strict=False)
"""Takes a number that is written as text, as that of an environment variable is."""

_SUMMARISING = (Mode.COMPRESS, Mode.AUTO, Mode.OBSERVE)

_MANY_RECENT = 20
"""Messages that stay, of which a few with large results fill any ceiling."""


# -- one file --


class PolicySource(msgspec.Struct, frozen=True):
    """One policy file. `keys` has the SHA-256 of each API key and its path in the file."""

    document: Document
    policy: Policy
    keys: tuple[tuple[bytes, Path], ...]
    is_default: bool
    warnings: tuple[str, ...] = ()
    """What is written there without an effect, each with its line."""


def parse(
    text: str,
    name: str,
    stem: str,
    environment: Mapping[str, str],
    base_url: str | None = None,
    *,
    alone: bool = False,
) -> PolicySource:
    """Parse one file's text. `name` is used in errors. `stem` is the file's name without `.yaml`.

    `base_url` is used if the file has none. An `alone` policy is not served: it needs no callers,
    and their keys do not matter. Raises PolicyError, which names the file, the line, the key and
    what was expected there.
    """
    document = Document(text, name, environment)
    is_default = stem == "default"
    value = document.value
    if isinstance(value, dict):
        value = overlay(
            {"tenant": stem, "upstream": {"base_url": base_url} if base_url else {}}, value
        )
    try:
        written = _convert(value, PolicyFile)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise document.error(*explained(str(error))) from error
    bare = Policy(
        **{name: getattr(written, name) for name in Sections.__struct_fields__},
        tenant=written.tenant or stem,
        retention=None if written.retention is None else duration(written.retention),
    )
    # All parts are validated, and so are their overlays.
    by_api = {api: _ruled(bare, value, own) for api, own in value.get("upstreams", {}).items()}
    policy = replace(_ruled(bare, value, {}), by_api=by_api)

    callers = () if alone else _caller_faults(written, policy, is_default=is_default)
    for path, fault in (*callers, *_section_faults(policy)):
        raise document.error(path, fault)
    if alone:
        return PolicySource(document, policy, (), is_default)
    keys = tuple(_keys(document, written, environment))
    warnings = tuple(
        str(document.error(path, reason)) for path, reason in _contradictions(value, policy)
    )
    return PolicySource(document, policy, keys, is_default, warnings)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` overridden by `above`. Mappings merge key by key, and any other value is
    replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = overlay(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _ruled(policy: Policy, value: Mapping[str, Any], own: Mapping[str, Any]) -> Policy:
    """Return the policy with what is written, and with its rules. `own` is what differs in one
    API's upstream."""

    def without_address(upstream: Mapping[str, Any]) -> dict[str, Any]:
        return {key: given for key, given in upstream.items() if key not in _OF_THE_ADDRESS}

    shared = value.get("upstream", {})
    upstream = overlay(without_address(shared) if "base_url" in own else shared, own)
    elsewhere = without_address(upstream) | {
        key: shared[key] for key in _OF_THE_ADDRESS & shared.keys()
    }
    rules = []
    for rule in value.get("rules", ()):
        below = elsewhere if "base_url" in rule.get("upstream", {}) else upstream
        rules.append(_with(policy, overlay({**value, "upstream": below}, rule), rule["model"]))
    return replace(_with(policy, {**value, "upstream": upstream}), rules=tuple(rules))


def _with(policy: Policy, value: Mapping[str, Any], model: str = "") -> Policy:
    """Return the policy with these sections, and with what their profile and upstream set where
    they say nothing."""
    upstream = _convert(value.get("upstream", {}), Upstream)
    offload = value.get("offload", {})
    known = price_of(upstream.base_url)
    chosen, tools = PROFILES[offload.get("profile", Profile.BALANCED)]
    prices = {"cached_read": known.cached_read, "cache_write": known.cache_write}
    return replace(
        policy,
        model=model,
        upstream=upstream,
        offload=_convert({**prices, **chosen, **offload}, Offload),
        tools=_convert({**tools, **value.get("tools", {})}, Tools),
        listed=LISTED.difference(key for key, said in offload.items() if said is not None),
    )


def _keys(
    document: Document, written: PolicyFile, environment: Mapping[str, str]
) -> Iterator[tuple[bytes, Path]]:
    for index, key in enumerate(written.api_keys):
        path: Path = ("api_keys", index)
        if (key.sha256 is None) == (key.env is None):
            raise document.error(path, "expected either `sha256` or `env`")
        if key.env is None:
            yield bytes.fromhex(key.sha256 or ""), path
            continue
        given = environment.get(key.env)
        if given is None:
            raise document.error((*path, "env"), f"the environment variable {key.env} is not set")
        if not given or given != given.strip():
            text = f"the environment variable {key.env} is empty or has white space at its ends"
            raise document.error((*path, "env"), text)
        yield hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest(), path


# -- what is valid by itself but not together --

_Said = tuple[Path, str]
"""The path of a key, and what is to be said about it."""


def _parts(policy: Policy) -> Iterator[tuple[Path, Policy]]:
    """Yield everything that has the sections of a policy, with its path."""
    yield (), policy
    for index, rule in enumerate(policy.rules):
        yield ("rules", index), rule


def _caller_faults(written: PolicyFile, policy: Policy, *, is_default: bool) -> Iterator[_Said]:
    """Yield what is wrong in who may use the policy, and with whose key."""
    by = policy.identity
    lends = is_default and any(upstream.api_key for upstream in policy.upstreams)
    faults: list[tuple[object, Path, str]] = [
        (CALLER.search(policy.tenant), ("tenant",),
         "a name that ends like this could be taken for one caller of another tenant"),
        (is_default and written.api_keys, ("api_keys",),
         "default.yaml is for callers without a file of their own; give these keys a file"),
        (not is_default and not written.api_keys, (),
         "expected `api_keys`: without any, nobody can be this tenant (only default.yaml has none)"),
        (not is_default and written.open, ("open",), "only default.yaml can be open to strangers"),
        (sum(map(bool, (by.header, by.jwt, by.body))) > 1, ("identity",), "expected one of `header`, `jwt` and `body`"),
        (by.given and policy.share_namespace, ("identity",),
         "contradicts `share_namespace`, with which all keys are one client"),
        (by.given and lends, ("identity",),
         "only upstream could tell that these callers are who they say, and it gets the policy's key; list their keys "
         "in a file of their own"),
    ]  # fmt: skip
    upstreams = [((*path, "upstream"), part.upstream) for path, part in _parts(policy)]
    upstreams += [(("upstreams", api), own.upstream) for api, own in policy.by_api.items()]
    text = (
        "every stranger could use this key; expected `open: true` at the top level if that is meant"
    )
    lent = lends and not written.open
    faults += [
        (lent and upstream.api_key, (*path, "api_key"), text) for path, upstream in upstreams
    ]
    yield from ((path, text) for wrong, path, text in faults if wrong)


def _section_faults(policy: Policy) -> Iterator[_Said]:
    """Yield what is wrong in the sections for each API and model."""
    for path, part in (found for one in (policy, *policy.by_api.values()) for found in _parts(one)):
        offload = part.offload
        window = part.upstream.context_window
        place = (*path, "offload")
        if offload.cache_write < offload.cached_read:
            yield (
                (*place, "cache_write"),
                "expected at least `cached_read`: no cache is cheaper to write than read",
            )
        for index, rule in enumerate(offload.results):
            if isinstance(rule, ResultRule) and rule.role is ResultRole.USER and not rule.prefix:
                text = "expected a `prefix`: without one, all that users say is results"
                yield (*place, "results", index), text
        if (
            window is not None
            and offload.compress.snapshot_tokens >= window
            and offload.mode in _SUMMARISING
        ):
            text = f"expected less than `upstream.context_window` ({window} tokens), as the snapshot has to fit in"
            yield (*place, "compress", "snapshot_tokens"), text


def _contradictions(value: Mapping[str, Any], policy: Policy) -> Iterator[_Said]:
    """Yield the path of a written key for each pair that cannot both mean what they say, and what
    happens instead.

    `value` has the sections as they are written. Whoever switches the mode off for a while keeps
    the rest.
    """

    def at(sections: Any, key: str) -> Any:
        for name in key.split("."):
            sections = sections.get(name) if isinstance(sections, Mapping) else None
        return sections

    said = set[str]()
    rules = value.get("rules", ())
    parts = [*zip(_parts(policy), (value, *rules), strict=True)]
    for api, own in value.get("upstreams", {}).items():
        parts.append(((("upstreams", api), policy.by_api[api]), {"upstream": own}))
        parts += [
            ((("rules", index), rule), rules[index])
            for index, rule in enumerate(policy.by_api[api].rules)
        ]
    for (path, part), written in parts:
        for key, other, holds, text in _pairs(part) if part.offload.mode is not Mode.OFF else ():
            keys = [one for one in (key, other) if one]
            place = next((one for one in keys if at(written, one) is not None), None)
            inherited = bool(other) and any(at(value, one) is not None for one in keys)
            first = attrgetter(key)(part)
            number = isinstance(first, int | float) and not isinstance(first, bool)
            shown = f" ({first:,g})" if number else f" ({first})" * isinstance(first, str)
            warning = f"`{key.rpartition('.')[2]}`{shown} {text}"
            if holds and (place or inherited) and warning not in said:
                said.add(warning)
                place = (
                    (place or "").removeprefix("upstream.") if path[:1] == ("upstreams",) else place
                )
                yield (*path, *(place.split(".") if place else ())), warning
    for index, rule in enumerate(policy.rules):
        if before := policy.shadowing(index):
            yield (
                ("rules", index, "model"),
                f"`{rule.model}` is for no model: `{before}` comes first and matches all",
            )


def _pairs(part: Policy) -> list[tuple[str, str, bool, str]]:
    """Return a key, another one that it may be written about instead, when something is to be said,
    and what.

    With another one, or the key once more, it is also said of a rule or an API that only inherits
    the key.
    """
    offload = part.offload
    mode = offload.mode
    window = part.upstream.context_window or 0
    ceiling = Room(window or None).ceiling(offload.max_total_tokens)
    upstream = "upstream.context_window"
    most = "offload.max_total_tokens"
    snapshot = offload.compress.snapshot_tokens
    read = "tools.max_retrieved_tokens"
    pinned = "offload.pin_user_tokens"
    free = offload.cached_read == 0
    unpriced = price_of(part.upstream.base_url) is ASSUMED
    return [
        (most, upstream, ceiling < offload.max_total_tokens,
         f"is more than {CEILING_SHARE:.0%} of `context_window` ({window:,}): history moves above {ceiling:,} tokens"),
        ("offload.max_tool_message_tokens", most,
         mode is not Mode.COMPRESS and offload.max_tool_message_tokens >= ceiling,
         f"is not below the ceiling ({ceiling:,}): history can exceed it without a result that may move"),
        ("offload.keep_recent_count", "", (offload.keep_recent_count or 0) >= _MANY_RECENT,
         f"leaves the newest messages alone: history stays above {ceiling:,} where these exceed it"),
        ("offload.exclude_tools", "", "*" in offload.exclude_tools,
         "names every tool: no result ever moves"),
        ("offload.holdout", "", offload.holdout == 1, "leaves every conversation as it comes"),
        ("offload.verify", "", bool(offload.verify) and offload.input_price is None and unpriced,
         "asks nothing again: its cost is not known, for want of `input_price`"),
        ("offload.verify_budget", "", bool(offload.verify) and not offload.verify_budget,
         "leaves nothing to `verify`"),
        ("tools.archive", "", part.tools.archive is ArchiveUse.SEARCH and not part.store_originals,
         "finds nothing: without `store_originals`, no text is kept for later conversations"),
        ("store_originals", "", not part.store_originals,
         "(false) leaves compaction that clients ask for to upstream, and nothing to read back of what a client "
         "itself left out of its history"),
        ("tools.inject", "", part.tools.inject is Inject.NEVER, "leaves references that the model cannot follow"),
        (read, read, 0 < window // 2 < part.tools.max_retrieved_tokens,
         f"is more than half of `context_window` ({window:,}): one turn's reading can fill it"),
        ("offload.keep_views", "", mode is Mode.COMPRESS,
         "has no effect in the mode compress, where results do not move by themselves"),
        ("offload.keep_views", "", mode is not Mode.COMPRESS and free,
         f"has no effect where cached input is free: history moves above `max_total_tokens` ({ceiling:,})"),
        ("offload.compact_ratio_threshold", "", mode in (Mode.COMPACT, Mode.COMPRESS),
         f"has no effect in the mode {mode}, only in auto"),
        ("offload.compress", "", mode is Mode.COMPACT,
         "has no effect in the mode compact, which summarises nothing"),
        ("offload.compress.snapshot_tokens", most, mode is not Mode.COMPACT and snapshot > ceiling // 2,
         f"takes more than half of the ceiling ({ceiling:,}): summaries free little"),
        (pinned, pinned, mode is not Mode.COMPACT and offload.pin_user_tokens > ceiling,
         f"is above the ceiling ({ceiling:,}): the user's messages alone can keep history above it"),
    ]  # fmt: skip


# -- all files --


def defaults(profile: Profile = Profile.BALANCED) -> Policy:
    return parse(f"offload: {{profile: {profile}}}", "built-in", "default", {}).policy


def load(
    directory: pathlib.Path | None,
    environment: Mapping[str, str],
    base_url: str | None = None,
    built_in: Mapping[str, str] = BUILT_IN,
) -> Policies:
    """Load every `*.yaml` in `directory`, or without one what is built in. `base_url` is used if a
    file has none.

    Raises PolicyError with a line for each bad file.
    """
    return _parsed(_read(directory, built_in), environment, base_url)


def load_alone(path: pathlib.Path, environment: Mapping[str, str]) -> Policy:
    """Load one file as a policy that is not served. Raises PolicyError."""
    return parse(_text(path), str(path), path.stem, environment, alone=True).policy


class PolicyLoader:
    """Holds the policies in force. A reload replaces `current` as a whole. Requests keep the set
    they began with."""

    def __init__(
        self,
        directory: pathlib.Path | None,
        environment: Mapping[str, str],
        base_url: str | None = None,
        report: Callable[[bool], None] = lambda taken: None,
        built_in: Mapping[str, str] = BUILT_IN,
    ) -> None:
        """Load the policies as `load` does. Raises PolicyError.

        `report` is called after every reload, in any thread, with whether the reload succeeded.
        """
        self._directory = directory
        self._environment = environment
        self._base_url = base_url
        self._built_in = built_in
        self._report = report
        self.last: tuple[float, str] | None = None
        """When the last reload was, in seconds since the epoch, and why it failed; empty if it did
        not."""
        self.current = self._load()

    def reload(self) -> bool:
        """Load the directory again. If it is bad, keep the old policies, log the reason, and return
        False."""
        fault = ""
        try:
            self.current = self._load()
            logger.info(
                "policies in force: %s", ", ".join(policy.tenant for policy in self.current.all())
            )
        except PolicyError as error:
            fault = str(error)
        except Exception as error:
            # A bug in reading one version must not stop the watch for the next.
            logger.exception("a bug, in reading the policies")
            fault = repr(error)
        if fault:
            logger.error("policies not reloaded, the previous ones stay in force: %s", fault)
        self.last = time.time(), fault
        self._report(not fault)
        return not fault

    async def watch(self) -> None:
        """Reload after every change and on SIGHUP, until cancelled."""
        hangup = asyncio.Event()
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGHUP, hangup.set)
        before = self._files
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL):
                    await hangup.wait()
            now = await loop.run_in_executor(None, _read, self._directory, self._built_in)
            # Wait until nothing changes between two looks, because a half-written file is not an
            # error.
            if hangup.is_set() or (now == before and now != self._files):
                hangup.clear()
                await loop.run_in_executor(None, self.reload)
            before = now

    def _load(self) -> Policies:
        self._files = _read(self._directory, self._built_in)
        policies = _parsed(self._files, self._environment, self._base_url)
        for warning in policies.warnings:
            logger.warning("%s", warning)
        return policies


class _Files(NamedTuple):
    """The texts of a directory's policies, and why others cannot be read, which may pass without a
    change of theirs."""

    texts: Mapping[pathlib.Path, str]
    faults: Sequence[str]


def _read(directory: pathlib.Path | None, built_in: Mapping[str, str]) -> _Files:
    """Read the policies; hidden files are editors' locks and, in a mounted ConfigMap, what the
    links point to."""
    if directory is None:
        return _Files(
            {pathlib.Path("built-in", f"{name}.yaml"): text for name, text in built_in.items()}, []
        )
    try:
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError as error:
        return _Files({}, [f"{directory}: expected a directory of policies: {error.strerror}"])
    texts = dict[pathlib.Path, str]()
    faults = list[str]()
    for path in paths:
        if path.suffix == ".yml":
            faults.append(f"{path}: only *.yaml is read; name it {path.stem}.yaml")
        if path.suffix == ".yaml":
            try:
                texts[path] = _text(path)
            except PolicyError as error:
                faults.append(str(error))
    if not texts and not faults:
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
    sources = list[PolicySource]()
    faults = [*files.faults]
    for path, text in files.texts.items():
        try:
            sources.append(parse(text, str(path), path.stem, environment, base_url))
        except PolicyError as error:
            faults.append(str(error))
    if not faults:
        tenants = dict[str, str]()
        keys = dict[bytes, str]()
        for source in sources:
            name = source.document.name
            tenant = source.policy.tenant
            if tenants.setdefault(tenant, name) != name:
                said = f"{tenant} is the tenant of {tenants[tenant]} already"
                faults.append(str(source.document.error(("tenant",), said)))
            for digest, place in source.keys:
                if digest in keys:
                    faults.append(
                        str(source.document.error(place, f"the same key as {keys[digest]}"))
                    )
                keys.setdefault(digest, source.document.place(place))
    if faults:
        raise PolicyError("\n".join(faults))
    return Policies(
        default=next((source.policy for source in sources if source.is_default), None),
        named=tuple(source.policy for source in sources if not source.is_default),
        by_digest={digest: source.policy for source in sources for digest, _ in source.keys},
        warnings=tuple(warning for source in sources for warning in source.warnings),
    )
