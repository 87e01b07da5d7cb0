"""What the words of a text say about it: that the user said it, that it reports an error, that it
is a result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects import Dialect
from proxy.plan import texts
from proxy.plan.plan import Reading
from proxy.plan.preview import Shape, replacement
from proxy.plan.texts import PRESETS, Carries, ResultPreset, reports_error
from proxy.policy import Mode
from tests.dialects.test_known import APIS, MODES, Api, Json, sent

# -- what the user said in the middle of a turn stays word for word, whoever sends it, in every mode

RULE = "Never touch the file legacy.py, whatever happens."
QUEUED = (
    f"<system-reminder>\nThe user sent a new message while you were working:\n{RULE}\n\nThis is how it is surfaced."
    "\n</system-reminder>"
)
REJECTED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit, the "
    f"new_string was NOT written to the file). To tell you how to proceed, the user said:\n{RULE}"
)
LONG = "a line of the result\n" * 200

TEXTS = {
    "Claude Code, queued": QUEUED,
    "Claude Code, rejected": REJECTED,
    "Claude Code, asked": f'User has answered your questions: "May I?"="{RULE}". You can now continue.',
    "opencode, queued": f"<system-reminder>\nThe user sent the following message:\n{RULE}\n\nOk.\n</system-reminder>",
    "opencode, rejected": "The user rejected permission to use this specific tool call with the following feedback: "
    f"{RULE}",
    "opencode, rejected, as an error": "Error: The user rejected permission to use this specific tool call with the "
    f"following feedback: {RULE}",
    "Claude Code, rejected in a subagent": "Permission for this tool use was denied. The tool use was rejected (eg. if "
    f"it was a file edit, the new_string was NOT written to the file). The user said:\n{RULE}",
    "Gemini CLI, a rejected plan": f"Plan rejected. User feedback: {RULE}",
    "Qwen Code, asked": f"User has provided the following answers:\n\n**Files**: {RULE}",
    "Kimi, rejected": f"The tool call is rejected by the user. User feedback: {RULE}",
    "Cline, rejected": "The user denied this operation and provided the following feedback:\n"
    f"<feedback>\n{RULE}\n</feedback>",
    "Cline, asked": f"<answer>\n{RULE}\n</answer>",
    "of the policy": f"Boss: {RULE}",
}


def as_result(api: Api, text: str, name: str = "look") -> list[Json]:
    steps = json.dumps(api.step(77, text)).replace('"name": "look"', f'"name": "{name}"')
    made: list[Json] = json.loads(steps)
    return made


def beside_result(api: Api, text: str) -> list[Json]:
    """In Messages within the user message that brings the result; in the other APIs as a message of
    its own."""
    call, result = api.step(77, LONG)
    if api is APIS["messages"]:
        return [call, {**result, "content": [*result["content"], {"type": "text", "text": text}]}]
    return [call, result, {"role": "user", "content": text}]


def as_system(api: Api, text: str) -> list[Json]:
    return [*api.step(77, LONG), {"role": "system", "content": text}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", APIS)
def test_a_rule_of_the_user_is_in_every_later_request(name: str, text: str, mode: Mode) -> None:
    api = APIS[name]
    shapes = [
        as_result(api, TEXTS[text]),
        as_result(api, f"{LONG}\n{TEXTS[text]}"),
        beside_result(api, TEXTS[text]),
        as_system(api, TEXTS[text]),
    ]
    for probe in shapes:
        made = sent(api, probe, mode, said=("Boss:",))
        assert made.acted
        assert RULE in made.body


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", APIS)
def test_what_a_tool_asked_the_user_is_in_every_later_request(name: str, mode: Mode) -> None:
    for tool in ("AskUserQuestion", "ask_boss"):
        made = sent(APIS[name], as_result(APIS[name], RULE + LONG, tool), mode, said=("ask_boss",))
        assert made.acted
        assert RULE in made.body


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.AUTO])
@pytest.mark.parametrize("name", APIS)
def test_the_rest_of_such_a_result_moves(name: str, mode: Mode) -> None:
    api = APIS[name]
    made = sent(api, as_result(api, f"{LONG}\n{QUEUED}\n{LONG}"), mode)
    body = made.body
    assert RULE in body and body.count("a line of the result") < 20


def test_a_span_ends_with_its_tag_or_with_the_text() -> None:
    def found(text: str) -> list[str]:
        return [text[start:end] for start, end in texts.spans(text)]

    assert found(f"x\n{QUEUED}\ny") == [QUEUED]
    assert found(f"the end.{QUEUED}y") == [QUEUED]
    assert found(f"{REJECTED}\nand\n") == [f"{REJECTED}\nand\n"]
    assert found("a\n <feedback>no</feedback> b\n<answer>yes</answer>") == [
        "<feedback>no</feedback>",
        "<answer>yes</answer>",
    ]
    for quoted in (
        "grep.py:7: The user sent the following message",
        "User hints are collected.",
        "Error: <answer>",
    ):
        assert found(quoted) == []
    assert found("User hints:\n<user_input>no</user_input>")
    assert found("<feedback>without an end") == ["<feedback>without an end"]


def test_a_text_that_quotes_many_is_none() -> None:
    assert texts.spans("<feedback>no</feedback>\n" * texts.MOST)
    assert not texts.spans("<feedback>no</feedback>\n" * (texts.MOST + 1))


def test_spans_behind_the_preview_are_added_once() -> None:
    text, span = "ab <answer>c</answer>", ((3, 21),)
    shown = [replacement(text, "f", "o", 1, Shape("/s", chars), spans=span) for chars in (3, 21)]
    assert [one.count("<answer>c</answer>") for one in shown] == [1, 1]
    assert shown[0].endswith("; o)\n\n<answer>c</answer>") and shown[1].endswith("; o)")


# -- with `keep_errors`, results that report an error stay as they are in every mode ---------------

TRACE = "".join(f'  File "a.py", line {number}, in call\n' for number in range(60))


def failed(api: Api, how: str) -> list[Json]:
    call, result = api.step(77, TRACE if how == "flag" else f"{how}\n{TRACE}")
    if how == "flag" and api is APIS["messages"]:
        return [call, {**result, "content": [{**result["content"][0], "is_error": True}]}]
    if how == "flag" and api is APIS["responses"]:
        output = [{"stdout": "", "stderr": TRACE, "outcome": {"type": "exit", "exit_code": 1}}]
        shell: Json = {
            "type": "shell_call",
            "call_id": "call_77777777",
            "action": {"commands": ["make"]},
        }
        return [shell, {"type": "shell_call_output", "call_id": "call_77777777", "output": output}]
    return [call, result]


WORDS = (
    "Traceback (most recent call last):",
    "Error: no such file",
    "Exit code 2",
    '{"error": "x"}',
    "ValueError: x",
)
CASES = [
    (name, how) for name in APIS for how in ("flag", *WORDS) if (name, how) != ("chat", "flag")
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_an_error_stays_with_its_step_if_the_policy_says_so(
    name: str, how: str, mode: Mode
) -> None:
    api = APIS[name]
    whole = json.dumps(TRACE)[1:-1]
    for keep in (True, False):
        made = sent(api, failed(api, how), mode, keep_errors=keep)
        assert (whole in made.body) == keep
        assert made.acted


ERRORS = [*WORDS, "  error: x", "[ERROR] x", "fatal: not a git repository", "exited with code 3"]
OTHERS = ["", "No errors", "errors: 0", "Exit code 0", "All good, no error:", "def error(): ..."]


@pytest.mark.parametrize("text", [*ERRORS, *OTHERS])
def test_words_of_an_error(text: str) -> None:
    assert reports_error([text, "more"]) is (text in ERRORS)
    assert not reports_error([])


# -- results in user messages are known by the policy's rules in every dialect ---------------------

READING = Reading(Shape("/s", 100), 20_000, PRESETS[ResultPreset.SMOLAGENTS])


@pytest.mark.parametrize(
    "dialect", [api.dialect for api in APIS.values()], ids=lambda dialect: dialect.name
)
@pytest.mark.parametrize(
    ("texts", "carries"),
    [
        (["Observation:\nfound"], Carries.YES),
        (["Observation:\n", "found"], Carries.YES),
        (["Found"], Carries.NO),
        (["Observation:\nfound\nNew task:\nNever write to /etc."], Carries.NO),
        (["Observation:\nfound", "\nNew task:\nNever write to /etc."], Carries.NO),
    ],
)
def test_observations_are_results(dialect: Dialect, texts: list[str], carries: Carries) -> None:
    kind = "input_text" if dialect.name == "responses" else "text"
    content: Any = [{"type": kind, "text": text} for text in texts]
    assert (
        dialect.read(
            json.dumps({"role": "user", "content": content}).encode(), READING, len
        ).carries
        is carries
    )
