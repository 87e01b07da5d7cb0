"""With `keep_errors`, results that report an error stay as they are in every mode."""

from __future__ import annotations

import json

import pytest

from proxy.plan.texts import reports_error
from proxy.policy import Mode
from tests.dialects.test_known import APIS, MODES, Api, Json, sent

TRACE = "".join(f'  File "a.py", line {number}, in call\n' for number in range(60))


def failed(api: Api, how: str) -> list[Json]:
    call, result = api.step(77, TRACE if how == "flag" else f"{how}\n{TRACE}")
    if how == "flag" and api is APIS["messages"]:
        return [call, {**result, "content": [{**result["content"][0], "is_error": True}]}]
    if how == "flag" and api is APIS["responses"]:
        output = [{"stdout": "", "stderr": TRACE, "outcome": {"type": "exit", "exit_code": 1}}]
        shell: Json = {"type": "shell_call", "call_id": "call_77777777", "action": {"commands": ["make"]}}
        return [shell, {"type": "shell_call_output", "call_id": "call_77777777", "output": output}]
    return [call, result]


WORDS = ("Traceback (most recent call last):", "Error: no such file", "Exit code 2", '{"error": "x"}', "ValueError: x")
CASES = [(name, how) for name in APIS for how in ("flag", *WORDS) if (name, how) != ("chat", "flag")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_an_error_stays_with_its_step_if_the_policy_says_so(name: str, how: str, mode: Mode) -> None:
    api = APIS[name]
    history = api.within(failed(api, how))
    whole = json.dumps(TRACE)[1:-1]
    for keep in (True, False):
        made = sent(api, history, mode, keep_errors=keep)
        assert (whole in made.entries[0].decode()) == keep
        assert made.cut if mode is Mode.COMPRESS else made.moved


ERRORS = [*WORDS, "  error: x", "[ERROR] x", "fatal: not a git repository", "exited with code 3"]
OTHERS = ["", "No errors", "errors: 0", "Exit code 0", "All good, no error:", "def error(): ..."]


@pytest.mark.parametrize("text", [*ERRORS, *OTHERS])
def test_words_of_an_error(text: str) -> None:
    assert reports_error([text, "more"]) is (text in ERRORS)
    assert not reports_error([])
