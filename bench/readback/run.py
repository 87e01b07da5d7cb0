"""Asks a model every question in every condition, and counts what it took."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TextIO

import httpx
import msgspec

from bench.readback.histories import KINDS, Question, Recorded
from bench.readback.recorder import SECONDS, Passed, Recorder
from proxy.tools.definitions import NAMES, OTHER_NAMES
from tests.serving import PLAIN, served, tight

Json = dict[str, Any]

CONDITIONS = ("everything", "dropped", "compact", "compress", "auto")
PROXIED = CONDITIONS[2:]

CLIENT_ROUNDS = 3
"""How often the client answers calls of its own tools before it takes what there is."""
MAX_TOKENS = 1_000
"""The most tokens of a reply. A small model that goes on for longer repeats itself."""
UNCHANGED = "Unchanged since the last call: what it returned then is still current. Refer to that."
NOT_UNDERSTOOD = (
    "Nothing that was moved",
    "Nothing has been moved",
    "The arguments",
    "This pattern",
    '"',
    "not answered",
)
"""How our tools' answers begin if they did not understand the call."""
OURS = frozenset((*NAMES, *OTHER_NAMES))
SNAPSHOT = "<state_snapshot>"


RAW = re.compile(rf'"name":\s*"(?:{"|".join(OURS)})"')
"""A call of ours that reached the client as text."""


class Call(msgspec.Struct, frozen=True):
    """A model's call, and what it was told; empty if nothing."""

    name: str
    arguments: str
    told: str


class Score(msgspec.Struct):
    """One condition's counts. `empty`: last messages with neither text nor calls; `raw`: texts with
    a call of ours in them; `facts`: exact values asked for that stand in a snapshot, of
    `asked_facts`."""

    condition: str
    asked: Counter[str] = msgspec.field(default_factory=Counter)
    right: Counter[str] = msgspec.field(default_factory=Counter)
    reads: int = 0
    understood: int = 0
    rounds: int = 0
    empty: int = 0
    raw: int = 0
    sent: int = 0
    cached: int = 0
    facts: int = 0
    asked_facts: int = 0


class Asker(msgspec.Struct, frozen=True):
    """Asks a model behind a recorder. `log` gets a line of JSON for each question."""

    recorder: Recorder
    model: str
    key: str
    log: TextIO


def measured(
    asker: Asker, histories: Sequence[Recorded], conditions: Iterable[str]
) -> Iterator[Score]:
    """Yield the score of each condition."""
    for condition in conditions:
        proxied = condition in PROXIED
        policy = tight(asker.recorder.url, **_sections(condition)) if proxied else {}
        with served({"default": policy}) if proxied else nullcontext() as proxy:
            yield _score(proxy.url if proxy else asker.recorder.url, condition, asker, histories)


def _sections(condition: str) -> Json:
    compress = {"wait": "always", "snapshot_tokens": 700}
    summaries = {} if condition == "compact" else {"compress": compress}
    return {"offload": {"mode": condition, "max_total_tokens": 500, **summaries}}


def _score(url: str, condition: str, asker: Asker, histories: Sequence[Recorded]) -> Score:
    score = Score(condition)
    headers = {"authorization": f"Bearer {asker.key}"} if asker.key else {}
    with httpx.Client(
        base_url=url, headers=headers, timeout=SECONDS, trust_env=False, verify=PLAIN
    ) as client:
        for history in histories:
            snapshots = ""
            for question in history.questions:
                asker.recorder.taken()
                last = _asked(
                    client, asker.model, history, question, dropped=condition == "dropped"
                )
                passed = asker.recorder.taken()
                calls = _calls(passed)
                _count(score, question, last, passed, calls)
                snapshots += "".join(_snapshots(passed))
                said = {
                    "condition": condition,
                    "history": history.name,
                    **msgspec.to_builtins(question),
                }
                took = {
                    "last": last,
                    "right": question.is_right(_content(last)),
                    "rounds": len(passed),
                }
                print(
                    json.dumps({**said, **took, "calls": msgspec.to_builtins(calls)}),
                    file=asker.log,
                )
            if condition in PROXIED:
                values = [
                    question.answer for question in history.questions if question.kind == "value"
                ]
                score.asked_facts += len(values)
                score.facts += sum(value in snapshots for value in values)
    return score


def _asked(
    client: httpx.Client, model: str, history: Recorded, question: Question, *, dropped: bool
) -> Json:
    """Return the model's last message. Calls of the client's own tools are told that there is
    nothing more."""
    messages = [*history.messages(dropped), {"role": "user", "content": question.text}]
    message: Json = {}
    for _ in range(CLIENT_ROUNDS):
        body = {
            "model": model,
            "messages": messages,
            "tools": history.tools(),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        reply = client.post("/chat/completions", json=body).raise_for_status().json()
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if not calls:
            break
        messages.append(
            {"role": "assistant", "content": message.get("content"), "tool_calls": calls}
        )
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": UNCHANGED} for call in calls
        ]
    return message


def _content(message: Json) -> str:
    return message.get("content") or ""


def _calls(passed: Sequence[Passed]) -> list[Call]:
    """Return the calls of all tools, with what they were told."""
    told = {
        message["tool_call_id"]: str(message["content"])
        for each in passed
        for message in each.request["messages"]
        if message["role"] == "tool"
    }
    return [
        Call(call["function"]["name"], call["function"]["arguments"], told.get(call["id"], ""))
        for each in passed
        for call in each.message.get("tool_calls") or ()
    ]


def _count(
    score: Score, question: Question, last: Json, passed: Sequence[Passed], calls: Sequence[Call]
) -> None:
    reply = _content(last)
    score.asked[question.kind] += 1
    score.right[question.kind] += question.is_right(reply)
    score.empty += not reply.strip() and not last.get("tool_calls")
    score.raw += bool(RAW.search(reply))
    score.rounds += len(passed)
    score.sent += sum(each.prompt for each in passed)
    score.cached += sum(each.cached for each in passed)
    reads = [call for call in calls if call.name in OURS]
    score.reads += len(reads)
    score.understood += sum(
        call.told != "" and not call.told.startswith(NOT_UNDERSTOOD) for call in reads
    )


def _snapshots(passed: Iterable[Passed]) -> Iterator[str]:
    """Yield the snapshots in what went to the model, apart from the calls that made them."""
    for each in passed:
        for message in each.request["messages"]:
            content = message.get("content") or ""
            texts = (
                [content]
                if isinstance(content, str)
                else [part.get("text", "") for part in content]
            )
            if message["role"] != "tool":
                yield from (
                    text.partition(SNAPSHOT)[2]
                    for text in texts
                    if "messages are stored in:" in text
                )


def table(scores: Iterable[Score], title: str) -> Iterator[str]:
    """Yield the lines of a table in Markdown, each row as soon as it is there."""
    yield f"{title}, temperature 0\n"
    columns = [
        "condition",
        "right",
        *KINDS,
        "reads",
        "understood",
        "requests",
        "empty",
        "raw calls",
        "tokens sent",
    ]
    columns += ["from cache", "facts in snapshots"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for score in scores:
        kinds = " | ".join(f"{score.right[kind]}/{score.asked[kind]}" for kind in KINDS)
        facts = f"{score.facts}/{score.asked_facts}" if score.asked_facts else ""
        yield (
            f"| {score.condition} | {score.right.total()}/{score.asked.total()} | {kinds} | {score.reads}"
            f" | {score.understood} | {score.rounds} | {score.empty} | {score.raw} | {score.sent:,} | {score.cached:,}"
            f" | {facts} |"
        )
