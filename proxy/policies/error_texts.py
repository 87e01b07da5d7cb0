"""Translates msgspec's errors into the path of a value and what was expected there, in YAML's terms."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from proxy.policies.document import Path
from proxy.policies.format import SECTIONS, definitions

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
    "min_views": "is now `keep_views`",
    "plan": "is gone: there is one rule",
    "max_loss": "is gone: `keep_views` says how soon results may leave",
    "hard_total_tokens": "is now `max_total_tokens`, above which results move at any price",
    "early_total_tokens": "is gone: `keep_views` says how soon results may leave",
    "early_saved_tokens": "is gone: results leave early where that pays",
    "preview_chars": "is gone: the first 100 characters of a moved result stay",
    "preview_tail_chars": "is gone: the first 100 characters of a moved result stay",
    "min_saved_tokens": "is gone: an event frees a tenth of `max_total_tokens`",
    "snapshot_role": "is gone: the system message carries the snapshot, else the first user message",
    "max_calls": "is gone: a summary takes 4 calls at most, and a round answers 16",
    "timeout": "is gone: a summary has `upstream.idle_timeout` seconds",
    "max_answer_tokens": "is gone: an answer has a third of `max_retrieved_tokens`",
    "max_search_seconds": "is gone: the searches of a turn have 5 seconds of processor time",
    "connect_timeout": "is gone: connecting takes 5 seconds at most",
    "reply_tokens": "is gone: an eighth of `context_window` stays free for the reply, from 1,000 to 16,000 tokens",
    "max_unseen_tool_tokens": "is gone: it is 20,000 tokens, or a quarter of a known window if that is less",
    "ask_models": "is gone: upstream is asked only where `context_window` is left out",
    "allow_lossy": "is gone: `inject: never` needs nothing else",
    "dashboard": "is now `dashboard_content: true`",
    "match": "is gone: a rule says `model` itself",
}
"""Keys of earlier drafts, and what to write instead."""


def explained(message: str, below: str = "") -> tuple[Path, str]:
    """Return the path in one of msgspec's messages, and what was expected there, in YAML's terms.

    `below` is the path of what was converted, such as `.upstreams.chat`.
    """
    said, _, place = message.partition(" - at `$")
    place = below + place
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
        return f"`{key}` {REPLACED[key]}"
    here = next((part for part in reversed(path) if isinstance(part, str)), "")
    known = {section: list(definitions()[name]["properties"]) for section, name in SECTIONS.items()}
    elsewhere = [section for section, keys in known.items() if key in keys]
    if elsewhere:
        where = f"under `{elsewhere[0]}`" if elsewhere[0] else "at the top level"
        return f"unknown key here; it belongs {where}"
    if close := difflib.get_close_matches(key, known[here], 1):
        return f"unknown key; did you mean `{close[0]}`?"
    return "unknown key; expected one of " + ", ".join(known[here])
