"""What may be written in a policy file: its types, and what is made from them: the JSON Schema, the tables of
`docs/policies.md`, and the words of errors.

Descriptions say what is expected; editors show them, and so do errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from proxy.plan.prices import ASSUMED, FREE, PRICE_LISTS
from proxy.plan.profiles import PROFILES, presets
from proxy.plan.texts import ResultRule
from proxy.policies.document import Path
from proxy.policy import Compress, Identity, Limits, Offload, Profile, Sections, Tools, Upstream

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = r"[1-9][0-9]{0,8}[smhdw]"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client key: either of the two."""

    sha256: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9A-Fa-f]{64}$")] | None,
        Meta(description="64 hexadecimal digits: the SHA-256 of the key that the client sends"),
    ] = None
    env: Annotated[str | None, Meta(description="the environment variable that holds the key")] = None


class Upstreams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Others for some APIs; what is left out is as in `upstream`."""

    chat: Annotated[Upstream | None, Meta(description="for chat completions")] = None
    responses: Annotated[Upstream | None, Meta(description="for Responses")] = None
    messages: Annotated[Upstream | None, Meta(description="for Anthropic's Messages")] = None


class RuleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs for some models. Sections are partial: a key that is left out is as in the policy."""

    model: Annotated[str, Meta(description="a glob over the request's model, such as gpt-4.1*")]
    upstream: Upstream = msgspec.field(default_factory=Upstream)
    offload: Offload = msgspec.field(default_factory=Offload)
    tools: Tools = msgspec.field(default_factory=Tools)


class PolicyFile(Sections, frozen=True, kw_only=True):
    """One tenant's policy as it is written. `default.yaml` serves the callers that no other file names."""

    tenant: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,64}$(?!\n)")] | None,
        Meta(description="a name of 1 to 64 characters a-z, 0-9, _ and -; left out: the file's name"),
    ] = None
    api_keys: Annotated[tuple[ApiKey, ...], Meta(description="whose requests these are")] = ()
    upstreams: Upstreams = msgspec.field(default_factory=Upstreams)
    retention: Annotated[
        Annotated[str, Meta(pattern=rf"^({_DURATION}|forever)$(?!\n)")] | None,
        Meta(description="how long records are kept, such as 30d, 12h or 90s; null or forever: without end"),
    ] = "30d"
    open: Annotated[bool, Meta(description="default.yaml only: strangers may use upstream.api_key")] = False
    rules: Annotated[tuple[RuleEntry, ...], Meta(description="by model; the first match wins")] = ()


TABLES: Mapping[str, str] = {
    "": PolicyFile.__name__,
    "api_keys[]": ApiKey.__name__,
    "upstream": Upstream.__name__,
    "upstreams": Upstreams.__name__,
    "offload": Offload.__name__,
    "offload.results[]": ResultRule.__name__,
    "offload.compress": Compress.__name__,
    "tools": Tools.__name__,
    "limits": Limits.__name__,
    "identity": Identity.__name__,
    "rules[]": RuleEntry.__name__,
}
"""The type of each section, by its place; the top level's by none."""

SECTIONS: Mapping[str, str] = {re.sub(r".*\.|\[\]", "", place): name for place, name in TABLES.items()} | dict.fromkeys(
    Upstreams.__struct_fields__, Upstream.__name__
)
"""Each section's type, by its key."""


def duration(text: str) -> float | None:
    """`30d`, `12h`, `15m`, `90s` or `2w` in seconds; `forever` is None. Raises ValueError."""
    if text == "forever":
        return None
    if not re.fullmatch(_DURATION, text):
        raise ValueError("expected a duration such as 30d, 12h or 90s, or forever")
    return float(text[:-1]) * _SECONDS[text[-1]]


@cache
def definitions() -> Mapping[str, Any]:
    found: dict[str, Any] = msgspec.json.schema(PolicyFile)["$defs"]
    return found


def schema() -> bytes:
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


# -- tables for people --


def reference() -> str:
    """The tables of profiles, prices and keys, in Markdown."""
    parts = ["## Profiles\n", _profiles(), "## Prices\n", _prices()]
    return "\n".join([*parts, *(part for place, name in TABLES.items() for part in _section(place, name))])


def _table(*rows: Iterable[object]) -> str:
    head, *others = (f"| {' | '.join(map(str, row))} |\n" for row in rows)
    return f"{head}{'|---' * head.count(' | ')}|---|\n{''.join(others)}"


def _profiles() -> str:
    keys = list(PROFILES[Profile.BALANCED])
    rows = (
        (
            profile,
            *(f"{chosen[key]:,}" for key in keys),
            presets({"profile": profile})["tools"].get("inject", Tools().inject),
        )
        for profile, chosen in PROFILES.items()
    )
    return _table(("profile", *(f"`{key}`" for key in (*keys, "tools.inject"))), *rows)


