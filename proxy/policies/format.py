"""What may be written in a policy file: its types, and the JSON Schema made from them. Descriptions say what is
expected; editors show them, and so do errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from proxy.plan.results import ResultRule
from proxy.policy import Compress, Limits, Offload, Tools, Upstream

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = r"[1-9][0-9]{0,8}[smhdw]"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client key: either of the two."""

    sha256: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9A-Fa-f]{64}$")] | None,
        Meta(description="64 hexadecimal digits: the SHA-256 of the key that the client sends"),
    ] = None
    env: Annotated[str | None, Meta(description="the environment variable that holds the key")] = None


class Api(StrEnum):
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


class RuleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs for some models. Sections are partial: a key that is left out is as in the policy."""

    model: Annotated[str, Meta(description="a glob over the request's model, such as gpt-4.1*")]
    upstream: Upstream = msgspec.field(default_factory=Upstream)
    offload: Offload = msgspec.field(default_factory=Offload)
    tools: Tools = msgspec.field(default_factory=Tools)


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant's policy as it is written. `default.yaml` serves the callers that no other file names."""

    tenant: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,64}$(?!\n)")] | None,
        Meta(description="a name of 1 to 64 characters a-z, 0-9, _ and -; left out: the file's name"),
    ] = None
    api_keys: Annotated[tuple[ApiKey, ...], Meta(description="whose requests these are")] = ()
    upstream: Upstream = msgspec.field(default_factory=Upstream)
    upstreams: Annotated[
        dict[Api, Upstream],
        Meta(description="others for some APIs (chat, responses, messages); what is left out is as in `upstream`"),
    ] = msgspec.field(default_factory=dict)
    offload: Offload = msgspec.field(default_factory=Offload)
    tools: Tools = msgspec.field(default_factory=Tools)
    limits: Limits = msgspec.field(default_factory=Limits)
    store_originals: Annotated[bool, Meta(description="keep moved texts for later conversations and people")] = True
    capture: Annotated[
        bool, Meta(description="keep whole requests for `replay`, in the folder of `serve --capture`")
    ] = False
    retention: Annotated[
        Annotated[str, Meta(pattern=rf"^({_DURATION}|forever)$(?!\n)")] | None,
        Meta(description="how long records are kept, such as 30d, 12h or 90s; null or forever: without end"),
    ] = "30d"
    dashboard_content: Annotated[
        bool, Meta(description="keep texts of messages on the dashboard, if `serve --dashboard-content` allows it too")
    ] = False
    share_namespace: Annotated[bool, Meta(description="one namespace for all keys of this tenant")] = False
    relay: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[/*]")], ...],
        Meta(description="more paths to relay with the tenant's key: globs such as /files/*"),
    ] = ()
    open: Annotated[bool, Meta(description="default.yaml only: strangers may use upstream.api_key")] = False
    rules: Annotated[tuple[RuleEntry, ...], Meta(description="by model; the first match wins")] = ()


SECTIONS: Mapping[str, str] = {
    "": PolicyFile.__name__,
    "api_keys": ApiKey.__name__,
    "upstream": Upstream.__name__,
    **dict.fromkeys(Api, Upstream.__name__),
    "offload": Offload.__name__,
    "results": ResultRule.__name__,
    "compress": Compress.__name__,
    "tools": Tools.__name__,
    "limits": Limits.__name__,
    "rules": RuleEntry.__name__,
}
"""Each section's type, by its key; the top level's by none."""


def duration(text: str) -> float | None:
    """`30d`, `12h`, `15m`, `90s` or `2w` in seconds; `forever` is None. Raises ValueError."""
    if text == "forever":
        return None
    if not re.fullmatch(_DURATION, text):
        raise ValueError("expected a duration such as 30d, 12h or 90s, or forever")
    return float(text[:-1]) * _SECONDS[text[-1]]


@cache
def definitions() -> Mapping[str, Any]:
    """The schema of each type, by the type's name."""
    found: dict[str, Any] = msgspec.json.schema(PolicyFile)["$defs"]
    return found


def schema() -> bytes:
    """The JSON Schema of a policy file, for editors."""
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(PolicyFile)}
    return msgspec.json.format(msgspec.json.encode(_for_editors(whole)), indent=2) + b"\n"


def _for_editors(value: Any) -> Any:
    """The schema with `${VAR}` allowed in every text: editors see it before it is filled in."""
    if isinstance(value, list):
        return [_for_editors(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: rf"\$\{{|{member}" if key == "pattern" and isinstance(member, str) else _for_editors(member)
        for key, member in value.items()
    }
