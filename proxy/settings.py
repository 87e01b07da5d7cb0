"""Reads flags and environment into the frozen `Settings` of the process. Only this module reads the
environment.

A setting comes from its flag (`--body-limit`), else its variable (`OFFLOAD_BODY_LIMIT`), else its
default. `--upstream` is also read from OPENAI_BASE_URL. The admin token has only a variable,
because `ps` shows flags.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from hashlib import sha256
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from proxy.errors import UserMistake
from proxy.plan.prices import is_loopback
from proxy.policy import BASE_URL, Profile, Seconds, says

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}

_SECONDS = "seconds above 0, at most a day"
_ADDRESS = "an address such as https://api.openai.com/v1"
ANTHROPIC = "https://api.anthropic.com"
HostName = Annotated[str, Meta(pattern=r"^[^\s/:@,]+\Z|^[0-9a-f:.]+\Z")]
Url = Annotated[str, Meta(pattern=BASE_URL)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the process. Times are in seconds, sizes in bytes.

    A description says what is expected, and then what it is for. Those that have one are flags of
    `serve`.
    """

    host: Annotated[
        str, says("a host name or an address, such as 127.0.0.1, which is the default")
    ] = "127.0.0.1"
    port: Annotated[int, says("a port from 1 to 65535, or 0 for any free one", ge=0, le=65_535)] = (
        8787
    )
    policies: Annotated[
        Path | None, says("a directory of policies, one YAML file for each tenant")
    ] = None
    profile: Annotated[
        Profile | None, says("careful, balanced or frugal, for the built-in policy")
    ] = None
    store: Annotated[str, says("a URL or a directory for records; else below ~/.local/state")] = (
        "offload-store"
    )
    upstream: Annotated[
        Url | None,
        says(
            f"{_ADDRESS} without user and password, for policies without one; also OPENAI_BASE_URL"
        ),
    ] = None
    workers: Annotated[int, says("a number of processes from 1 to 256", ge=1, le=256)] = 1
    body_limit: Annotated[
        int,
        says(
            "a size of at least 1KiB, such as 64MiB, for a chat request's decoded body", ge=1 << 10
        ),
    ] = 64 << 20
    buffered_limit: Annotated[
        int,
        says("a size of at least 2KiB, such as 512MiB, for all bodies in a process", ge=2 << 10),
    ] = 512 << 20
    """Undecoded. One tenant may have half of it."""
    head_timeout: Annotated[Seconds, says(f"{_SECONDS}, for a request's head to arrive")] = 10
    body_timeout: Annotated[Seconds, says(f"{_SECONDS}, for a pause in a request's body")] = 30
    first_byte_timeout: Annotated[Seconds, says(f"{_SECONDS}, until upstream's first byte")] = 600
    drain_timeout: Annotated[Seconds, says(f"{_SECONDS}, for requests to finish after SIGTERM")] = (
        30
    )
    max_connections: Annotated[
        int,
        says("a number above 0 of connections to upstreams, for each process", ge=1, le=1_000_000),
    ] = 1_000
    allowed_hosts: Annotated[
        frozenset[HostName],
        says(
            "host names without ports, with commas between, that browsers may use besides loopback's"
        ),
    ] = frozenset()
    monitor_networks: Annotated[
        tuple[str, ...],
        says(
            "addresses or networks such as 10.0.0.0/8, with commas between, that may read /metrics"
        ),
    ] = ()
    """Without the token, and deep health, too."""
    capture: Annotated[
        int,
        says("a size of at least 1MiB, such as 1GiB, for requests of tenants with `capture: true`"),
    ] = 0
    """In the store; the oldest go. 0: none are captured."""
    dashboard: Annotated[
        Path | None,
        says(
            "a file for the rows of the pages at /_offload/, or off; on loopback one below ~/.local/state"
        ),
    ] = None
    dashboard_named: bool = False
    """Whether that file was named, or the dashboard turned off."""
    dashboard_limit: Annotated[
        int,
        says(
            "a size of at least 16MiB, such as 1GiB, for that file; the oldest rows go", ge=16 << 20
        ),
    ] = 512 << 20
    dashboard_content: Annotated[
        bool, says("true or false: keep texts, of tenants with `dashboard_content: true`")
    ] = False
    replica_url: Annotated[
        Url | None,
        says("an address such as http://10.0.0.7:8787, for links to this replica's dashboard"),
    ] = None
    log_format: Annotated[
        Literal["json", "full", "short"], says("json, full or short; short on a terminal")
    ] = "json"
    admin_token: Annotated[str, Meta(pattern=r"^[ -~]+\Z")] | None = None
    """What the operator logs in with, and what metrics and deep health ask for."""
    environment: Mapping[str, str] = {}
    """All variables, for `${NAME}` and `env:` in policies."""
    state: Path | None = None
    """Our folder in the user's state directory; None if the user has none."""
    below: str = ""
    """A path, such as `/secret`. Callers are served only below it; empty: everywhere."""
    built_in: Mapping[str, str] = msgspec.field(default_factory=lambda: {"default": "{}"})
    """The policies where there is no directory of them, as YAML, by the names that their files
    would have."""

    def __repr__(self) -> str:
        """Leaves out what may be secret: the store's URL can have a password, and the environment
        has keys."""
        return f"Settings(host={self.host!r}, port={self.port}, policies={str(self.policies)!r})"


