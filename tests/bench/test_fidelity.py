"""The fidelity benchmark finds every lost text, and none in a run that loses nothing."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest

from bench.fidelity import (
    KINDS,
    Reading,
    examined,
    facts,
    facts_in,
    homes,
    table,
    unread,
    visible,
)
from bench.sent import Sent, replay, synthetic
from proxy.policy import Policy
from proxy.requests.cache import MessageCache
from proxy.tokens import Tokens

TOKENS = Tokens()
RESULT, GROUP = "/context_store/tool_call_1.txt", "/context_store/compressed_group_1.txt"


@pytest.fixture(scope="module")
def sent() -> Sent:
    return asyncio.run(replay(synthetic(), Policy(), MessageCache(TOKENS)))


@pytest.mark.sweep
def test_a_synthetic_run_loses_nothing_and_hides_something() -> None:
    found = examined(synthetic(), TOKENS)
    assert found and not found.lost
    assert found.facts["paths"] > 500 and found.moved > 50_000
    assert all(0 < share < 1 for share in found.visible.values())
    assert found.requests == 61
    assert "lost: nothing" in table([found])
    assert "lost: 1\nsynthetic: it" in table([msgspec.structs.replace(found, lost=["it"])])


def test_the_proxy_knows_which_requests_broke_the_prefix(sent: Sent) -> None:
    bodies = [msgspec.json.decode(body) for body in sent.bodies]
    broken = sum(
        later["messages"][: len(earlier["messages"])] != earlier["messages"]
        or later.get("tools") != earlier.get("tools")
        for earlier, later in pairwise(bodies)
    )
    assert sent.changes == broken > 0


def test_a_text_that_was_never_moved_is_not_found(sent: Sent) -> None:
    assert sent.last
    tools, path = Reading(sent.last, TOKENS), next(iter(sent.told))
    known = facts(sent.told)["numbers"]
    assert tools.finds(next(iter(known)), known[next(iter(known))])
    assert not tools.finds("host_of_nobody", path)
    assert not tools.finds("host_1", "/context_store/elsewhere.txt")
    assert unread({path: ["host_of_nobody"]}, tools.whole)
    assert unread({"/context_store/elsewhere.txt": ["text"]}, tools.whole)


@pytest.mark.parametrize(
    ("path", "told", "file", "lost"),
    [
        (RESULT, ["one\n"], "one\n", 0),
        (RESULT, ["one\n"], "one", 1),
        (RESULT, ["one"], "one\n", 1),
        (GROUP, ["one", "two"], "### 1 user\none\n### 2 user\ntwo", 0),
        (GROUP, ["one", "two"], "### 1 user\none", 1),
    ],
)
def test_text_missing_in_a_file_counts_as_lost(
    path: str, told: list[str], file: str, lost: int
) -> None:
    assert len(unread({path: told}, {path: file}.__getitem__)) == lost


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("took 1,204.5 ms, 3 times; v1.2", "numbers", {"1,204.5", "3"}),
        ("see /var/log/app.log and src/main.py", "paths", {"/var/log/app.log", "src/main.py"}),
        ("https://example.org/a?b", "paths", {"https://example.org/a"}),
        (
            "max_tokens of gpt4 by camelCase words",
            "identifiers",
            {"max_tokens", "gpt4", "camelCase"},
        ),
    ],
)
def test_facts_are_numbers_paths_and_identifiers(text: str, kind: str, expected: set[str]) -> None:
    assert {fact for of, fact in facts_in(text) if of == kind} == expected


def test_facts_are_attributed_to_results_first_and_shares_count_by_kind() -> None:
    known = facts({GROUP: ["1 2"], RESULT: ["2 3"]})
    assert known == {kind: {} for kind in KINDS} | {
        "numbers": {"2": RESULT, "3": RESULT, "1": GROUP}
    }
    shown = visible(known, "only 2, and 31")
    assert shown["numbers"] == pytest.approx(1 / 3)
    assert shown["paths"] == 1


def test_a_text_is_looked_up_in_its_own_file_where_another_one_contains_it() -> None:
    group = "/store/compressed_group_1.txt"
    files = {group: "(the whole text is in /store/a.txt)\n(the whole text is in /store/b.txt)"}
    files |= {"/store/a.txt": "one two", "/store/b.txt": "one"}
    assert homes({group: ["one"]}, files, files.__getitem__) == {"/store/b.txt": ["one"]}
    assert homes({group: ["three"]}, files, files.__getitem__) == {group: ["three"]}
