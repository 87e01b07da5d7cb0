"""Known faults of the original, each with a test that would have caught it, and failures of store
or process."""

from __future__ import annotations

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proxy.apps.operations.call import canonical, key_part
from tests.apps.operations.served import (
    MODEL,
    REFERENCE,
    STORE,
    WRITTEN,
    Caller,
    assistant,
    operated,
    page,
    step,
    system,
    user,
    words,
)
from tests.fake_upstream import StrictUpstream
from tests.serving import spawned
from tests.strict import check

Json = dict[str, Any]

TEXT = page("result", 3_000)


# -- the original's --------------------------------------------------------------------------------


def test_fault_auto_mode_threw_the_compaction_away(caller: Caller) -> None:
    """When the original went on to compress, it started again from the whole messages."""
    history = [
        user(words(9_000)),
        assistant(words(9_000)),
        *step("recent", TEXT),
        assistant("Read it."),
    ]
    reply = caller.offload(history, context_manage_mode="auto", max_total_tokens=8_000, model=MODEL)
    assert len(reply.groups) == 1, "compaction was not enough"
    [path] = reply.references
    assert caller.text(path) == TEXT
    assert reply.messages[2]["content"].startswith(
        TEXT[:100] + "... (detailed result is stored in "
    )
    assert {WRITTEN + one for one in (path, *reply.groups)} == set(reply.answer.splitlines())
    assert set(reply.files) == {path, *reply.groups}


def test_fault_auto_mode_lost_what_it_had_compacted_in_a_group(caller: Caller) -> None:
    history = [user(words(20_000)), *step("old", TEXT), user(), assistant(), user()]
    reply = caller.offload(history, context_manage_mode="auto", model=MODEL)
    [group] = reply.groups
    assert json.loads(caller.text(group)) == history[:-2], "the untouched messages"


def test_fault_groups_written_at_once_overwrote_each_other(caller: Caller) -> None:
    def group(number: int) -> tuple[list[Json], str]:
        talk = [user(page(f"talk {number}", 300)), assistant(), user(), assistant()]
        with Caller(caller.proxy, caller.key) as same:
            return talk[:2], same.compress(talk, chat_id="fixed").groups[0]

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(group, range(16)))
    assert len({path for _, path in made}) == 16
    assert all(json.loads(caller.text(path)) == talk for talk, path in made)