def read(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags, and from the environment where a flag is None. The default environment
    is the process's.

    Empty variables do not count: compose files set them. Secrets made of files end with a line
    feed, which does not count either. Raises UserMistake, which names the flag or variable and what
    was expected.
    """
    environment = dict(os.environ if environment is None else environment)
    home = environment.get("HOME")
    # The user's state directory (XDG Base Directory), so that `store ls` finds the records of
    # `serve`, wherever either is started. A relative path counts for nothing there.
    named = environment.get("XDG_STATE_HOME", "")
    state = named if os.path.isabs(named) else home and os.path.join(home, ".local", "state")
    given: dict[str, Any] = {"environment": environment}
    if state:
        given["state"] = Path(state, "offload-proxy")
        given["store"] = os.path.join(state, "offload-proxy", "store")
    for field in msgspec.structs.fields(Settings):
        name = field.name
        flag = flags.get(name)
        # A flag without a value is another command's: `replay --profile` compares all of them.
        sources = {_flag(name): flag if isinstance(flag, str) else None} | {
            one: environment.get(one, "").strip() or None for one in _variables(name)
        }
        source, text = next(
            ((source, text) for source, text in sources.items() if text is not None), ("", None)
        )
        if text is None:
            continue
        try:
            plain = _PLAIN.get(name, str)(text)
            given[name] = msgspec.convert(
                plain, field.type, strict=False, dec_hook=lambda kind, value: kind(value)
            )
        except (ValueError, msgspec.ValidationError) as error:
            expected = _expected(field) or "printable ASCII"  # of the token, which is no flag
            fault = _fault(text) if field.name in ("upstream", "replica_url") else ""
            raise UserMistake(f"{source}: {fault}expected {expected}") from error
    settings = Settings(**given, dashboard_named="dashboard" in given)
    if settings.profile and settings.policies:
        raise UserMistake(
            "--profile is for the built-in policy: write `offload: {profile: …}` into yours"
        )
    if not settings.dashboard_named and settings.state and is_loopback(settings.host):
        about = settings.policies.resolve() if settings.policies else settings.upstream
        rows = rows_file(settings.state, "serve", str(about))
        settings = msgspec.structs.replace(settings, dashboard=rows)
    if not settings.policies:
        built_in = policy(settings.upstream, settings.profile)
        settings = msgspec.structs.replace(settings, built_in={"default": built_in})
    if settings.buffered_limit < 2 * settings.body_limit:
        raise UserMistake(
            f"a tenant may have half of --buffered-limit, which is less than one body of --body-limit "
            f"({settings.body_limit} bytes): raise the first to {2 * settings.body_limit}, or lower the second"
        )
    return settings


ROWS = "dashboard-*.db"
"""The names of dashboards' files in our folder."""


def rows_file(state: Path, *about: str) -> Path:
    """Return the dashboard's file of all proxies about which the same is said. So proxies in front
    of different upstreams do not mix their sums."""
    said = " ".join(about).encode("utf-8", "surrogatepass")  # a path need not be UTF-8
    return state / ROWS.replace("*", sha256(said).hexdigest()[:8])


_ENDPOINT = re.compile(r"(/chat)?/(completions|responses|messages|embeddings)/?$")


def _fault(url: str) -> str:
    """Say what is wrong with an address, if it is one of two usual mistakes."""
    if found := _ENDPOINT.search(url):
        return f"leave out {found[0]}; "
    if re.match(r"[\w.-]+(:\d+)?(/|\Z)", url) and re.search(r"[.:]|^localhost", url):
        return f"{url} has no http:// before it; "
    return ""


def policy(base_url: str | None, profile: Profile | None, **sections: object) -> str:
    """Return a policy as text. Without a `base_url`, each API has its own upstream."""
    apis = {} if base_url else {"upstreams": {"messages": {"base_url": ANTHROPIC}}}
    return msgspec.json.encode(
        {"offload": {"profile": profile or Profile.BALANCED}, **apis, **sections}
    ).decode()


def flags() -> Iterator[tuple[str, str]]:
    """Yield each flag of `serve`, and what it says: what is expected, what that is for, and the
    default."""
    for field in msgspec.structs.fields(Settings):
        if expected := _expected(field):
            number = field.default if isinstance(field.default, int | float) else 0
            default = (
                f"{number >> 20}MiB" if isinstance(number, int) and number >= 1 << 20 else number
            )
            yield _flag(field.name), expected + (f" [{default}]" if default else "")


def _expected(field: msgspec.structs.FieldInfo) -> str:
    metas = getattr(field.type, "__metadata__", ())
    return next((meta.description for meta in metas if meta.description), "")


def strange_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that look like settings and are none, each with the one that was probably
    meant, or "".

    Kubernetes sets some for each service: a service called `offload-proxy` makes
    OFFLOAD_PROXY_PORT.
    """
    known = {name for field in msgspec.structs.fields(Settings) for name in _variables(field.name)}
    for name in sorted(environment):
        if name.startswith("OFFLOAD_") and name not in known and not _OTHERS.search(name):
            yield name, next(iter(get_close_matches(name, known, 1, 0.75)), "")


_OTHERS = re.compile(r"^OFFLOAD_(API_KEY|PROXY_PORT)$|_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")
"""Those of Kubernetes, and that of `offload-proxy recall`."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variables(name: str) -> tuple[str, ...]:
    if name in ("environment", "state", "below", "built_in", "dashboard_named"):
        return ()
    return ("OFFLOAD_" + name.upper(), *(("OPENAI_BASE_URL",) if name == "upstream" else ()))


def _bytes(text: str) -> int:
    """`64MiB`, `64M` or plain bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+)\s*(?:([kmg])(?:i?b)?)?", text.lower())
    if not found:
        raise ValueError(text)
    return int(found[1]) << _UNITS[found[2] or ""]


def _room(text: str) -> int:
    size = _bytes(text)
    if size < 1 << 20:
        raise ValueError(text)
    return size


def _names(text: str) -> list[str]:
    """Host names in lower case, without a trailing dot or an IPv6 address's brackets."""
    return [
        name.strip().lower().removesuffix(".").strip("[]")
        for name in text.split(",")
        if name.strip()
    ]


def _networks(text: str) -> list[str]:
    return [str(ip_network(name.strip(), strict=False)) for name in text.split(",") if name.strip()]


def _filled(text: str) -> str:
    """The text. Raises ValueError if it is empty: `--host "$HOST"` must not listen on all addresses
    without HOST."""
    if not text.strip():
        raise ValueError(text)
    return text


def _path(text: str) -> str:
    """A path with the home directory in place of `~`. Raises ValueError if it is empty, as that
    means `.` otherwise."""
    return os.path.expanduser(_filled(text))


def _rows(text: str) -> str | None:
    """The path of the dashboard's file; None if it is off."""
    return None if text.lower() == "off" else _path(text)


_PLAIN: Mapping[str, Callable[[str], object]] = {
    "allowed_hosts": _names,
    "body_limit": _bytes,
    "buffered_limit": _bytes,
    "capture": _room,
    "dashboard": _rows,
    "dashboard_limit": _bytes,
    "host": lambda text: _filled(text.strip("[]")),
    "monitor_networks": _networks,
    "policies": _path,
    "store": _path,
}
"""Parsers of settings whose text msgspec cannot convert itself."""


def refuse_loop(settings: Settings) -> None:
    """Raise UserMistake if upstream is this proxy: OPENAI_BASE_URL, which we read, may point agents
    at it."""
    if settings.upstream is None:
        return
    try:
        url = urlsplit(settings.upstream)
    except ValueError as error:
        raise UserMistake(f"the upstream {settings.upstream}: {error}") from error
    here = {settings.host, "localhost", "127.0.0.1", "::1", "0.0.0.0"}
    if url.hostname in here and url.port == settings.port:
        raise UserMistake(
            f"the upstream {settings.upstream} is this proxy itself: give --upstream, or unset OPENAI_BASE_URL"
        )
