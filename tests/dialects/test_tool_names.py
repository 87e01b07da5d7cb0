"""The names that models write for our tools, and those that mean a tool of the client's."""

from __future__ import annotations

import pytest

from proxy.dialects.reply import ToolNames

NAMES = ToolNames(("grep", "read_file"), {"search", "functions.grep"})

OURS = {
    "grep": "grep",
    "functions.read_file": "read_file",
    "functions.read_file:12": "read_file",
    "function.grep": "grep",
    "tools.read_file": "read_file",
    "tools/grep": "grep",
    "default_api.read_file": "read_file",
    "default_api:read_file": "read_file",
    "read_file<|channel|>commentary": "read_file",
    "functions.read_file<|channel|>commentary json": "read_file",
    "read_file <|constrain|>json": "read_file",
    "read_file<|message|>": "read_file",
    "assistant<|channel|>commentary to=functions.read_file": "read_file",
    " grep\n": "grep",
    '"grep"': "grep",
    "grep()": "grep",
    "Grep": "grep",
    "READ_FILE": "read_file",
    "Functions.Read_File<|Channel|>commentary": "read_file",
}
NOT_OURS = [
    "search",
    "functions.grep",
    "functions.search",
    "functions.",
    "functions",
    "",
    "grep_all",
    "my.grep",
    "filesystem.read_file",
    "grep.search",
    "read_files",
    "read_file<|channel|>search",
    "mcp__read_file",
    "functions." * 40 + "read_file",
]


@pytest.mark.parametrize(("written", "meant"), OURS.items())
def test_a_name_with_what_models_put_around_it(written: str, meant: str) -> None:
    assert NAMES.recognised(written) == meant
    assert not any(NAMES.excludes(written[:end]) for end in range(len(written) + 1))


@pytest.mark.parametrize("written", NOT_OURS)
def test_a_name_that_is_none_of_ours(written: str) -> None:
    assert NAMES.recognised(written) == ""


def test_what_cannot_become_one_of_ours() -> None:
    written = {
        "search": True,
        "grep_": True,
        "fund": True,
        "re": False,
        "functions": False,
        "my.": False,
        "": False,
    }
    assert {name: NAMES.excludes(name) for name in written} == written
    assert ToolNames(()).excludes("")


@pytest.mark.parametrize("part", ["functions.", "<|", "channel ", "to ", "x"])
def test_long_names_take_linear_time(part: str) -> None:
    for name in (part * 80 + "?", part * 80):
        assert NAMES.recognised(name[:200]) == ""


def test_a_name_in_another_case_is_not_ours_if_the_client_has_such_a_tool() -> None:
    names = ToolNames(("grep", "read_file"), {"Grep"})
    assert [names.recognised(name) for name in ("Grep", "GREP", "functions.GREP")] == ["", "", ""]
    assert [names.recognised(name) for name in ("grep", "functions.grep", "Read_file")] == [
        "grep",
        "grep",
        "read_file",
    ]
