"""The names that models write for our tools, and those that mean a tool of the client's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.reply import AFTER, BEFORE, ToolNames

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
    for end in range(len(written) + 1):
        assert NAMES.could_become(written[:end]), written[:end]


@pytest.mark.parametrize("written", NOT_OURS)
def test_a_name_that_is_none_of_ours(written: str) -> None:
    assert NAMES.recognised(written) == ""


@pytest.mark.parametrize("written", ["search", "grep_", "my.", "fund", "read_file<|channel|>x", "x" * 1000])
def test_a_beginning_that_need_not_be_held_back(written: str) -> None:
    assert not NAMES.could_become(written)


def test_without_tools_of_ours_every_name_is_the_clients() -> None:
    nobody = ToolNames((), {"grep"})
    assert not nobody and not nobody.could_become("") and not nobody.recognised("grep")


WORDS = st.sampled_from([*sorted(BEFORE | AFTER), "grep", "Read_File", "search", "0", "x"])
BETWEEN = st.sampled_from([".", ":", "<|", "|>", " ", "/", "", "="])


@given(st.lists(st.tuples(WORDS, BETWEEN), max_size=6))
def test_what_is_ours_in_the_end_was_held_back_all_along(pieces: list[tuple[str, str]]) -> None:
    name = "".join(word + between for word, between in pieces)
    if NAMES.recognised(name):
        assert all(NAMES.could_become(name[:end]) for end in range(len(name) + 1))


def test_a_name_in_another_case_is_not_ours_if_the_client_has_such_a_tool() -> None:
    names = ToolNames(("grep", "read_file"), {"Grep"})
    assert [names.recognised(name) for name in ("Grep", "GREP", "functions.GREP")] == ["", "", ""]
    assert [names.recognised(name) for name in ("grep", "functions.grep", "Read_file")] == ["grep", "grep", "read_file"]
