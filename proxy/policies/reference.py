"""Renders the schema of policies as a page: `offload-proxy check --reference` prints `docs/policies.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from proxy.plan.prices import ASSUMED, FREE, PRICE_LISTS
from proxy.plan.profiles import PROFILES, presets
from proxy.policies.format import schema
from proxy.policy import Profile, Tools

Definition = Mapping[str, Any]

_TOP = """# Policies

A policy is one YAML file for one tenant. `serve --policies DIR` reads every `*.yaml` in the directory; `default.yaml`
applies to callers that no other file names. Without a directory, one built-in policy with all defaults applies to
everybody.

The proxy loads the directory as a whole or not at all: if one file is bad, the old policies stay in force, and the
log names the file, the line, the key and what was expected. A change is picked up within two seconds, or at once on
SIGHUP. Requests under way finish with the policy that they started with. `offload-proxy check DIR` validates a
directory without a server. A program that writes a policy should write it under another name, such as `.acme.yaml`,
and rename it: one that is cut off after a line is valid YAML, and is taken if the rest does not follow within half a
second.

`${NAME}` anywhere in a text is the environment variable of that name. [default.yaml](../policies/default.yaml) shows
every key with its default, [schema.json](../policies/schema.json) serves editors, and
[examples](../policies/examples) are ready to copy.

Six keys are enough for most policies:

- `upstream.base_url`: where requests go.
- `upstream.context_window`: the model's window in tokens, where upstream does not name it.
- `offload.mode`: `auto`, `compact`, `compress`, `observe` or `off`.
- `offload.profile`: `careful`, `balanced` or `frugal`, which is how soon results leave.
- `offload.max_total_tokens`: the ceiling; history above it moves until half of it is left.
- `offload.exclude_tools`: tools whose results stay.

The modes: **compact** moves tool results. **compress** summarises old history into one snapshot whose originals stay
readable. **auto** moves results, and also summarises where moving leaves too much. **off** passes everything through.
**observe** passes everything through, too, and reports what auto would have sent and cost
([observe.md](observe.md)).

The user's first message, the last two, and the newest within `pin_user_tokens` are never summarised, and the last two
are never touched. An older one that is larger than `pin_user_tokens` by itself leaves a preview and a reference, as a
tool result does. System messages at the beginning always stay. Later ones stay within a budget of the same size, and
one that is larger than `max_tool_message_tokens` is treated as a tool result.

One tenant can have an upstream for each API: `upstreams.messages` with Anthropic's address and key beside an `upstream`
of OpenAI's. An API that names its own `base_url` takes neither `api_key` nor `context_window` from `upstream`. What
rules say of `upstream` goes for every API, but a rule's own `base_url` gets the key and window of `upstream`, not those
of an API. Requests for other paths go where their API's go, as the path or the header `anthropic-version` tells.

Part of the window stays free for the reply: an eighth of it, from 1,000 to 16,000 tokens. The plan does not depend on
a request's own limit, so that no limit breaks the prompt cache. If a request that the proxy changes, or that upstream
would refuse, asks for a longer reply than the window has room for, its limit is lowered to that room, but not below
1,000 tokens or a thinking budget. The reply's header `x-offload-max-tokens` then says the lower limit.

The context window is `upstream.context_window`. Where that is null, the proxy asks the upstream's `/models` in the
background, once for each key, and uses the window that vLLM, SGLang, OpenRouter, Groq, llama.cpp or Anthropic name
there (not with `mode: off`). A refusal of a too long request that names a
smaller window counts in addition, for the caller's namespace alone, if the number is at least 1,024 and not below a
prompt that upstream took before. If it names none, 80 % of the refused request is assumed, unless that has images,
audio or files. A larger accepted prompt supersedes what was learned. Conversations that are under way change their plan
once when a window becomes known. Each process learns by itself: set `context_window` where replicas must agree at
once.

## When something moves

The plan has one rule. Old tool results stay until the model has answered `keep_views` times with them in view, or until
the user speaks again. Then the
newest ones move as soon as seven more requests with them would cost more than writing the rest of the prompt again. And
whenever the history exceeds `max_total_tokens`, the oldest results above `max_tool_message_tokens` move until half of
that is left, whatever it costs. *History* is everything after the leading system messages, as it would be sent.

Three things stay: the last `keep_recent_count` messages (without counting system messages at the end), what the model
has not answered, and results of `exclude_tools`. But a new result above 20,000 tokens, or a quarter of a known window,
is sent as a preview. An event at the ceiling that would free less than a tenth of it waits. Where moving leaves more
than the ceiling and more than `compact_ratio_threshold` of what was there, `auto` summarises; `compress` always does. A
request that does not fit a known window is made to fit, and the ceiling is at most 60 % of that window.

