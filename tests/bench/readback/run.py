"""Asks a model every question in every condition, and counts what it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import httpx
import msgspec

from proxy.core.retrieval.definitions import NAMES, OTHER_NAMES
from tests.bench.readback.histories import KINDS, NOWHERE, Question, Recorded
from tests.bench.readback.recorder import SECONDS, Passed, Recorder
from tests.serving import PLAIN, served, tight

Json = dict[str, Any]

CONDITIONS = ("everything", "dropped", "compact", "compress", "auto")
PROXIED = CONDITIONS[2:]

RULE = f"Answer in one short sentence. If it is nowhere in what the tools returned, say {NOWHERE}."
CLIENT_ROUNDS = 3
"""How often the client answers calls of its own tools before it takes what there is."""
UNAVAILABLE = "This tool is not available any more. Answer from what was returned before."
NOT_UNDERSTOOD = (
    "Nothing that was moved",
    "The arguments",
    "There is no argument",
    "This pattern",
    '"',
    "not answered",
)
"""How our tools' answers begin if they did not understand the call."""
OURS = frozenset((*NAMES, *OTHER_NAMES))
SNAPSHOT = "<state_snapshot>"


class Score(msgspec.Struct):
    """One condition's counts. `facts`: exact values asked for that stand in a snapshot, of `asked_facts`."""

    condition: str
    asked: Counter[str] = msgspec.field(default_factory=Counter)
    right: Counter[str] = msgspec.field(default_factory=Counter)
    reads: int = 0
    understood: int = 0
    rounds: int = 0
    empty: int = 0
    sent: int = 0
    cached: int = 0
    facts: int = 0
    asked_facts: int = 0


def measured(
    recorder: Recorder, model: str, key: str, histories: Sequence[Recorded], conditions: Iterable[str]
) -> Iterator[Score]:
    """Yield the score of each condition."""
    for condition in conditions:
        proxied = condition in PROXIED
        policy = tight(recorder.url, **_sections(condition)) if proxied else {}
        with served({"default": policy}) if proxied else nullcontext() as proxy:
            yield _score(proxy.url if proxy else recorder.url, condition, recorder, model, key, histories)


def _sections(condition: str) -> Json:
    compress = {"wait": "always", "snapshot_tokens": 700, "timeout": SECONDS}
    return {"offload": {"mode": condition, "max_total_tokens": 2_000, "compress": compress}}


def _score(url: str, condition: str, recorder: Recorder, model: str, key: str, histories: Sequence[Recorded]) -> Score:
    score = Score(condition)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=SECONDS, trust_env=False, verify=PLAIN) as client:
        for history in histories:
            snapshots = ""
            for question in history.questions:
                recorder.taken()
                reply = _asked(client, model, history, question, dropped=condition == "dropped")
                passed = recorder.taken()
                score.asked[question.kind] += 1
                score.right[question.kind] += question.is_right(reply)
                score.empty += not reply.strip()
                _count(score, passed)
                snapshots += "".join(_snapshots(passed))
            if condition in PROXIED:
                values = [question.answer for question in history.questions if question.kind == "value"]
                score.asked_facts += len(values)
                score.facts += sum(value in snapshots for value in values)
    return score


def _asked(client: httpx.Client, model: str, history: Recorded, question: Question, *, dropped: bool) -> str:
    """Return the model's last word. Calls of the client's own tools are told that there is nothing more."""
    messages = [*history.messages(dropped), {"role": "user", "content": f"{question.text} {RULE}"}]
    message: Json = {}
    for _ in range(CLIENT_ROUNDS):
        body = {"model": model, "messages": messages, "tools": history.tools(), "temperature": 0}
        reply = client.post("/chat/completions", json=body).raise_for_status().json()
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if not calls:
            break
        messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": UNAVAILABLE} for call in calls]
    return message.get("content") or ""


def _count(score: Score, passed: Sequence[Passed]) -> None:
    score.rounds += len(passed)
    score.sent += sum(each.prompt for each in passed)
    score.cached += sum(each.cached for each in passed)
    made = {
        call["id"]
        for each in passed
        for call in each.message.get("tool_calls") or ()
        if call["function"]["name"] in OURS
    }
    answers = {
        message["tool_call_id"]: message["content"]
        for each in passed
        for message in each.request["messages"]
        if message["role"] == "tool" and message["tool_call_id"] in made
    }
    score.reads += len(made)
    score.understood += sum(not str(answer).startswith(NOT_UNDERSTOOD) for answer in answers.values())


def _snapshots(passed: Iterable[Passed]) -> Iterator[str]:
    """Yield the snapshots in what went to the model, apart from the calls that made them."""
    for each in passed:
        for message in each.request["messages"]:
            content = message.get("content") or ""
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            if message["role"] != "tool":
                yield from (text.partition(SNAPSHOT)[2] for text in texts if "messages are stored in:" in text)


def table(scores: Sequence[Score], model: str) -> str:
    """Return the scores as a table in Markdown."""
    questions = sum(scores[0].asked.values()) if scores else 0
    lines = [
        f"{model}, {questions} questions in each condition, temperature 0\n",
        "| condition | right | "
        + " | ".join(KINDS)
        + " | reads | understood | rounds | empty | tokens sent | from cache | facts in snapshots |",
        "|---" * (len(KINDS) + 9) + "|",
    ]
    for score in scores:
        kinds = " | ".join(f"{score.right[kind]}/{score.asked[kind]}" for kind in KINDS)
        facts = f"{score.facts}/{score.asked_facts}" if score.asked_facts else ""
        lines.append(
            f"| {score.condition} | {sum(score.right.values())}/{sum(score.asked.values())} | {kinds} | {score.reads}"
            f" | {score.understood} | {score.rounds} | {score.empty} | {score.sent:,} | {score.cached:,} | {facts} |"
        )
    return "\n".join(lines)
