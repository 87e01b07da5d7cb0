"""What may be written in a policy file: YAML with lines, the types, and what is made from them: the
JSON Schema, the tables of `docs/policies.md`, and the words of errors.

Descriptions say what is expected; editors show them, and so do errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from proxy.errors import PolicyError
from proxy.plan.prices import ASSUMED, FREE, PRICE_LISTS
from proxy.plan.texts import ResultRule
from proxy.policy import (
    PROFILES,
    Compress,
    Identity,
    Limits,
    Offload,
    Profile,
    Sections,
    Tools,
    Upstream,
    says,
)

Path = tuple[str | int, ...]
"""The path to a value: keys and 0-based indexes from the top."""

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = r"[1-9][0-9]{0,8}[smhdw]"


# -- YAML --

_REFERENCE = re.compile(r"\$\{([^}]*)\}?")
_MOST_VALUES = 200_000
"""A few lines with aliases can stand for billions of values."""

_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


class Document:
    """A file's text: `value` in YAML's plain types, and the line of each key and item. Raises
    PolicyError if it is bad.

    The text is parsed to nodes first, because only nodes have line numbers and show repeated keys.
    `${VAR}` is replaced after parsing, in each value, so that a variable's content can never become
    structure.
    """

    def __init__(self, text: str, name: str, environment: Mapping[str, str]) -> None:
        """`name` is the file's in errors."""
        self.name = name
        self._environment = environment
        self._lines: dict[Path, int] = {}
        try:
            self._loader = yaml.SafeLoader(text)
            root = self._loader.get_single_node()
            if root is None:
                # A file is empty for a moment while it is being written. That must not count as a
                # policy of defaults.
                raise PolicyError(
                    f"{name}:1: the file is empty; a policy of defaults only is written {{}}"
                )
            self.value = self._value(root, ())
        except yaml.MarkedYAMLError as error:
            at = error.problem_mark.line if error.problem_mark else 0
            # Between braces or brackets, YAML reads `${` as the start of a mapping, but its message
            # does not say so.
            unquoted = "${" in "".join(text.splitlines()[at : at + 1])
            hint = "; write ${NAME} in quotes here" if unquoted else ""
            raise PolicyError(
                f"{name}:{at + 1}: not valid YAML: {error.problem or error.context}{hint}"
            ) from error
        except yaml.YAMLError as error:
            raise PolicyError(
                f"{name}:1: not valid YAML: it has characters that are forbidden in YAML"
            ) from error
        except RecursionError as error:
            raise PolicyError(
                f"{name}:1: nested too deeply, or an alias contains itself"
            ) from error

    def place(self, path: Path) -> str:
        """Return the file and line of `path` as `FILE:LINE`. A path that is not in the file gets
        its parent's line."""
        line = next(
            (
                self._lines[path[:end]]
                for end in range(len(path), -1, -1)
                if path[:end] in self._lines
            ),
            1,
        )
        return f"{self.name}:{line}"

    def error(self, path: Path, text: str, line: int | None = None) -> PolicyError:
        """Return an error whose text begins with file, line and key, such as
        `rules[0].offload.mode`."""
        place = self.place(path) if line is None else f"{self.name}:{line}"
        key = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
        ).removeprefix(".")
        return PolicyError(": ".join(filter(None, (place, key, text))))

    def _value(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self._lines.setdefault(path, line)
        if len(self._lines) > _MOST_VALUES:
            raise self.error(
                (), f"more than {_MOST_VALUES:,} values, with those that aliases repeat", line
            )
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
            # Besides its own errors, PyYAML raises Python's where a tag does not fit: `!!bool
            # maybe`, `!!int ''`.
            raise self.error(
                path, "cannot be read as YAML; put it in quotes if it is text", line
            ) from error

        def variable(match: re.Match[str]) -> str:
            if not _VARIABLE.fullmatch(match[0]):
                raise self.error(
                    path, "expected ${NAME} with the name of an environment variable", line
                )
            if match[1] not in self._environment:
                raise self.error(path, f"the environment variable {match[1]} is not set", line)
            return self._environment[match[1]]

        return _REFERENCE.sub(variable, value) if isinstance(value, str) else value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            place = (*path, key.value)
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(path, "a key must be plain text", line)
            if place in self._lines:
                raise self.error(place, f"given twice, first on line {self._lines[place]}", line)
            self._lines[place] = line
            found = self._value(value, place)
            # Two surprises of YAML: it reads `off` as false, and a section with nothing but
            # comments as null.
            if found is not None or key.value not in _EMPTY_IS_DEFAULT:
                values[key.value] = "off" if key.value == "mode" and found is False else found
        return values


# -- types --


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client key: either of the two."""

    sha256: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9A-Fa-f]{64}$")] | None,
        says("64 hexadecimal digits: the SHA-256 of the key that the client sends"),
    ] = None
    env: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)")] | None,
        says("the name of the environment variable that holds the key"),
    ] = None


class Upstreams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Others for some APIs; what is left out is as in `upstream`."""

    chat: Annotated[Upstream | None, says("for chat completions")] = None
    responses: Annotated[Upstream | None, says("for Responses")] = None
    messages: Annotated[Upstream | None, says("for Anthropic's Messages")] = None


class RuleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs for some models. Sections are partial: a key that is left out is as in the
    policy."""

    model: Annotated[str, says("a glob over the request's model, such as gpt-4.1*")]
    upstream: Upstream = msgspec.field(default_factory=Upstream)
    offload: Offload = msgspec.field(default_factory=Offload)
    tools: Tools = msgspec.field(default_factory=Tools)


class PolicyFile(Sections, frozen=True, kw_only=True):
    """One tenant's policy as it is written. `default.yaml` serves the callers that no other file
    names."""

    tenant: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,64}$(?!\n)")] | None,
        says("a name of 1 to 64 characters a-z, 0-9, _ and -; left out: the file's name"),
    ] = None
    api_keys: Annotated[
        tuple[ApiKey, ...],
        says("whose requests these are: a list with `env` or `sha256` of each key"),
    ] = ()
    upstreams: Upstreams = msgspec.field(default_factory=Upstreams)
    retention: Annotated[
        Annotated[str, Meta(pattern=rf"^({_DURATION}|forever)$(?!\n)")] | None,
        says("how long records are kept, such as 30d, 12h or 90s; null or forever: without end"),
    ] = "30d"
    open: Annotated[bool, says("default.yaml only: strangers may use upstream.api_key")] = False
    rules: Annotated[tuple[RuleEntry, ...], says("by model; the first match wins")] = ()


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
"""The type of each section, by its place; the top level has an empty place."""

SECTIONS: Mapping[str, str] = {
    re.sub(r".*\.|\[\]", "", place): name for place, name in TABLES.items()
} | dict.fromkeys(Upstreams.__struct_fields__, Upstream.__name__)
"""Each section's type, by its key."""


_LISTS = {"relay", "exclude_tools", "results", "said", "members"}
_EMPTY_IS_DEFAULT = (SECTIONS.keys() - {""}) | {"tenant"} | _LISTS
"""Keys that may be empty, for example because everything in a section is commented out."""


def duration(text: str) -> float | None:
    """`30d`, `12h`, `15m`, `90s` or `2w` in seconds; `forever` is None. Raises ValueError."""
    if text == "forever":
        return None
    if not re.fullmatch(_DURATION, text):
        raise ValueError("expected a duration such as 30d, 12h or 90s, or forever")
    return float(text[:-1]) * _SECONDS[text[-1]]


@cache
def definitions() -> Mapping[str, Any]:
    found: dict[str, Any] = _described()["$defs"]
    return found


def _described() -> dict[str, Any]:
    """Return the schema, with each docstring on one line."""
    made = msgspec.json.schema(PolicyFile)
    for definition in made["$defs"].values():
        if "description" in definition:
            definition["description"] = " ".join(definition["description"].split())
    return made


def schema() -> bytes:
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_described(),
    }
    # Editors see `${VAR}` before it is filled in.
    text = msgspec.json.encode(whole).replace(b'"pattern":"', rb'"pattern":"\\$\\{|')
    return msgspec.json.format(text, indent=2) + b"\n"


