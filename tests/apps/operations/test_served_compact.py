"""/context_offload in compact mode: every parameter, its default, its exact border, and the formats
to the letter."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.apps.operations.served import (
    MODEL,
    STORE,
    WRITTEN,
    Caller,
    assistant,
    page,
    step,
    system,
    tokens,
    user,
    words,
)

Json = dict[str, Any]

TEXT = page("result", 3_000)
COMPACTED = re.compile(r"(?s)(.*?)\.\.\. \(detailed result is stored in ([^;)]+)(;[^)\n]*)?\)")


def ids(files: dict[str, str]) -> list[str]:
    """Return the call ids of these results, which are also what the calls asked for."""
    return [found[1] for path in files if (found := re.search(r"(\w+?)\.[0-9a-f]{16}\.txt$", path))]


# -- formats ---------------------------------------------------------------------------------------


def test_a_result_becomes_a_preview_and_a_reference(caller: Caller) -> None:
    history = [system(), user(), *step("call_123", TEXT), user()]
    reply = caller.compact(history)
    found = COMPACTED.fullmatch(reply.messages[3]["content"])
    assert found
    assert found[1] == TEXT[:100]
    assert re.fullmatch(rf"{STORE}/call_123\.[0-9a-f]{{16}}\.txt", found[2])
    assert reply.files == {found[2]: TEXT}
    assert reply.answer == WRITTEN + found[2]
    assert caller.text(found[2]) == TEXT
    assert reply.messages == [*history[:3], {**history[3], "content": found[0]}, user()]


def test_the_metadata_of_a_compaction(caller: Caller) -> None:
    history = [user(), *step("c", TEXT), user()]
    reply = caller.compact(history, chat_id="mine")
    assert reply.metadata["tokens_before"] == sum(map(tokens, history))
    assert reply.metadata["tokens_after"] == sum(map(tokens, reply.messages))
    ratio = reply.metadata["tokens_after"] / reply.metadata["tokens_before"]
    assert reply.metadata["compact_ratio"] == pytest.approx(ratio, abs=1e-3)
    assert reply.metadata["chat_id"] == "mine"
    assert "original_messages_path" not in reply.metadata
    assert "compressed_message_count" not in reply.metadata


def test_the_answer_has_a_line_a_file(caller: Caller) -> None:
    reply = caller.compact(
        [user(), *step("a", TEXT, page("another", 500)), *step("b", page("third", 400)), user()]
    )
    assert len(reply.files) == 3
    assert sorted(reply.answer.splitlines()) == sorted(WRITTEN + path for path in reply.files)
    assert reply.references == list(reply.files)


def test_nothing_above_the_thresholds_changes_nothing(caller: Caller) -> None:
    history = [user(), *step("c", TEXT), user()]
    reply = caller.offload(history)
    assert (reply.status, reply.messages, reply.files) == (200, history, {})
    assert reply.answer and WRITTEN not in reply.answer
    assert reply.metadata["tokens_before"] == reply.metadata["tokens_after"]
    assert reply.metadata["compact_ratio"] == 1


@pytest.mark.parametrize(
    "store_dir",
    [
        "/workspace/context_store",
        "./cache_file/",
        "./cache_file",
        "~/x",
        "plain",
        "with space",
        "a/b/c",
    ],
)
def test_a_store_dir_is_a_name_and_comes_back_as_it_was_spelled(
    caller: Caller, store_dir: str
) -> None:
    reply = caller.compact([user(), *step("c", TEXT), user()], store_dir=store_dir)
    [path] = reply.files
    assert path.startswith(store_dir.rstrip("/") + "/c.")
    assert reply.references == [path]
    assert caller.text(path) == TEXT
    found = caller.grep("result, line 77", path=store_dir)
    assert [match["path"] for match in found.metadata["matches"]] == [path]


def test_each_text_part_is_a_file_of_its_own_and_other_parts_stay(caller: Caller) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [
        {"type": "text", "text": page("one", 500)},
        image,
        {"type": "text", "text": page("two", 600)},
    ]
    reply = caller.compact([user(), *step("c", parts), user()])
    first, same, second = reply.messages[2]["content"]
    assert same == image
    assert set(first) == set(second) == {"type", "text"}
    paths = [COMPACTED.fullmatch(part["text"]) for part in (first, second)]
    assert [caller.text(found[2]) for found in paths if found] == [
        page("one", 500),
        page("two", 600),
    ]


# -- borders ---------------------------------------------------------------------------------------


def test_max_total_tokens_is_exact_and_counts_all_messages(caller: Caller) -> None:
    history = [system(words(500)), user(words(400)), *step("c", TEXT), user(words(300))]
    total = sum(map(tokens, history))
    compact = {"context_manage_mode": "compact", "max_tool_message_tokens": 0}
    assert caller.offload(history, max_total_tokens=total, **compact).files == {}
    assert len(caller.offload(history, max_total_tokens=total - 1, **compact).files) == 1
    assert len(caller.offload(history, all_token_threshold=total - 1, **compact).files) == 1
    assert caller.offload(history, all_token_threshold=total, **compact).files == {}


def test_max_total_tokens_is_20_000_by_default(caller: Caller) -> None:
    history = [*step("c", words(10_000)), user()]
    short = 20_000 - sum(map(tokens, history)) - 4
    for filling, files in ((short, 0), (short + 1, 1)):
        reply = caller.offload([user(words(filling)), *history], context_manage_mode="compact")
        assert (reply.metadata["tokens_before"], len(reply.files)) == (20_000 + files, files)


def test_max_tool_message_tokens_is_exact(caller: Caller) -> None:
    history = [user(), *step("c", words(700)), user()]
    assert caller.compact(history, max_tool_message_tokens=704).files == {}
    assert len(caller.compact(history, max_tool_message_tokens=703).files) == 1


def test_max_tool_message_tokens_is_2_000_by_default(caller: Caller) -> None:
    history = [user(), *step("at", words(1_996)), *step("over", words(1_997)), user()]
    [path] = caller.offload(history, context_manage_mode="compact", max_total_tokens=0).files
    assert path.startswith(f"{STORE}/over.")


@pytest.mark.parametrize("length", [0, 1, 99, 101, 5_000])
def test_preview_char_length(caller: Caller, length: int) -> None:
    wide = "".join(f"Zeile {number} - Ärger ☃ 🌍\n" for number in range(2_000))
    reply = caller.compact([user(), *step("c", wide), user()], preview_char_length=length)
    found = COMPACTED.fullmatch(reply.messages[2]["content"])
    assert found and found[1] == wide[:length]


def test_a_replacement_is_never_larger_than_what_it_replaces(caller: Caller) -> None:
    history = [user(), *step("small", words(30)), *step("large", words(3_000)), user()]
    reply = caller.compact(history, preview_char_length=1_000_000)
    assert (reply.messages, reply.files) == (history, {})
    [path] = caller.compact(history).files
    assert "/large." in path


@pytest.mark.parametrize(
    ("keep", "moved"),
    [(0, "abc"), (1, "ab"), (2, "ab"), (3, "a"), (4, "a"), (5, ""), (6, ""), (1_000, "")],
)
def test_keep_recent_count_is_widened_to_whole_steps(caller: Caller, keep: int, moved: str) -> None:
    """Keep the last N messages, and for a result among them also its call and that call's other
    results."""
    pairs = {one: page(one, 300) for one in ("a", "b", "c")}
    history = [user(), *(message for one, result in pairs.items() for message in step(one, result))]
    files = caller.compact(history, keep_recent_count=keep).files
    assert "".join(ids(files)) == moved
    assert caller.compact(history, keep_recent=keep).files == files


def test_one_message_is_recent_by_default(caller: Caller) -> None:
    history = [user(), *step("a", page("a", 300)), *step("b", page("b", 300))]
    assert ids(caller.compact(history).files) == ["a"]
    assert ids(caller.compact(history, keep_recent_count=None).files) == ["a"]
    assert len(caller.compact([*history, assistant()]).files) == 2


def test_operations_ignore_excluded_tools_and_unseen_results(caller: Caller) -> None:
    """No `exclude_tools`, no minimum saving, no pins: the caller adopts the result, so one call is
    one event."""
    reply = caller.compact([user(), *step("c", words(400))], keep_recent_count=0)
    assert len(reply.files) == 1


@pytest.mark.parametrize("mode", ["compact", "compress", "auto"])
def test_a_result_that_is_an_object_counts_as_its_json(caller: Caller, mode: str) -> None:
    big = {"path": "/workspace/data.json", "content": page("data", 1_000), "status": "ok"}
    small: Json = {"status": "none", "rows": []}
    history = [user(), *step("a", big), *step("b", small), user("And?")]
    reply = caller.offload(
        history,
        context_manage_mode=mode,
        max_total_tokens=200,
        max_tool_message_tokens=200,
        model=MODEL,
    )
    assert reply.status == 200, reply.answer
    if mode == "compress":
        [group] = reply.groups
        assert json.loads(caller.text(group)) == history[:3], "as it came"
        return
    [path] = reply.references
    assert json.loads(caller.text(path)) == big
    assert reply.messages[2]["content"].startswith(big["content"][:20]), "the text that it wraps"
    assert reply.messages[4] == history[4], "what does not move stays as it came"
