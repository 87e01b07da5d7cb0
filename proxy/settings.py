"""Flags and environment → frozen `Settings`: what holds for the whole process. The only reader of the environment.

A setting comes from its flag (`--body-limit`), else from its variable (`OFFLOAD_BODY_LIMIT`), else from its default.
`--upstream` is also read from OPENAI_BASE_URL. The admin token has a variable only: a flag would show in `ps`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from proxy.core.policy import BASE_URL
from proxy.errors import UserMistake

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}

Seconds = Annotated[float, Meta(gt=0, le=86_400, description="seconds above 0, at most a day")]
HostName = Annotated[str, Meta(pattern=r"^[^\s/:@,]+\Z|^[0-9a-f:.]+\Z")]
Url = Annotated[str, Meta(pattern=BASE_URL)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the process was told at its start. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="a port from 1 to 65535, or 0 for any free one")] = 8787
    policies: Annotated[Path | None, Meta(description="a directory")] = None
    """The directory of policies; None: one built-in policy for everybody."""
    store: str = "offload-store"
    """A URL or a directory."""
    upstream: Annotated[Url | None, Meta(description="an address such as https://api.openai.com/v1")] = None
    """Where policies send what they have no `upstream.base_url` for; None: OpenAI."""
    workers: Annotated[int, Meta(ge=1, le=256, description="a number of processes from 1 to 256")] = 1
    body_limit: Annotated[int, Meta(ge=1, description="a size such as 64MiB")] = 64 << 20
    """Bytes of a request's body, decoded."""
    buffered_limit: Annotated[int, Meta(ge=2, description="a size such as 512MiB")] = 512 << 20
    """Bytes of all requests' bodies, as they came, in one process; half of them for one tenant."""
    head_timeout: Seconds = 10
    """For a request's head, from its first byte to its last."""
    body_timeout: Seconds = 30
    """That may pass without anything of a request's body."""
    first_byte_timeout: Seconds = 600
    drain_timeout: Seconds = 30
    log_format: Annotated[Literal["json", "text"], Meta(description="json or text")] = "json"
    admin_token: str | None = None
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000, description="a number above 0")] = 1_000
    """Connections to upstreams at once, of each worker process."""
    allowed_hosts: Annotated[frozenset[HostName], Meta(description="host names without ports, with commas between")] = (
        frozenset()
    )
    """Names by which browsers may reach the proxy, and those of web pages that may use it, besides loopback's."""
    environment: Mapping[str, str] = {}
    """All variables, for `${NAME}` and `env:` in policies."""

    def __repr__(self) -> str:
        """Without what may hold a secret: a store's URL can have a password, and the environment has them all."""
        return f"Settings(host={self.host!r}, port={self.port}, policies={str(self.policies)!r})"


def read(flags: Mapping[str, str | None], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags (text by the setting's name; None: not given), over the environment, by default our own.

    Raises UserMistake that names the flag or variable and what was expected.
    """
    environment = dict(os.environ if environment is None else environment)
    given: dict[str, Any] = {"environment": environment, "store": _default_store(environment)}
    for field in msgspec.structs.fields(Settings):
        source, text = _said(field.name, flags, environment)
        if text is not None:
            given[field.name] = _value(source, text, field)
    settings = Settings(**given)
    _refuse_loop(settings)
    return settings


def _said(name: str, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Who says what about a setting. An empty variable says nothing: compose files pass on what is not set."""
    if (flag := flags.get(name)) is not None:
        return "--" + name.replace("_", "-"), flag
    for variable in _variables(name):
        if text := environment.get(variable):
            return variable, text
    return name, None


def _variables(name: str) -> tuple[str, ...]:
    match name:
        case "environment":
            return ()
        case "upstream":
            return "OFFLOAD_UPSTREAM", "OPENAI_BASE_URL"
        case _:
            return ("OFFLOAD_" + name.upper(),)


def _value(source: str, text: str, field: msgspec.structs.FieldInfo) -> Any:
    try:
        plain = _PLAIN.get(field.name, str)(text)
        return msgspec.convert(plain, field.type, strict=False, dec_hook=lambda kind, value: kind(value))
    except (ValueError, msgspec.ValidationError) as error:
        expected = next(meta.description for meta in field.type.__metadata__ if meta.description)
        raise UserMistake(f"{source}: expected {expected}") from error


def _bytes(text: str) -> int:
    """`64MiB`, `64M` or plain bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+)\s*(?:([kmg])(?:i?b)?)?", text.lower())
    if not found:
        raise ValueError(text)
    return int(found[1]) << _UNITS[found[2] or ""]


def _names(text: str) -> list[str]:
    """Names as they are compared: in lower case, without the root's dot and an IPv6 address's brackets."""
    return [name.strip().lower().removesuffix(".").strip("[]") for name in text.split(",") if name.strip()]


_PLAIN: Mapping[str, Callable[[str], object]] = {
    "allowed_hosts": _names,
    "body_limit": _bytes,
    "buffered_limit": _bytes,
    "policies": os.path.expanduser,
    "store": os.path.expanduser,
}
"""What a shell or a person writes, and the types do not read by themselves."""


def _default_store(environment: Mapping[str, str]) -> str:
    """The user's directory for state (XDG Base Directory): `store ls` finds what `serve` wrote, from anywhere."""
    home = environment.get("HOME")
    state = environment.get("XDG_STATE_HOME") or (home and os.path.join(home, ".local", "state"))
    return os.path.join(state, "offload-proxy") if state else "offload-store"


def _refuse_loop(settings: Settings) -> None:
    """Refuse ourselves as upstream: the variable that points an agent at us is the one that we read."""
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