# -- tables for people --


def reference() -> str:
    """The tables of profiles, prices and keys, in Markdown."""
    keys = list(PROFILES[Profile.BALANCED][0])
    head: tuple[object, ...] = ("profile", *(f"`{key}`" for key in (*keys, "tools.inject")))
    profiles = [head]
    for profile, (chosen, tools) in PROFILES.items():
        profiles.append(
            (profile, *(f"{chosen[key]:,}" for key in keys), tools.get("inject", Tools().inject))
        )

    prices: list[tuple[object, ...]] = [
        (
            "list",
            "models",
            "`cached_read`",
            "`cache_write`",
            "`input_price`",
            "dearer above",
            "source",
        )
    ]
    lists = [(one.provider, one.source, (*one.named, one.newest)) for one in PRICE_LISTS]
    for provider, source, named in (
        *lists,
        *((one.models, one.source, (one,)) for one in (FREE, ASSUMED)),
    ):
        for row in named:
            first, last = (provider, source) if row is named[0] else ("", "")
            costs = row.cached_read, row.cache_write, row.input_price or "", row.long_above or ""
            prices.append((first, row.models, *costs, last))

    parts = ["## Profiles\n", _table(profiles), "## Prices\n", _table(prices)]
    for place, name in TABLES.items():
        about = definitions()[name]
        rows = (
            (f"`{key}`", _default(value), _meaning(value))
            for key, value in about["properties"].items()
        )
        parts += [f"## {f'`{place}`' if place else 'Top level'}\n", f"{about['description']}\n"]
        parts.append(_table([("key", "default", "meaning"), *rows]))
    return "\n".join(parts)


