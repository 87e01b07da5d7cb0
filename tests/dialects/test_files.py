"""The files of a request are its own moved texts, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy.dialects import render
from proxy.dialects.chat import CHAT
from proxy.dialects.render import Files, moved_files
from proxy.plan import preview, summary
from proxy.plan.plan import Move, OffloadEvent, Plan, SummaryBoundary
from proxy.plan.preview import DIGITS
from tests import written
from tests.dialects.rendering import history

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PARTS = [
    {"type": "text", "text": "p" * 900},
    {"type": "text", "text": "short"},
    {"type": "text", "text": "q" * 900},
]
RAWS = [
    json.dumps(message).encode()
    for message in (
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": PARTS},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "done"}, {"type": "refusal", "refusal": "no"}],
        },
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "more"},
    )
]
OFFLOAD = written.offload(store_dir="/store", unseen_limit=100)


PAST = history(CHAT, RAWS, OFFLOAD)
TRANSCRIPT, CHAIN = PAST.transcript(RAWS), PAST.links


def plan(*boundaries: int) -> Plan:
    made = tuple(SummaryBoundary(end, frozenset({0}), 1) for end in boundaries)
    return Plan({2: Move(False, 1)}, made, (OffloadEvent(6, 5, 5),), 0, True)


def files_of(made: Plan, shown: SummaryBoundary | None = None) -> Files:
    return moved_files(CHAT, TRANSCRIPT, made, "/store", shown, CHAIN)


def path(text: str) -> str:
    return f"/store/look.{preview.digest(text)[:DIGITS]}.txt"


def test_each_large_part_is_a_file_of_its_own() -> None:
    files = files_of(plan())
    assert dict(files) == {path("p" * 900): "p" * 900, path("q" * 900): "q" * 900}
    assert len(files) == 2


@pytest.mark.parametrize(
    "other", ["/etc/passwd", "/store/", path("p" * 900)[1:], "/store/../store/x", ""]
)
def test_nothing_else_is_there(other: str) -> None:
    files = files_of(plan())
    with pytest.raises(KeyError):
        files[other]


def test_cuts_up_to_the_one_shown_have_theirs() -> None:
    both = plan(3, 5)
    names = [f"/store/{summary.file_name(CHAIN[end])}" for end in (3, 5)]
    for shown, there in ((None, []), (both.boundaries[0], names[:1]), (both.boundaries[1], names)):
        files = files_of(both, shown)
        assert [name for name in files if "group" in name] == there
    files = files_of(both, both.boundaries[1])
    assert [files[name].split("\n") for name in names] == [
        [
            "### 2 assistant reasoning",
            "hm",
            "### 2 assistant calls look c",
            "{}",
            "### 3 tool c look",
            f"(the whole text is in {path('p' * 900)})",
            "### 3 tool c look",
            "short",
            "### 3 tool c look",
            f"(the whole text is in {path('q' * 900)})",
        ],
        [
            "### 4 assistant",
            "done",
            "### 4 assistant",
            '{"type": "refusal", "refusal": "no"}',
            "### 5 assistant",
            "",
        ],
    ]
    assert files[path("p" * 900)] == "p" * 900


def test_a_cut_without_the_one_before_has_its_messages_too() -> None:
    only = plan(5)
    name = f"/store/{summary.file_name(CHAIN[5])}"
    text = files_of(only, only.boundaries[0])[name]
    assert text.startswith("### 2 assistant") and text.endswith("### 5 assistant\n")


def test_a_message_that_was_pinned_is_in_the_file_of_the_cut_that_takes_it() -> None:
    boundaries = (SummaryBoundary(3, frozenset({0, 2}), 1), SummaryBoundary(5, frozenset({0}), 2))
    pinned = Plan({}, boundaries, (OffloadEvent(6, 5, 5),), 0, True)
    files = files_of(pinned, boundaries[1])
    first, second = (files[f"/store/{summary.file_name(CHAIN[end])}"] for end in (3, 5))
    assert "p" * 900 not in first and "p" * 900 in second and "### 2 assistant" not in second


def test_a_summarised_result_is_found_in_the_originals_by_the_words_of_its_call() -> None:
    calls = [
        {**CALL, "id": id, "function": {"name": "cat", "arguments": f'{{"path":"/var/{id}.log"}}'}}
        for id in "ab"
    ]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "rules"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "p" * 900},
        {"role": "tool", "tool_call_id": "b", "content": "q" * 900},
        {"role": "assistant", "content": "done"},
    ]
    raws = [Raw(json.dumps(message).encode()) for message in messages]
    past = history(CHAT, raws, OFFLOAD)
    boundary = SummaryBoundary(4, frozenset({0}), 1)
    planned = Plan({2: Move(False, 1)}, (boundary,), (OffloadEvent(5, 0, 5),), 0, True)
    index = moved_files(CHAT, past.transcript(raws), planned, "/store", boundary, past.links).index
    assert index.find("/var/a.log") == [f"/store/a.log.{preview.digest('p' * 900)[:DIGITS]}.txt"]
    assert index.find("/var/b.log") == [f"/store/{summary.file_name(past.links[4])}"]
    assert (
        index.about(f"/store/{summary.file_name(past.links[4])}")
        == "the original messages behind a summary"
    )


def test_an_image_is_one_also_beside_texts_of_earlier_conversations() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    raws = [RAWS[0], json.dumps({"role": "user", "content": [image]}).encode(), RAWS[5]]
    past, boundary = history(CHAT, raws, OFFLOAD), SummaryBoundary(2, frozenset({0}), 1)
    cut = Plan({}, (boundary,), (OffloadEvent(3, 0, 5),), 0, True)
    files = moved_files(CHAT, past.transcript(raws), cut, "/store", boundary, past.links)
    beside = files.beside({"old.txt": ("result of look", b"once")})
    own = next(iter(files))
    assert files[own] == beside[own] == "[image, image/png, 1 kB]"
    assert files.media(own) and json.loads(beside.read(own)) == image
    assert beside["/store/old.txt"] == "once" and beside.index.about("/store/old.txt").startswith(
        "result of look, "
    )


PINS = st.sets(st.integers(0, 9)).map(frozenset)


@given(st.tuples(st.integers(0, 9), PINS), st.tuples(st.integers(0, 9), PINS))
def test_what_a_cut_takes_since_another(
    one: tuple[int, frozenset[int]], other: tuple[int, frozenset[int]]
) -> None:
    (first, kept), (end, pins) = sorted((one, other))
    since, boundary = SummaryBoundary(first, kept, 1), SummaryBoundary(end, pins, 2)
    before = set(render.replaced(TRANSCRIPT, since))
    expected = [index for index in render.replaced(TRANSCRIPT, boundary) if index not in before]
    assert render.replaced(TRANSCRIPT, boundary, since) == expected
