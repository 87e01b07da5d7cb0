"""What a model returns is hostile input: only a closed, small, harmless record is taken."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan import summary
from proxy.plan.plan import Role
from proxy.plan.summary import Section
from tests.doubling import assert_linear


def test_the_snapshot_block_has_this_exact_text() -> None:
    assert summary.block("TEXT", 15, "/context_store/compressed_group_77d0e1f2a3b4.txt") == (
        summary.NOTICE + "\n\n<state_snapshot>\nTEXT\n</state_snapshot>\n"
        "(Original 15 messages are stored in: /context_store/compressed_group_77d0e1f2a3b4.txt)"
    )


def test_a_later_snapshot_names_the_files_of_the_earlier_ones() -> None:
    paths = [f"/s/{number}.txt" for number in range(8)]
    assert "(The messages before those: /s/1.txt, /s/0.txt)\n(Original 15" in summary.block("T", 15, "/s/n", paths[:2])
    assert "/s/2.txt and 2 older files beside them)" in summary.block("TEXT", 15, "/s/n", paths)


def test_the_originals_file_is_named_after_the_history() -> None:
    assert summary.file_name(bytes.fromhex("77d0e1f2a3b4c5d6e7")) == "compressed_group_77d0e1f2a3b4c5d6.txt"


def test_originals_consist_of_headers_and_texts() -> None:
    turns = [Section("12 tool call_17 web_search", "found\r\n"), Section("13 user", "")]
    assert summary.originals(turns) == "### 12 tool call_17 web_search\nfound\r\n\n### 13 user\n"


@given(st.text(alphabet="=a\n", max_size=60), st.text(alphabet="=b", max_size=20))
def test_no_history_can_close_its_own_fence_and_the_task_comes_last(history: str, earlier: str) -> None:
    text = summary.fenced(history, earlier, "TASK")
    fence = text.split("\n")[1]
    assert fence.startswith("===") and fence.endswith("===")
    assert fence not in history and fence not in earlier
    assert text.endswith(f"\n{fence}\n\nTASK")


def test_a_retry_of_a_summary_names_the_fault() -> None:
    assert "it has no closed tag" in summary.task(1500, "/context_store", "it has no closed tag")
    assert "about 750 words" in summary.task(1500, "/context_store")


# -- a history in few calls ------------------------------------------------------------------------------------------


def words(text: str) -> int:
    """Stands for tokens: words, and what is between them."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def size(groups: list[list[Section]]) -> int:
    return sum(words(turn.title) + words(turn.text) for group in groups for turn in group)


WHOLE = "/context_store/compressed_group_1.txt"
TOOL, ASSISTANT, USER = Role.TOOL, Role.ASSISTANT, Role.USER
KINDS = [TOOL, ASSISTANT, USER]


def turn(number: int, role: Role, tokens: int) -> Section:
    """So many tokens with its title, each word to be found once in the whole history."""
    return Section(
        f"{number} {role.name.lower()}", " ".join(f"w{number}x{place}e" for place in range(tokens - 2)), role
    )


def history(*sizes: tuple[Role, int]) -> list[Section]:
    return [turn(number, role, tokens) for number, (role, tokens) in enumerate(sizes)]


def fitted(turns: list[Section], limit: int, calls: int) -> list[list[Section]]:
    return summary.fitted(turns, limit, calls, words, WHOLE)


def flat(groups: list[list[Section]]) -> list[Section]:
    return [one for group in groups for one in group]


some_turns = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(2, 3_000)), max_size=40)


@given(some_turns, st.integers(300, 4_000), st.integers(1, 6))
def test_fitted_history_fits_into_the_allowed_calls(sizes: list[tuple[Role, int]], limit: int, calls: int) -> None:
    turns = history(*sizes)
    groups = fitted(turns, limit, calls)
    kept = flat(groups)
    assert len(groups) <= calls
    assert all(size([group]) <= limit for group in groups)
    numbers = [int(one.title.split()[0]) for one in kept]
    assert numbers == sorted(numbers), "in their order"
    found = [word for one in kept for word in re.findall(r"w\d+x\d+e", one.text)]
    every = [word for one in turns for word in one.text.split()]
    places = {word: place for place, word in enumerate(every)}
    whole = [place for word in found if (place := places.get(word)) is not None]  # a cut can go through a word
    assert whole == sorted(set(whole)), "nothing twice, nothing moved"
    texts = {one.title: "" for one in kept}
    for one in kept:
        texts[one.title] += one.text
    assert all(f"{WHOLE} …]" in texts[one.title] for one in kept if one.missing), "it says where the rest is"
    assert groups == fitted(turns, limit, calls), "the same each time"
    if size([turns]) <= limit:
        assert groups == [turns], "nothing is shortened that fits"
    if size([turns]) > limit * calls or any(size([[one]]) > limit for one in turns):
        assert any(one.missing for one in kept)


