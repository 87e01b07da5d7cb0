"""What the model is told when it calls `grep` or `read_file`. A token is a character here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import regex
from proxy.plan.preview import Label
from proxy.plan.summary import Section, originals
from proxy.tools.answer import (
    BUDGET_USED_UP,
    LEAST_CHARS,
    LEAST_LINES,
    MAX_MATCHES,
    MISSING,
    NOTHING_MOVED,
    Material,
    Result,
    ToolAnswer,
    answer,
)
from proxy.tools.definitions import NAMES, OTHER_NAMES, Tool, definitions, parsed
from proxy.tools.find import Index
from tests.doubling import assert_linear

STORE = "/context_store"
F = f"{STORE}/f"
LOG = f"{STORE}/billing.log.5f2c9a1b.txt"
DATA = f"{STORE}/codes.json.01234567.txt"
FILES = {
    LOG: "start\nerror E471 here\r\nfine\nError E4712\nerror E47\n",
    DATA: '{"code": "E470", "filler": "' + "x" * 900 + '", "last": "E479"}',
    f"{STORE}/empty.txt": "",
}
LABELS = {
    LOG: Label(
        "billing.log",
        "result of cat",
        "result of cat /var/log/billing.log",
        ("/var/log/billing.log", "cat"),
    ),
    DATA: Label("codes.json", "result of cat", "result of cat codes.json", ("codes.json", "cat")),
}
OFFSETS = "(line numbers are read_file's offset)"


def material(files: Mapping[str, str] = FILES, budget: int = 100_000, **options: Any) -> Material:
    labels = LABELS if list(files) == list(FILES) else {}
    return Material(files, Index(files, labels, STORE), budget, len, regex.compile, **options)


def ask(
    tool: Tool, files: Mapping[str, str] = FILES, budget: int = 100_000, **arguments: Any
) -> ToolAnswer:
    return answer(parsed(tool, msgspec.json.encode(arguments)), material(files, budget))


def grep(files: Mapping[str, str] = FILES, budget: int = 100_000, **arguments: Any) -> str:
    return ask("grep", files, budget, **arguments).text


def read(files: Mapping[str, str] = FILES, budget: int = 100_000, **arguments: Any) -> str:
    return ask("read_file", files, budget, **arguments).text


AROUND = """\
File: billing.log.5f2c9a1b.txt (result of cat /var/log/billing.log)
0- start
1: error E471 here
2- fine
3: Error E4712
4- error E47
---"""


def test_grep_in_one_file_and_everywhere() -> None:
    text = f'Found 2 matches for pattern "E47\\d+" in path "{LOG}" {OFFSETS}:\n---\n{AROUND}'
    assert ask("grep", pattern=r"E47\d+", path=LOG) == ToolAnswer(text, "ok", len(text))
    assert grep(pattern="e47[19]") == (
        f'Found 3 matches for pattern "e47[19]" in path "{STORE}" {OFFSETS}:\n---\n{AROUND}\n'
        f"File: codes.json.01234567.txt (result of cat codes.json)\n0, column 940: …{FILES[DATA][790:]}\n---"
    )


def test_a_name_of_a_call_begins_reading_originals_at_that_call() -> None:
    log, config = (
        "\n".join(f"line {number}" for number in range(40)),
        '"conf/app.json" calls itself\n### so',
    )
    said = [
        ("1 user", "read it"),
        ("3 assistant calls read_log call_0", '{"path": "/var/log/b.log"}'),
    ]
    said += [
        ("4 tool call_0 read_log", log),
        ("5 assistant calls show call_1", '{"path": "conf/app.json"}'),
    ]
    turns = [Section(*each) for each in [*said, ("6 tool call_1 show", config)]]
    group, label = (
        f"{STORE}/compressed_group_0123.txt",
        Label("", "", "", ("conf/app.json", "/var/log/b.log")),
    )
    files = {group: originals(turns)}
    whole = Material(files, Index(files, {group: label}, STORE), 100_000, len, regex.compile)

    def first(**given: Any) -> str:
        return answer(parsed("read_file", msgspec.json.encode(given)), whole).text.removeprefix(
            f"[this is {group}]\n"
        )

    assert first(path="conf/app.json").startswith("### 5 assistant calls show call_1\n")
    assert first(path="/var/log/b.log").startswith("### 3 assistant calls read_log call_0\n")
    assert first(path=group).startswith("### 1 user\n")
    assert first(path="conf/app.json", offset=0).startswith("### 1 user\n")


def test_few_matches_come_with_three_lines_around_each() -> None:
    lines = [f"line {number}" for number in range(30)]
    lines[1] = lines[20] = "needle"
    lines[18] = "y" * 300
    shown = grep({F: "\n".join(lines)}, pattern="needle").splitlines()[3:-1]
    assert shown == [
        "0- line 0", "1: needle", "2- line 2", "3- line 3", "4- line 4", "…",
        "17- line 17", "18- " + "y" * 200 + "…", "19- line 19", "20: needle", "21- line 21", "22- line 22",
        "23- line 23",
    ]  # fmt: skip
    many = grep({F: "\n".join([*lines, *["needle"] * 4])}, pattern="needle").splitlines()[3:-1]
    assert many == [
        "1: needle",
        "20: needle",
        "30: needle",
        "31: needle",
        "32: needle",
        "33: needle",
    ]


def test_a_search_goes_on_elsewhere_before_it_says_no() -> None:
    text = grep(pattern="filler", path=LOG)
    whole = (
        AROUND.replace("billing.log)", "billing.log), all of it")
        .replace("1:", "1-")
        .replace("3:", "3-")
    )
    elsewhere = f"Found 1 match in everything else that was moved {OFFSETS}:"
    assert text.startswith(
        f'No matches for pattern "filler" in path "{LOG}".\n---\n{whole}\n{elsewhere}\n---\n'
        "File: codes.json.01234567.txt (result of cat codes.json)\n0, column 18: "
    )
    assert ask("grep", budget=len(text) - 1, pattern="filler", path=LOG).text.startswith(
        f'No matches for pattern "filler" in path "{LOG}". {elsewhere}'
    )


def test_a_short_named_file_without_a_match_is_shown() -> None:
    told = ask("grep", pattern="zebra", path=LOG)
    assert told.result == "empty"
    assert told.text.startswith(
        f'No matches for pattern "zebra" in path "{LOG}", nor in anything else that was moved.\n---\n'
    )
    assert "2- fine\n" in told.text
    long = {F: "x\n" * 41, f"{STORE}/g": "y" * 3_001}
    assert "all of it" not in grep(long, pattern="zebra", path=F) + grep(
        long, pattern="zebra", path=f"{STORE}/g"
    )


@pytest.mark.parametrize("arguments", [{"path": "/etc/app.conf"}, {"glob": "*.py"}])
def test_a_search_in_nothing_searches_everything_and_says_so(arguments: dict[str, str]) -> None:
    text = grep(pattern="fine", **arguments)
    missing = MISSING.format(path="/etc/app.conf")
    reason = missing if "path" in arguments else f'No file in "{STORE}" fits the glob "*.py".'
    assert text.startswith(
        f'{reason} Found 1 match for pattern "fine" in everything that was moved {OFFSETS}:'
    )
    assert "2: fine" in text
    assert grep(pattern="E47", path="cat").count("\nFile: ") == 2, "a word for several files"


@pytest.mark.parametrize("glob", ["billing*", "*.log"])
def test_grep_with_a_glob(glob: str) -> None:
    head = (
        f'Found 1 match for pattern "fine" in path "context_store/" (filter: "{glob}") {OFFSETS}:'
    )
    text = grep(pattern="fine", glob=glob, path="context_store/")
    assert text.startswith(
        f"{head}\n---\nFile: billing.log.5f2c9a1b.txt (result of cat /var/log/billing.log)\n0- start\n"
    )


def test_grep_up_to_a_limit() -> None:
    assert (
        grep(pattern="e", path=LOG, limit=2)
        == f"""\
