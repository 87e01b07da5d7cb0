"""Which part of a moved text stays: it tells what left, whatever stood around it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan.glimpse import GAP, beginning, glimpse, opened
from tests.doubling import assert_linear

LOG = "09:00 worker started\n09:01 disk is full on host_17\n" * 20


@pytest.mark.parametrize(
    "wrapped",
    [
        json.dumps({"type": "text", "text": LOG}),
        json.dumps([{"type": "text", "text": LOG, "annotations": None}]),
        json.dumps({"content": [{"type": "text", "text": LOG}], "isError": False}, indent=1),
        json.dumps({"output": LOG, "metadata": {"exit_code": 0, "duration_seconds": 0.2}}),
        json.dumps(LOG),
        f"meta=None content=[TextContent(type='text', text={LOG!r}, annotations=None)] isError=False",
    ],
    ids=["block", "blocks", "MCP", "Codex", "string", "Python"],
)
def test_a_wrapper_is_opened(wrapped: str) -> None:
    assert opened(wrapped) == LOG


def test_the_blocks_of_a_wrapper_follow_one_another() -> None:
    blocks = [{"type": "text", "text": LOG}, {"type": "text", "text": "and the rest"}]
    assert opened(json.dumps(blocks)) == f"{LOG}\nand the rest"


@pytest.mark.parametrize(
    "text",
    [
        LOG,
        json.dumps([{"flight": "HAT057", "origin": "JFK", "text": "late"}] * 20),
        json.dumps({"rows": [1, 2, 3], "content": "three rows"}),
        json.dumps(
            {"content": [{"type": "text", "text": LOG}, {"type": "image", "data": "iVBO" * 300}]}
        ),
        '{"content": "cut off in the mid',
        '"""A docstring."""\nimport os\n',
        "[File: /src/app.py (146 lines total)]\n1:import os",
        "",
    ],
)
def test_what_is_no_wrapper_stays_as_it_is(text: str) -> None:
    assert opened(text) is text


NOISE = {
    "pip": "Looking in indexes: internal\nCollecting torch==1.13\n  Downloading torch-1.13.whl (890 MB)\n",
    "Python": "/lib/magics/osm.py:417: UserWarning: This is now an optional feature.\n  self.shell.db\n",
    "npm": "npm warn deprecated glob@7: no longer supported\n\n",
    "tqdm": "Downloading config.json:   0%|          | 0.00/665 [00:00<?, ?B/s]\n100%|██████████| 665/665\n",
    "apt": "0% [Working]\nGet:1 http://deb.example bookworm InRelease\nReading package lists...\n",
    "compiler": "warning: unused variable `x`\n",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_warnings_and_progress_do_not_come_first(noise: str) -> None:
    found = beginning(f"{noise}FAILED tests/test_app.py::test_total\n{LOG}", 100)
    assert found.startswith("[...] FAILED tests/test_app.py::test_total")
    assert len(found) == 100


@pytest.mark.parametrize(
    "text",
    [
        LOG,
        "2026-01-01 12:00 WARNING disk is nearly full\n" * 9,
        "100 % of the users agree.\nThe rest",
        NOISE["pip"],
        "warning",
    ],
    ids=["log", "a log of warnings", "prose", "nothing but noise", "one line"],
)
def test_other_texts_begin_where_they_begin(text: str) -> None:
    assert beginning(text, 100) == text[:100]


IMPORTS = "".join(f"{line}:import m{line}\n" for line in range(200))
CLASSES = "".join(
    f"{line}:class Part{line}:\n{line + 1}:    def run(self):\n{line + 2}:        x = {line}\n"
    for line in range(200, 320, 3)
)
CODE = IMPORTS + CLASSES


def test_of_code_its_beginning_and_what_it_defines_stay() -> None:
    found = glimpse(CODE, 2_000)
    assert len(found) <= 2_000
    head, lines = found.split(GAP)
    assert CODE.startswith(head)
    assert "317:class Part317:" in lines.split("\n")
    assert not [line for line in lines.split("\n") if "class" not in line and "def" not in line]


def test_of_code_without_numbers_outer_definitions_come_first() -> None:
    code = "import os\n" * 200 + "class Part:\n    def run(self):\n        return 1\n" * 100
    _, lines = glimpse(code, 2_000).split(GAP)
    assert set(lines.split("\n")) == {"class Part:"}


@pytest.mark.parametrize("behind", [":", "\t", "\u2192", " | "])
@pytest.mark.parametrize("indent", ["    ", "\t"])
def test_of_numbered_code_outer_definitions_come_first(behind: str, indent: str) -> None:
    code = "import os\n" * 200 + f"class Part:\n{indent}def run(self):\n" * 100
    lines = [f"{number}{behind}{line}" for number, line in enumerate(code.splitlines(), 1)]
    _, shown = glimpse("\n".join(lines), 2_000).split(GAP)
    assert "class" in shown and "def" not in shown


@pytest.mark.parametrize("blank", [" ", "\t", "1\t"])
def test_a_line_of_white_space_takes_linear_time(blank: str) -> None:
    """One look at it holds the interpreter's lock."""
    assert_linear(lambda times: glimpse("a\n" + blank + blank[-1] * times + "x", 100), 1_000, 2_000)


@pytest.mark.parametrize(
    "line",
    ["def total(rows):", "export async function total(rows) {", "pub(crate) fn total() -> u32 {", "func Total() int {",
     "   120\tclass Total(Base):", "public static final class Total {", "type Total = number"],
)  # fmt: skip
def test_a_definition_is_known_in_each_language(line: str) -> None:
    found = glimpse("x = 1\n" * 300 + f"{line}\n" * 6 + "x = 2\n" * 250, 2_000)
    assert found.endswith(line)


def test_of_anything_else_beginning_and_end_stay() -> None:
    text = f"first line\n{LOG * 9}42 failed, 7 passed"
    found = glimpse(text, 2_000)
    assert len(found) <= 2_000
    assert found.startswith("first line") and found.endswith("42 failed, 7 passed")


@given(st.text(max_size=400), st.integers(20, 200))
def test_no_preview_is_longer_than_asked(text: str, chars: int) -> None:
    assert len(beginning(text, chars)) <= chars
    assert len(glimpse(opened(text), chars)) <= chars