@pytest.mark.parametrize(
    ("sizes", "limit", "calls", "expected"),
    [
        pytest.param([(USER, 50), (TOOL, 900), (ASSISTANT, 50)], 1_000, 1, ["", "", ""], id="all fits"),
        pytest.param([(USER, 50), (TOOL, 901), (ASSISTANT, 50)], 1_000, 1, ["", "cut", ""], id="one token too much"),
        pytest.param(
            [(TOOL, 5_000), (USER, 100), (TOOL, 100), (ASSISTANT, 100), (TOOL, 100)],
            1_000, 1, ["cut", "", "", "", ""], id="the longest loses",
        ),
        pytest.param(
            [(USER, 400), (ASSISTANT, 900), (TOOL, 900)], 1_000, 1, ["", "cut", "cut"], id="users last",
        ),
        pytest.param([(USER, 600), (ASSISTANT, 900), (TOOL, 9)], 1_000, 1, ["", "cut", ""], id="small ones stay"),
        pytest.param([(USER, 5_000), (TOOL, 100), (TOOL, 100)], 1_000, 1, ["cut", "", ""], id="a quarter for others"),
        pytest.param([(TOOL, 900), (USER, 900)], 1_000, 2, ["", ""], id="two calls"),
        pytest.param([(TOOL, 4_000)], 1_000, 4, ["cut"], id="titles count"),
    ],
)  # fmt: skip
def test_which_sections_are_shortened(
    sizes: list[tuple[Role, int]], limit: int, calls: int, expected: list[str]
) -> None:
    by_title: dict[str, bool] = {}
    for one in flat(fitted(history(*sizes), limit, calls)):
        by_title[one.title] = by_title.get(one.title, False) or one.missing > 0
    assert ["cut" if cut else "" for cut in by_title.values()] == expected


def test_shortening_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    [[one]] = fitted(history((TOOL, 5_000)), 1_000, 1)
    head, note, tail = one.text.split("\n")
    text = turn(0, TOOL, 5_000).text
    assert text.startswith(head) and text.endswith(tail) and len(head) // len(tail) in (1, 2)
    assert (
        note
        == f"[… {len(text) - len(head) - len(tail):,} characters are left out here; the whole text is in {WHOLE} …]"
    )
    assert 900 < size([[one]]) <= 1_000


def test_shortening_again_counts_earlier_omissions_too() -> None:
    text = turn(0, TOOL, 5_000).text
    [[once]] = fitted(history((TOOL, 5_000)), 1_000, 1)
    [[twice]] = fitted([once], 500, 1)
    head, note, tail = twice.text.split("\n")
    assert text.startswith(head) and text.endswith(tail)
    missing = int(re.sub(r"\D", "", note.split("characters")[0]))
    assert 0 <= missing - (len(text) - len(head) - len(tail)) < 200, "but for the length of the first note"


def test_of_too_many_sections_the_newest_stay_and_one_line_replaces_the_others() -> None:
    turns = history(*[(TOOL, 40)] * 1_000, (USER, 30))
    kept = flat(fitted(turns, 1_000, 2))
    assert "from here on" in kept[0].text and WHOLE in kept[0].text
    assert kept[1:] == turns[-len(kept) + 1 :]
    assert size([kept]) > 1_700
    gone = turns[: len(turns) - len(kept) + 1]
    assert kept[0].missing == sum(len(one.text) for one in gone)


def test_nothing_stays_if_not_even_the_omission_line_fits() -> None:
    assert summary.fitted(history((TOOL, 5_000)), 300, 2, words, "/directory" * 400) == [[]]


@pytest.mark.parametrize(
    ("window", "snapshot_tokens", "history_tokens", "reply"),
    [
        (128_000, 1_500, 103_700, 9_500),
        (16_384, 1_500, 8_497, 4_248),
        (8_192, 1_500, 3_122, 2_250),
        (8_192, 600, 4_182, 2_090),
        (4_096, 1_500, 500, 2_250),
    ],
)
def test_a_window_is_shared_between_history_and_reply(
    window: int, snapshot_tokens: int, history_tokens: int, reply: int
) -> None:
    assert summary.shares(window, snapshot_tokens) == (history_tokens, reply)


# -- in linear time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["=", "= ", "== ", "a=", "===\n"])
def test_finding_a_fence_is_linear(text: str) -> None:
    def work(number: int) -> None:
        summary.fenced(text * number, "", "TASK")

    assert_linear(work, 2_000_000 // len(text), 4_000_000 // len(text))


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda number: [Section("1 tool", "word " * number, TOOL)], id="one long text"),
        pytest.param(
            lambda number: [Section("1 tool", "word", KINDS[one % 3]) for one in range(number // 30)], id="many"
        ),
    ],
)
@pytest.mark.parametrize("limit", [2_000, 10_000_000])
def test_fitting_a_history_is_linear(made: Callable[[int], list[Section]], limit: int) -> None:
    def work(number: int) -> None:
        summary.fitted(made(number), limit, 4, lambda text: text.count(" ") + 1, WHOLE)

    assert_linear(work, 300_000, 600_000)