def _table(rows: Iterable[Iterable[object]]) -> str:
    head, *others = (f"| {' | '.join(map(str, row))} |\n" for row in rows)
    return f"{head}{'|---' * head.count(' | ')}|---|\n{''.join(others)}"


def _default(about: Mapping[str, Any]) -> str:
    return f"`{msgspec.json.encode(about['default']).decode()}`" if "default" in about else ""


def _meaning(about: Mapping[str, Any]) -> str:
    """Return the description, with an enumeration's values or the title of the table of a
    section."""
    parts = [str(about.get("description") or "")]
    name = str(about.get("$ref", "")).rpartition("/")[2]
    if title := next((place for place, kind in TABLES.items() if kind == name), ""):
        parts.append(f"see `{title}`")
    elif name:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in definitions()[name]["enum"]))
    return "; ".join(filter(None, parts)).replace("|", "\\|")


# -- errors --

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


def explained(message: str) -> tuple[Path, str]:
    """Return the path in one of msgspec's messages, and what was expected there, in YAML's
    terms."""
    said, _, place = message.partition(" - at `$")
    path: Path = tuple(
        int(index) if index else key for key, index in re.findall(r"(\w+)|\[(\d+)\]", place)
    )
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", said, re.DOTALL):
        return (*path, unknown[1]), _suggested(unknown[1], path)
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", said):
        return path, f"expected the key `{missing[1]}`"

    # the schema of the key, merged with that of its enumeration
    types = definitions()
    about = dict[str, Any]()
    *sections, key = ["", *(part for part in path if isinstance(part, str))]
    if sections and sections[-1] in SECTIONS:
        about = types[SECTIONS[sections[-1]]]["properties"].get(key, {})
        about = {**types.get(about.get("$ref", "").removeprefix("#/$defs/"), {}), **about}
    if "enum" in about:
        return path, "expected one of " + ", ".join(about["enum"])
    if said.startswith("Invalid enum value") or "matching regex" in said:
        return path, "expected " + about["description"]

    def in_words(kinds: re.Match[str]) -> str:
        """Translate `` `int | null` `` to "a whole number or nothing"."""
        return " or ".join(_WORDS.get(kind, kind) for kind in kinds[1].split(" | "))

    words = re.sub("`([^`]*)`", in_words, said.replace("Expected", "expected"))
    return path, words + (f" ({about['description']})" if "description" in about else "")


def _suggested(key: str, path: Path) -> str:
    """Return advice about an unknown key at `path`."""
    here = next((part for part in reversed(path) if isinstance(part, str)), "")
    known = {section: list(definitions()[name]["properties"]) for section, name in SECTIONS.items()}
    if elsewhere := [section for section, keys in known.items() if key in keys]:
        where = f"under `{elsewhere[0]}`" if elsewhere[0] else "at the top level"
        return f"unknown key here; it belongs {where}"
    if close := difflib.get_close_matches(key, known[here], 1):
        return f"unknown key; did you mean `{close[0]}`?"
    return "unknown key; expected one of " + ", ".join(known[here])
