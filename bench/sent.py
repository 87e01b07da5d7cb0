"""A recorded run as the proxy sends it upstream, request by request, and which of its texts the
model no longer sees.

The proxy's own preparation makes the requests. Snapshots are canned: they repeat nothing of the
history that they replace, and exist from the next request on.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import msgspec

from proxy.dialects import render
from proxy.dialects.chat import CHAT, reasoning, tool_calls
from proxy.dialects.render import ActiveSnapshot
from proxy.plan.plan import Role
from proxy.policy import Policy
from proxy.rawjson import members
from proxy.requests.cache import MessageCache
from proxy.requests.planned import Planned, Rendered, plan
from tests.transcripts import Json, Run, requests_of

MODEL = "gpt-4o"
SUMMARY = (
    "The work goes on as it was agreed, step by step, and nothing was decided otherwise. " * 45
)
"""A snapshot of about 800 tokens without any number, path or identifier."""
REFERENCE = re.compile(
    r"stored in (/context_store/\S+?); complete, (?:\d+ lines, )?\d+ tokens; [^;)]+\)$"
)
"""The end of the text that replaces a result."""

Texts = dict[str, list[str]]
"""Path → the client's texts that a reference promised the model at this path."""


class Sent(msgspec.Struct):
    """A run as it went upstream."""

    bodies: list[bytes] = []
    told: Texts = {}
    changes: int = 0
    """Requests that did not begin with all messages of the one before, by the proxy's own
    account."""
    last: Rendered | None = None


async def replay(run: Run, policy: Policy, reader: MessageCache) -> Sent:
    """Raises Unplannable."""
    sent = Sent()
    made = set[str]()
    before = (False, 0, "")
    for messages, _ in requests_of(run):
        asked = reader.request(CHAT, _body(run, messages))
        history = await plan(CHAT, asked, policy, None, reader)
        if history is None or not history.may_change:
            sent.bodies.append(asked.body)
            continue
        shown = _shown(history, made)
        ready = sent.last = Rendered.of(history, shown, {}, reader)
        made |= {
            history.snapshot_name(boundary) for boundary in history.plan.boundaries[-1:]
        }  # the next request has it
        sent.bodies.append(ready.turn().request() if ready.changed else asked.body)
        _note(sent.told, ready)
        # Our tools come before all messages, so their arrival breaks the prefix, as events and
        # snapshots do.
        after = (
            ready.injecting,
            len(ready.plan.events),
            history.snapshot_name(shown.boundary) if shown else "",
        )
        sent.changes += after != before and len(sent.bodies) > 1
        before = after
    return sent


def _body(run: Run, messages: Sequence[Json]) -> bytes:
    tools = {"tools": run.tools} if run.tools else {}
    return json.dumps({"model": MODEL, "messages": messages, **tools}, ensure_ascii=False).encode()


def _shown(history: Planned, made: set[str]) -> ActiveSnapshot | None:
    """The latest snapshot that exists."""
    boundaries = [
        boundary for boundary in history.plan.boundaries if history.snapshot_name(boundary) in made
    ]
    return (
        ActiveSnapshot(boundaries[-1], SUMMARY, history.originals_path(boundaries[-1]))
        if boundaries
        else None
    )


def _note(told: Texts, ready: Rendered) -> None:
    """Note the texts that this request only refers to."""
    transcript = ready.planned.transcript
    gone = set(render.replaced(transcript, ready.shown.boundary)) if ready.shown else set[int]()
    if ready.shown:
        told[ready.shown.path] = [
            text for index in sorted(gone) for text in words_of(transcript.raws[index])
        ]
    results = {_answers(raw): raw for raw in ready.entries if _answers(raw)}
    for index, client in enumerate(transcript.raws):
        sent = results.get(_answers(client))
        if index in gone or transcript.messages[index].role is not Role.TOOL or sent is None:
            continue
        for (_, text), (_, instead) in zip(CHAT.texts(client), CHAT.texts(sent), strict=True):
            if text != instead:
                told[REFERENCE.findall(instead)[-1]] = [text]


def _answers(raw: bytes | msgspec.Raw) -> str:
    """The id of the call that a result answers. A snapshot may join messages, so places do not
    tell."""
    return str(msgspec.json.decode(members(raw).get("tool_call_id", b'""')))


def words_of(raw: bytes | msgspec.Raw) -> list[str]:
    """All texts of a message: content, reasoning, arguments of calls."""
    inside = members(raw)
    said = [text for _, text in CHAT.texts(raw)]
    return [
        text
        for text in (reasoning(inside), *said, *(call.arguments for call in tool_calls(inside)))
        if text
    ]


def synthetic() -> Run:
    """An invented run for machines without recorded ones: 60 results of about 900 tokens."""
    words = random.Random(7)
    messages: list[Json] = [
        {"role": "system", "content": "Answer from the logs."},
        {"role": "user", "content": "Which hosts failed, and why?"},
    ]
    for number in range(60):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "logs", "arguments": f'{{"n": {number}}}'},
        }
        lines = (
            f"/var/log/host_{words.randrange(900)}/app.log:{words.randrange(10**6)} took {words.random():.3f}"
            for _ in range(45)
        )
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "\n".join(lines)})
    messages.append({"role": "assistant", "content": "Those."})
    return Run("synthetic", "synthetic", MODEL, [], messages, 0)