Moving early needs prices; the ceiling does not. Where cached input is free, results move at the ceiling only.

`offload.profile` sets `keep_views` and `max_total_tokens`; a key that is set beats it. Start with `balanced`, the
default ([benchmarks](benchmarks.md) shows what each costs). If the metrics show that models rarely read moved results
back, go to `frugal`. If they often do, take `careful`. A change of these keys rewrites each conversation under way
once.

With `tools.inject: agents`, requests that bring tools have the proxy's from the start, and so have all requests that a
policy with `results` is for: clients that need this key describe their tools in the prompt
([clients](clients.md#results-in-other-roles)). Other requests have them once something has moved.
A client of the Responses API that does not say `store: false` may leave its history to upstream, as Agno does. It has
them once it has sent a history itself.

`offload-proxy check` says when a policy first acts, and warns of keys that contradict each other.

{profiles}
Prices that a policy leaves out come from this table. The upstream's host finds the list, or the model's name where
the host is in no list, such as a gateway's. Reading is free on this machine only. Above some tokens a whole request
costs twice as much, of `haiku-5.5` five times.

{prices}
`offload-proxy check --reference` generates everything below from the schema.
"""

_SECTIONS = (
    "PolicyFile",
    "ApiKey",
    "Upstream",
    "Offload",
    "ResultRule",
    "Compress",
    "Tools",
    "Limits",
    "RuleEntry",
)
_PATHS = {
    "PolicyFile": "the file",
    "ApiKey": "api_keys[]",
    "ResultRule": "offload.results[]",
    "Compress": "offload.compress",
    "RuleEntry": "rules[]",
}


def reference() -> str:
    """Return the page in Markdown."""
    definitions: dict[str, Definition] = msgspec.json.decode(schema())["$defs"]
    sections = "".join(f"\n{section}" for name in _SECTIONS for section in _section(name, definitions))
    return _TOP.replace("{profiles}", _profiles()).replace("{prices}", _prices()) + sections


def _profiles() -> str:
    keys = list(PROFILES[Profile.BALANCED])
    rows = [
        f"| {profile} | {' | '.join(f'{chosen[key]:,}' for key in keys)} | "
        f"{presets({'profile': profile})['tools'].get('inject', Tools().inject)} |\n"
        for profile, chosen in PROFILES.items()
    ]
    head = " | ".join(f"`{key}`" for key in (*keys, "tools.inject"))
    return f"| profile | {head} |\n{'|---' * (len(keys) + 2)}|\n{''.join(rows)}"


def _prices() -> str:
    lists = ((one.provider, one.source, (*one.named, one.newest)) for one in PRICE_LISTS)
    others = ((one.models, one.source, (one,)) for one in (FREE, ASSUMED))
    rows = [
        f"| {provider if row is named[0] else ''} | {row.models} | {row.cached_read} | {row.cache_write} | "
        f"{row.input_price or ''} | {row.long_above or ''} | {source if row is named[0] else ''} |\n"
        for provider, source, named in (*lists, *others)
        for row in named
    ]
    head = "| list | models | `cached_read` | `cache_write` | `input_price` | dearer above | source |\n"
    return head + f"{'|---' * 7}|\n" + "".join(rows)


def _section(name: str, definitions: Mapping[str, Definition]) -> Iterator[str]:
    definition = definitions[name]
    yield f"## `{_PATHS.get(name, name.lower())}`\n" if name != "PolicyFile" else "## Top level\n"
    yield f"{definition['description']}\n"
    yield "| key | default | meaning |\n|---|---|---|\n" + "".join(
        f"| `{key}` | {_default(member)} | {_meaning(member, definitions)} |\n"
        for key, member in definition["properties"].items()
    )


def _default(member: Definition) -> str:
    if "default" not in member:
        return ""
    return f"`{msgspec.json.encode(member['default']).decode()}`"


def _meaning(member: Definition, definitions: Mapping[str, Definition]) -> str:
    """Return the description, with an enumeration's values or the title that describes a section."""
    name = str(member.get("$ref", "")).rpartition("/")[2]
    parts = [str(member.get("description") or "")]
    if name in _SECTIONS:
        title = _PATHS.get(name, name.lower())
        parts.append(f"see `{title}`")
    elif name:
        parts.append("one of " + ", ".join(f"`{value}`" for value in definitions[name]["enum"]))
    return "; ".join(filter(None, parts)).replace("|", "\\|")