Found 4 matches for pattern "e" in path "/context_store/billing.log.5f2c9a1b.txt" {OFFSETS}:
---
File: billing.log.5f2c9a1b.txt (result of cat /var/log/billing.log)
1: error E471 here
2: fine
---
[first 2 of 4 matches; for the rest send a larger limit, or narrow the pattern, the path or the glob]"""
    )
    text = grep({F: "x\n" * 60}, pattern="x")
    assert (
        "50: x" not in text and "[first 50 of 60 matches; for the rest send a larger limit" in text
    )


def test_grep_stops_counting_at_its_limit() -> None:
    files = {F: "x\n" * (MAX_MATCHES + 1)}
    for limit, shown in (({}, 50), ({"limit": 10**18}, MAX_MATCHES)):
        text = grep(files, pattern="x", **limit)
        assert (
            text.startswith(f'Found {MAX_MATCHES}+ matches for pattern "x"')
            and f"{shown - 1}: x" in text
        )
        larger = "" if limit else "send a larger limit, or "
        rest = f"for the rest {larger}narrow the pattern, the path or the glob"
        assert text.endswith(f"[first {shown} of 1000+ matches; {rest}]")
    exact = grep({F: "x\n" * MAX_MATCHES}, pattern="x", limit=MAX_MATCHES)
    assert exact.startswith(f"Found {MAX_MATCHES} matches") and exact.endswith("---")


def test_grep_answers_stay_within_their_budget() -> None:
    files = {F: "".join(f"needle {number}\n" for number in range(100))}
    text = grep(files, budget=400, pattern="needle")
    assert 300 < len(text) <= 400
    shown = text.count(": needle ")
    assert text.startswith('Found 100 matches for pattern "needle"')
    assert text.endswith(
        f"[first {shown} of 100 matches; for the rest narrow the pattern, the path or the glob]"
    )


def test_grep_with_a_budget_too_small_for_any_match() -> None:
    files = {F: "x" * 400}
    told = ask("grep", files, 200, pattern="x")
    assert told.text.endswith(
        "---\n[first 0 of 1 matches; for the rest narrow the pattern, the path or the glob]"
    )
    assert ask("grep", files, 60, pattern="x") == ToolAnswer(
        BUDGET_USED_UP, "budget", len(BUDGET_USED_UP)
    )


def test_text_that_looks_like_a_footer_is_shown_with_line_numbers() -> None:
    lines = grep({F: "---\nFile: g\n9: x\n[lines 0-1 of 2]"}, pattern=".").splitlines()[1:]
    assert lines == [
        "---",
        "File: f",
        "0: ---",
        "1: File: g",
        "2: 9: x",
        "3: [lines 0-1 of 2]",
        "---",
    ]


def test_a_file_that_was_called_by_another_word_says_what_it_is() -> None:
    head = f"[this is {LOG}: result of cat /var/log/billing.log]\n"
    assert read(path="/var/log/billing.log") == head + FILES[LOG]
    assert (
        read(path="/var/log/billing.log", offset=9)
        == head + "[lines 0-4 of 5; offset 9 is past the end]"
    )


def test_a_word_for_several_files_gets_their_list() -> None:
    told = ask("read_file", path="cat")
    assert (told.result, told.text) == (
        "refused",
        f'"cat" may mean 2 files: send the path of one of them. Files:\n{LOG}: result of cat /var/log/billing.log\n'
        f"{DATA}: result of cat codes.json",
    )


MANY = {F: "".join(f"line {number}\n" for number in range(100))}


@pytest.mark.parametrize("limit", [1, 29, 30])
def test_a_call_for_few_lines_gets_more(limit: int) -> None:
    lines = "".join(f"line {number}\n" for number in range(50, 50 + LEAST_LINES))
    assert read(MANY, path=F, offset=50, limit=limit) == f"{lines}[lines 50-79 of 100]"


def test_a_call_for_few_lines_gets_no_more_than_its_share_of_long_ones() -> None:
    files = {F: ("x" * 999 + "\n") * 9 + "y" * 9_999 + "\n" + "z" * 9_999}
    assert read(files, path=F, offset=0, limit=1).count("x\n") == LEAST_CHARS // 1_000
    assert read(files, path=F, offset=9, limit=1) == "y" * 9_999 + "\n[lines 9-9 of 11]"
    assert read(files, path=F, offset=9, limit=1, column=9_000) == "y" * 999 + "\n[lines 9-9 of 11]"
    assert read(files, path=F, offset=10, limit=1, column=9_990) == "z" * 9


def test_only_a_page_that_the_budget_cut_says_how_to_continue() -> None:
    assert read(MANY, path=F, limit=60).endswith("line 59\n[lines 0-59 of 100]")
    cut = read(MANY, 400, path=F, limit=60)
    assert re.search(rf'continue with read_file\(path="{F}", offset=\d+\)\]$', cut)
    assert read(MANY, path=F, offset=40, limit=60).endswith("line 99\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"offset": 4}, "error E47\n"),
        ({"offset": "4", "limit": "1"}, "error E47\n"),
        ({"offset": 4.0, "limit": None, "column": ""}, "error E47\n"),
        ({"offset": 4, "column": 6}, "E47\n"),
        ({"offset": 4, "limit": 10**18}, "error E47\n"),
        ({"offset": 5}, "[lines 0-4 of 5; offset 5 is past the end]"),
        ({"offset": 1e300}, "[lines 0-4 of 5; offset 9223372036854775807 is past the end]"),
        ({"offset": 2, "column": 5}, "[lines 2-2 of 5; column 5 is past the end of line 2]"),
    ],
)
def test_read_a_part(arguments: dict[str, Any], text: str) -> None:
    assert read(path=LOG, **arguments) == text


def test_empty_results_say_that_they_are_empty() -> None:
    assert ask("read_file", path="empty.txt").result == "empty"
    assert read(path="empty.txt") == "[lines 0 of 0; the file is empty]"
    assert ask("read_file", path=LOG, offset=9).result == "empty"


def test_the_call_to_continue_uses_the_tool_name_that_the_model_knows() -> None:
    told = answer(parsed("read_file", f'{{"path": "{F}"}}'), material(MANY, 200, names=OTHER_NAMES))
    assert f'continue with offload_read_file(path="{F}", offset=' in told.text


LISTED = f"Files:\n{LOG}: result of cat /var/log/billing.log\n{DATA}: result of cat codes.json\n{STORE}/empty.txt"
GREP_TAKES = "grep takes one JSON object with pattern, path, glob, limit; only pattern is required."
READ_TAKES = (
    "read_file takes one JSON object with path, offset, limit, column; only path is required."
)


@pytest.mark.parametrize(
    ("tool", "arguments", "result", "text"),
    [
        ("grep", "", "refused", '"pattern" is missing or empty: send a regular expression'),
        ("grep", "{}", "refused", '"pattern" is missing or empty'),
        ("grep", '{"pattern": ""}', "refused", '"pattern" is missing or empty'),
        ("grep", '{"pattern": 7}', "refused", '"pattern" must be a string'),
        ("grep", '{"pattern": "(?<x"}', "refused", "This pattern cannot be used: "),
        ("grep", b'{"pattern": "zebra"}', "empty", f'No matches for pattern "zebra" in path "{STORE}". {LISTED}'),
        (
            "grep",
            '{"pattern": "zebra", "path": "/etc"}',
            "empty",
            'Nothing that was moved out of this conversation has a match for pattern "zebra".'
            f" {MISSING.format(path='/etc')} {LISTED}",
        ),
        (
            "grep",
            '{"pattern": "zebra", "glob": "*.py"}',
            "empty",
            'Nothing that was moved out of this conversation has a match for pattern "zebra".'
            f' No file in "{STORE}" fits the glob "*.py". {LISTED}',
        ),
        ("grep", '{"pattern": "x", "path": 7}', "refused", '"path" must be a string'),
        ("grep", '{"pattern": "x", "limit": 1.5}', "refused", '"limit" must be a whole number, 0 or more.'),
        ("grep", '{"pattern": "x", "limit": true}', "refused", '"limit" must be'),
        ("grep", '{"pattern": "x", "limit": "many"}', "refused", '"limit" must be'),
        ("grep", '{"pattern": "x", "limit": {}}', "refused", '"limit" must be'),
        ("grep", '{"pattern": "x"', "refused", f"The arguments cannot be read as JSON. {GREP_TAKES}"),
        ("grep", "[" * 100_000, "refused", "The arguments cannot be read as JSON"),
        ("grep", b'{"pattern": "\xff"}', "refused", "The arguments cannot be read as JSON"),
        ("grep", '{"pattern": "\ud800"}', "refused", "The arguments cannot be read as JSON"),
        ("grep", "[]", "refused", f"The arguments are not a JSON object. {GREP_TAKES}"),
        ("grep", '"{x"', "refused", f"The arguments cannot be read as JSON. {GREP_TAKES}"),
        ("read_file", "null", "refused", f"The arguments are not a JSON object. {READ_TAKES}"),
        ("read_file", "{}", "refused", f'"path" is missing: send the path of a file. {LISTED}'),
        ("read_file", '{"path": "./"}', "refused", f'"./" may mean 3 files: send the path of one of them. {LISTED}'),
        ("read_file", '{"path": "nowhere\\u0000"}', "refused", f"{MISSING.format(path='nowhere' + chr(0))} {LISTED}"),
        ("read_file", '{"path": "' + "y" * 999 + '"}', "refused", MISSING.format(path="y" * 200 + "…") + " " + LISTED),
        ("read_file", '{"path": "' + "y" * 1001 + '"}', "refused", '"path" must be a string of at most 1000 char'),
        ("read_file", f'{{"path": "{LOG}", "offset": -1}}', "refused", '"offset" must be a whole number, 0 or more.'),
        ("read_file", f'{{"path": "{LOG}", "offset": "-1"}}', "refused", '"offset" must be'),
        ("read_file", f'{{"path": "{LOG}", "column": "9999999999999999999"}}', "refused", '"column" must be'),
        ("read_file", f'{{"path": "{LOG}", "limit": {"9" * 5000}}}', "refused", "The arguments cannot be read"),
    ],
)  # fmt: skip
def test_useless_arguments_are_answered_with_the_reason(
    tool: Tool, arguments: str | bytes, result: Result, text: str
) -> None:
    told = answer(parsed(tool, arguments), material())
    assert told.result == result
    assert told.text.startswith(text)
    assert told.tokens == len(told.text)


def test_the_list_of_files_is_bounded() -> None:
    files = {f"{STORE}/{number}.txt": "x" for number in range(100)}
    assert read(files, path="y").endswith(f"{STORE}/19.txt\nand 80 more")
    assert read(files, budget=300, path="y").endswith(f"{STORE}/4.txt\nand 95 more")
    assert read(files, budget=130, path="y") == f"{MISSING.format(path='y')} 100 files exist."
    assert ask("read_file", files, 30, path="y").result == "budget"


@pytest.mark.parametrize("path", ["y", STORE, LOG])
def test_a_model_learns_that_nothing_was_moved(path: str) -> None:
    assert read({}, path=path) == ask("grep", {}, pattern="x", path=path).text == NOTHING_MOVED
    assert ask("grep", {}, pattern="x").text == NOTHING_MOVED


def test_only_the_requested_file_is_loaded() -> None:
    class Lazy(Mapping[str, str]):
        def __getitem__(self, path: str) -> str:
            assert path == LOG
            return FILES[path]

        def __iter__(self) -> Iterator[str]:
            return iter(FILES)

        def __len__(self) -> int:
            return len(FILES)

    assert read(Lazy(), path=LOG) == FILES[LOG]
    assert "2: fine" in grep(Lazy(), pattern="fine", path=LOG)
    assert "2: fine" in grep(Lazy(), pattern="fine", glob="billing*")


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just(LOG)
    | st.just(".")
)
KEYS = st.sampled_from(["pattern", "path", "glob", "offset", "limit", "column"]) | st.text()
JSON = st.recursive(
    VALUES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8
)


@given(
    tool=st.sampled_from(NAMES),
    arguments=(JSON | st.dictionaries(KEYS, JSON)).map(msgspec.json.encode)
    | st.binary()
    | st.text(),
    budget=st.integers(-1, 500),
)
def test_arbitrary_arguments_are_answered_within_the_budget(
    tool: Tool, arguments: str | bytes, budget: int
) -> None:
    told = answer(parsed(tool, arguments), material(budget=budget))
    assert told.tokens == len(told.text)
    assert told.tokens <= budget or told == ToolAnswer(
        BUDGET_USED_UP, "budget", len(BUDGET_USED_UP)
    )


@pytest.mark.parametrize("others", [False, True])
def test_strict_definitions_are_the_same_tools_without_an_optional_parameter(others: bool) -> None:
    usual = map(msgspec.json.decode, definitions(NAMES, STORE, others=others))
    strict = map(msgspec.json.decode, definitions(NAMES, STORE, others=others, strict=True))
    for loose, made in zip(usual, strict, strict=True):
        assert made.pop("strict") is True and "strict" not in loose
        parameters, required = made["parameters"], loose["parameters"].pop("required")
        assert parameters.pop("required") == list(parameters["properties"]) != required
        assert parameters.pop("additionalProperties") is False
        assert made.pop("description").startswith(loose.pop("description"))
        assert made == loose


@pytest.mark.parametrize(
    ("tool", "needed", "empty"),
    [
        ("grep", {"pattern": "x"}, {"path": "", "glob": "", "limit": 0}),
        ("read_file", {"path": "x"}, {"offset": 0, "limit": 0, "column": 0}),
    ],
)
def test_a_strict_call_with_empty_parameters_is_the_call_without_them(
    tool: Tool, needed: dict[str, Any], empty: dict[str, Any]
) -> None:
    without = parsed(tool, msgspec.json.encode(needed))
    made = parsed(tool, msgspec.json.encode(needed | empty))
    assert answer(made, material()) == answer(without, material())


@pytest.mark.parametrize("names", [NAMES, OTHER_NAMES])
def test_tool_definitions_have_this_exact_form(names: tuple[str, str]) -> None:
    raw = definitions(names, STORE)
    assert raw == definitions(names, STORE)
    takes = {
        "pattern": ["pattern", "path", "glob", "limit"],
        "path": ["path", "offset", "limit", "column"],
    }
    for name, tool, (required, properties) in zip(
        names, map(msgspec.json.decode, raw), takes.items(), strict=True
    ):
        assert list(tool) == ["name", "description", "parameters"] and tool["name"] == name
        assert STORE in tool["description"]
        assert tool["parameters"]["type"] == "object" and tool["parameters"]["required"] == [
            required
        ]
        assert list(tool["parameters"]["properties"]) == properties
        assert {value["type"] for value in tool["parameters"]["properties"].values()} == {
            "string",
            "integer",
        }
    said = b"".join(raw).decode()
    assert f"Only {names[0]} and {names[1]} know {STORE}" in said
    assert "its call's path, URL or command" in said
    for tool in map(msgspec.json.decode, raw):
        hints = [value["description"] for value in tool["parameters"]["properties"].values()]
        assert all(hints) and len(hints) == 4


@pytest.mark.parametrize(
    "text", ["word of text " * 30_000, "ab\n" * 100_000], ids=["one line", "lines"]
)
def test_reading_a_page_is_linear_in_the_file(text: str) -> None:
    def work(text: str) -> None:
        for number in range(30):
            place = (
                {"column": len(text) // 2 + number}
                if text[2] != "\n"
                else {"offset": len(text) // 6 + number}
            )
            assert ask("read_file", {F: text}, 1_000, path=F, **place).result == "ok"

    assert_linear(work, text, text * 2)