def _prices() -> str:
    lists = ((one.provider, one.source, (*one.named, one.newest)) for one in PRICE_LISTS)
    others = ((one.models, one.source, (one,)) for one in (FREE, ASSUMED))
    rows = (
        (
            provider if row is named[0] else "",
            row.models,
            *(row.cached_read, row.cache_write, row.input_price or "", row.long_above or ""),
            source if row is named[0] else "",
        )
        for provider, source, named in (*lists, *others)
        for row in named
    )
    return _table(
        ("list", "models", "`cached_read`", "`cache_write`", "`input_price`", "dearer above", "source"), *rows
    )


def _section(place: str, name: str) -> Iterator[str]:
    about = definitions()[name]
    yield f"## {f'`{place}`' if place else 'Top level'}\n"
    yield f"{about['description']}\n"
    rows = ((f"`{key}`", _default(value), _meaning(value)) for key, value in about["properties"].items())
    yield _table(("key", "default", "meaning"), *rows)


def _default(about: Mapping[str, Any]) -> str:
    return f"`{msgspec.json.encode(about['default']).decode()}`" if "default" in about else ""


def _meaning(about: Mapping[str, Any]) -> str:
    """Return the description, with an enumeration's values or the title of the table of a section."""
    parts = [str(about.get("description") or "")]
    name = str(about.get("$ref", "")).rpartition("/")[2]
    if title := next((place for place, kind in TABLES.items() if kind == name), ""):
        parts.append(f"see `{title}`")
    elif name:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in definitions()[name]["enum"]))
    return "; ".join(filter(None, parts)).replace("|", "\\|")


# -- errors --

_WORDS = {
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a mapping",
    "`null`": "nothing",
}

REPLACED: Mapping[str, str] = {
    "min_views": "keep_views",
    "max_loss": "keep_views",
    "early_total_tokens": "keep_views",
    "early_saved_tokens": "keep_views",
    "hard_total_tokens": "max_total_tokens",
    "min_saved_tokens": "max_total_tokens",
    "plan": "profile",
    "timeout": "upstream.idle_timeout",
    "max_answer_tokens": "max_retrieved_tokens",
    "ask_models": "context_window",
    "dashboard": "dashboard_content",
    "match": "model",
}
"""Keys of earlier drafts, and which one says what they were for."""


def explained(message: str) -> tuple[Path, str]:
    """Return the path in one of msgspec's messages, and what was expected there, in YAML's terms."""
    said, _, place = message.partition(" - at `$")
    path: Path = tuple(int(index) if index else key for key, index in re.findall(r"(\w+)|\[(\d+)\]", place))
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", said, re.DOTALL):
        return (*path, unknown[1]), _suggested(unknown[1], path)
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", said):
        return path, f"expected the key `{missing[1]}`"
    about = _about(path)
    if said.startswith("Invalid enum value") and "enum" in about:
        return path, "expected one of " + ", ".join(about["enum"])
    if said.startswith("Invalid enum value") or "matching regex" in said:
        return path, "expected " + about["description"]
    words = re.sub("`[^`]*`", lambda kinds: _in_words(kinds[0]), said.replace("Expected", "expected"))
    return path, words + (f" ({about['description']})" if "description" in about else "")


def _in_words(kinds: str) -> str:
    """Translate `` `int | null` `` to "a whole number or nothing"."""
    return " or ".join(_WORDS.get(f"`{kind}`", kind) for kind in kinds.strip("`").split(" | "))


def _about(path: Path) -> Mapping[str, Any]:
    """Return the schema of the key at `path`, merged with that of its enumeration."""
    keys = ["", *(part for part in path if isinstance(part, str))]
    if len(keys) < 2:
        return {}
    types = definitions()
    about = types[SECTIONS[keys[-2]]]["properties"].get(keys[-1], {}) if keys[-2] in SECTIONS else {}
    return {**types.get(about.get("$ref", "").removeprefix("#/$defs/"), {}), **about}


def _suggested(key: str, path: Path) -> str:
    """Return advice about an unknown key at `path`."""
    if key in REPLACED:
        return f"there is no such key any more; see `{REPLACED[key]}`"
    here = next((part for part in reversed(path) if isinstance(part, str)), "")
    known = {section: list(definitions()[name]["properties"]) for section, name in SECTIONS.items()}
    elsewhere = [section for section, keys in known.items() if key in keys]
    if elsewhere:
        where = f"under `{elsewhere[0]}`" if elsewhere[0] else "at the top level"
        return f"unknown key here; it belongs {where}"
    if close := difflib.get_close_matches(key, known[here], 1):
        return f"unknown key; did you mean `{close[0]}`?"
    return "unknown key; expected one of " + ", ".join(known[here])