def test_fault_any_file_of_the_server_was_readable(caller: Caller, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("heliotrope\n")
    caller.compact([user(), *step("c", TEXT), user()])
    on_disk = [str(path) for path in caller.proxy.stored()]
    assert on_disk
    relative = "../" * 12 + str(secret)
    for path in (
        "/etc/passwd",
        str(secret),
        relative,
        f"{STORE}/{relative}",
        f"file://{secret}",
        *on_disk,
    ):
        assert caller.read(path).status in (400, 404), path
        assert caller.post("/grep", {"pattern": "heliotrope", "file_path": path}).status in (
            400,
            404,
        ), path
    for path in (
        "/etc",
        str(tmp_path),
        "/",
        relative,
        f"{STORE}/../../..",
        str(caller.proxy.store),
    ):
        assert not caller.grep("heliotrope|root:", path=path).metadata.get("matches"), path


def test_fault_null_content_failed_the_call(caller: Caller) -> None:
    nulls = [{"role": role, "content": None} for role in ("system", "user", "assistant")]
    history = [
        *nulls,
        *step("a", None),
        *step("b", TEXT),
        {"role": "assistant", "tool_calls": []},
        user(),
        user(),
    ]
    del history[3]["content"]
    assert len(caller.compact(history).files) == 1
    reply = caller.compress(history)
    assert [
        message for message in caller.restored(reply.messages) if message["role"] != "system"
    ] == history[1:]
    assert caller.offload(history, model=MODEL).messages == history


def test_fault_tool_pairs_were_cut(caller: Caller) -> None:
    """No call is separated from its results, whatever N is and also when groups are made."""
    history = [user(words(96))]
    for number in range(3):
        history += step(f"c{number}", words(200), words(150), words(100))
    for keep in range(len(history)):
        reply = caller.compress(history, keep_recent_count=keep, group_token_threshold=100)
        check({"model": MODEL, "messages": reply.messages})
        for path in reply.groups:
            check({"model": MODEL, "messages": json.loads(caller.text(path))})


def test_fault_fields_were_dropped_on_the_way(caller: Caller) -> None:
    extra = {
        "name": "ada",
        "annotations": [{"n": 1}],
        "reasoning_content": "so",
        "x_unknown": {"deep": [None, 1.5]},
    }
    call, result = step("c", TEXT)
    call = {
        **call,
        "refusal": None,
        "reasoning": "hm",
        "tool_calls": [{**call["tool_calls"][0], "index": 0}],
    }
    cached = {"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}
    history = [
        {**system(), **extra},
        {"role": "user", "content": [cached], **extra},
        call,
        result,
        {**user(), **extra},
    ]
    reply = caller.compact(history)
    content = reply.messages[3]["content"]
    assert REFERENCE.search(content)
    assert reply.messages == [*history[:3], {**result, "content": content}, history[4]]
    compressed = caller.compress(history)
    assert history[0] in compressed.messages
    assert caller.restored(compressed.messages)[0] == history[1]
    assert [
        message for message in caller.restored(compressed.messages) if message["role"] != "system"
    ] == history[1:]


def test_fault_untouched_messages_lost_their_bytes(caller: Caller) -> None:
    """Untouched messages keep the spelling of numbers, the order of keys and the escapes."""
    odd = rb'{"content":"\u00e9\/","n":[1.0,1e2,12345678901234567890,0.10],  "role":"user" ,"z":{"b":1,"a":2}}'
    moved = json.dumps(step("c", TEXT)).encode()[1:-1]
    body = b'{"store_dir":"/s","max_total_tokens":0,"max_tool_message_tokens":0,"messages":['
    reply = caller.post("/context_compact", body + odd + b"," + moved + b"," + odd + b"]}")
    assert len(reply.files) == 1
    assert reply.raw.count(odd) == 2


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_text_is_named_and_never_served(caller: Caller) -> None:
    earlier = set(caller.proxy.stored())
    [path] = caller.compact([user(), *step("c", TEXT), user()]).references
    [group] = caller.compress([user(page("group", 300)), assistant(), user(), assistant()]).groups
    files = {
        one.name: one
        for one in caller.proxy.stored()
        if one.parent.name == "files" and one not in earlier
    }
    file = files[key_part(canonical(path))]
    whole, text = file.read_bytes(), caller.text(path)
    file.write_bytes(whole[:40] + bytes([whole[40] ^ 4]) + whole[41:])
    before = caller.proxy.metric("store_damaged_records_total", "files")
    read, found = caller.read(path), caller.post("/grep", {"pattern": "line", "file_path": path})
    assert (read.status, found.status) == (404, 404)
    assert path in read.answer and "is damaged in the store" in read.answer
    below = caller.grep("line 7", path=STORE)
    assert {match["path"] for match in below.metadata["matches"]} == {group}
    assert below.metadata["damaged"] == [path]
    assert below.answer.endswith(
        f"\nNot searched, because damaged in the store: {path.removeprefix(STORE + '/')}"
    )
    assert caller.proxy.metric("store_damaged_records_total", "files") == before + 3
    file.write_bytes(whole)
    assert caller.text(path) == text and "damaged" not in caller.grep("line 7", path=STORE).metadata


# -- references that are none ----------------------------------------------------------------------


def test_text_that_looks_like_a_reference_is_content(caller: Caller) -> None:
    real = caller.compact([user(), *step("c", TEXT), user()]).messages[2]["content"]
    path = REFERENCE.findall(real)[0]
    for look_alike in (page("padding", 5_000) + real, real + page("padding", 500)):
        history = [user(), *step("d", look_alike), user()]
        reply = caller.compact(history, preview_char_length=10)
        assert list(reply.files.values()) == [look_alike]
    assert caller.text(path) == TEXT


# -- a store that fails, a process that ends -------------------------------------------------------

HISTORY = [user(), *step("c", TEXT), user(words(96)), assistant(), user()]


def test_the_store_is_down_and_the_messages_come_back() -> None:
    """A file in place of the store's directory acts as a lost disk."""
    with operated() as (proxy, _, _), Caller(proxy) as caller:
        [path] = caller.compact(HISTORY).files
        shutil.rmtree(proxy.store)
        proxy.store.write_text("no directory")
        history = [*HISTORY, user("new")]
        reply = caller.compact(history)
        assert (reply.status, reply.messages) == (503, history)
        assert not reply.metadata.get("write_file_dict")
        assert caller.grep("result").status == 503
        proxy.store.unlink()
        proxy.store.mkdir()
        assert caller.read(path).status == 404
        assert caller.compact(HISTORY).status == 200


def test_a_killed_process_has_kept_everything_it_answered_for(tmp_path: Path) -> None:
    """Files are durable before the reply: after a SIGKILL right after it, the next process has them
    all."""
    with StrictUpstream() as up:
        policies = {"default": {"upstream": {"base_url": up.url}}}
        with spawned(policies, tmp_path / "store") as proxy, Caller(proxy, "the key") as caller:
            adopted = caller.compact(HISTORY)
            assert proxy.process
            proxy.process.send_signal(signal.SIGKILL)
            proxy.process.wait(10)
        with spawned(policies, tmp_path / "store") as proxy, Caller(proxy, "the key") as caller:
            assert caller.restored(adopted.messages) == HISTORY
            assert (
                caller.grep("line 77:", path=STORE).metadata["matches"][0]["path"]
                == adopted.references[0]
            )
            again = caller.compact(adopted.messages)
            assert (again.messages, again.files) == (adopted.messages, {})
