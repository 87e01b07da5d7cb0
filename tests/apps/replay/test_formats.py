"""`replay` reads what people have: samples that the tools themselves wrote, with long texts cut
short."""

from __future__ import annotations

import json
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from proxy.apps.replay import recordings
from proxy.apps.replay.formats import when
from proxy.apps.replay.recordings import RecordedRequest
from proxy.apps.replay.sessions import usage_of
from proxy.cli import MISTAKE, OK, main

Json = dict[str, Any]
SAMPLES = Path(__file__).parent / "samples"
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_log", "arguments": '{"path": "a.log"}'},
}
HISTORY: list[Json] = [
    {"role": "system", "content": "You read logs."},
    {"role": "user", "content": "Read a.log."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "line 1\nline 2"},
]
TOOLS = [{"type": "function", "function": {"name": "read_log", "parameters": {"type": "object"}}}]
REPLY = {"role": "assistant", "content": "Two lines."}
SUMS = {"usage_metadata": {"input_tokens": 120, "input_token_details": {"cache_read": 100}}}
USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 100},
}


def read(path: Path) -> list[RecordedRequest]:
    return list(recordings.Recordings().requests(path))


def left_out(path: Path) -> str:
    """Why a file, or a part of it, is not replayed."""
    found = recordings.Recordings()
    list(found.requests(path))
    return found.left_out[path].why


def written(path: Path, *records: Json) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def texts(request: RecordedRequest) -> str:
    assert request.chat is not None
    return b"\n".join(bytes(entry) for entry in request.chat.entries).decode()


@pytest.mark.parametrize(
    ("name", "api", "source"),
    [
        ("claude_code", "messages", "Claude Code's session"),
        ("codex", "responses", "Codex's session"),
    ],
)
def test_a_session_file_is_one_request_for_each_reply(name: str, api: str, source: str) -> None:
    """Three prompts, and a log read in six replies. Each request has all that came before, and what
    upstream billed."""
    found = read(SAMPLES / f"{name}.jsonl")
    assert {(one.source, one.dialect.name if one.dialect else "") for one in found} == {
        (source, api)
    }
    sizes = [len(one.chat.entries) for one in found if one.chat]
    assert len(sizes) == 9 and all(later - earlier == 2 for earlier, later in pairwise(sizes))
    assert "Read the logs 0 to 2" in texts(found[0]) and "A rule for all that follows" in texts(
        found[-1]
    )
    assert all(one.reported and one.reported.prompt > 5_000 for one in found)
    assert all(one.chat and one.chat.has_tools for one in found[1:])


def test_what_a_session_file_does_not_hold_is_not_counted_as_history(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Few definitions of tools are in it: upstream counts ten times as many tokens, and our tools
    are still 400."""
    for name in ("claude_code", "codex"):
        assert main(["replay", "--json", str(SAMPLES / f"{name}.jsonl")]) == OK
        [found] = json.loads(capsys.readouterr()[0])["policies"]
        assert found["tokens_before"] > 9 * 6_900 and found["worst_session"] < 1.06


def test_opencodes_database_is_read(tmp_path: Path) -> None:
    path = tmp_path / "opencode.db"
    rows = json.loads((SAMPLES / "opencode.json").read_text())
    with sqlite3.connect(path) as connection:
        connection.execute(
            "create table message (id, session_id, time_created, time_updated, data)"
        )
        connection.execute(
            "create table part (id, message_id, session_id, time_created, time_updated, data)"
        )
        connection.executemany("insert into message values (?, ?, ?, ?, ?)", rows["message"])
        connection.executemany("insert into part values (?, ?, ?, ?, ?, ?)", rows["part"])
    connection.close()
    found = read(path)
    assert [len(one.chat.entries) for one in found if one.chat] == [1, 3, 5, 7, 9, 11, 13, 15, 17]
    assert {one.source for one in found} == {"opencode's session"}
    assert found[1].reported is not None and found[1].reported.cached == 8730
    path.write_bytes(path.read_bytes()[:100])
    assert "but not one of opencode's" in left_out(path)


LANGCHAIN = [
    {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", kind],
        "kwargs": kwargs,
    }
    for kind, kwargs in (
        ("SystemMessage", {"content": "You read logs."}),
        ("HumanMessage", {"content": "Read a.log."}),
        (
            "AIMessage",
            {
                "content": "",
                "tool_calls": [{"name": "read_log", "args": {"path": "a.log"}, "id": "call_1"}],
            },
        ),
        (
            "ToolMessage",
            {"content": "line 1\nline 2", "tool_call_id": "call_1", "status": "success"},
        ),
    )
]
PARTS = [
    {"role": "user", "parts": [{"type": "text", "content": "Read a.log."}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "call_1", "name": "read_log", "arguments": {}}],
    },
    {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": "call_1", "response": "line 1\nline 2"}],
    },
]
GENAI = {
    "gen_ai.request.model": "gpt-4.1",
    "gen_ai.input.messages": json.dumps(PARTS),
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "You read logs."}]),
    "gen_ai.usage.input_tokens": 120,
    "gen_ai.usage.cache_read.input_tokens": 100,
}


def typed(value: Any) -> Json:
    """A value as OTLP's JSON has it."""
    value = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    if isinstance(value, list):
        return {"arrayValue": {"values": [typed(one) for one in value]}}
    if isinstance(value, dict):
        return {
            "kvlistValue": {
                "values": [{"key": key, "value": typed(one)} for key, one in value.items()]
            }
        }
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


BODY = {"model": "gpt-4.1", "messages": HISTORY, "tools": TOOLS}
RUN = {"id": "r", "run_type": "llm", "trace_id": "t", "outputs": {}}
SPENT = {
    "call_type": "acompletion",
    "spend": 0.1,
    "model": "gpt-4.1",
    "response": json.dumps({"usage": USAGE}),
}
EXPORTS: dict[str, Json] = {
    "LiteLLM's log": json.loads((SAMPLES / "litellm.json").read_text()),
    "LiteLLM's log, a row": SPENT | {"proxy_server_request": json.dumps(BODY), "messages": "{}", "api_key": "ab"},
    "LiteLLM's log, with a member of the client's": SPENT | {
        "proxy_server_request": BODY | {"litellm_session_id": "s"}, "messages": "{}",
    },
    "Langfuse's observation": {
        "traceId": "t", "type": "GENERATION", "model": "gpt-4.1", "input": BODY, "usageDetails": USAGE,
    },
    "Langfuse's observation, of a blob": {
        "trace_id": "t", "type": "GENERATION", "provided_model_name": "gpt-4.1", "input": json.dumps(HISTORY),
        "usage_details": USAGE,
    },
    "LangSmith's run": RUN | {"inputs": BODY, "outputs": SUMS},
    "LangSmith's run, of LangChain": RUN | {
        "inputs": {"messages": [LANGCHAIN]},
        "extra": {"invocation_params": {"model": "gpt-4.1", "tools": TOOLS}, "metadata": SUMS},
    },
    "Helicone's request": {
        "request_id": "1", "request_model": "gpt-4.1", "request_path": "/v1/chat/completions", "request_body": BODY,
        "response_body": {"usage": USAGE},
    },
    "OpenTelemetry's span": {"name": "chat gpt-4.1", "context": {}, "kind": "SpanKind.CLIENT", "attributes": GENAI},
    "OpenTelemetry's spans": {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in GENAI.items()
    ]}]}]}]},
    "OpenTelemetry's spans, with values in their types": {"resourceSpans": [{"scopeSpans": [{"spans": [{
        "attributes": [{"key": "gen_ai.request.model", "value": {"stringValue": "gpt-4.1"}}],
        "events": [{"attributes": [{"key": key, "value": typed(value)} for key, value in GENAI.items()]}],
    }]}]}]},
    "OpenAI's stored completion": BODY | {"object": "chat.completion", "usage": USAGE, "choices": []},
}  # fmt: skip
"""A record of each export. What stands behind the comma tells forms of one format apart."""


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_holds_the_request_and_what_it_cost(tmp_path: Path, name: str) -> None:
    record = json.dumps(EXPORTS[name])
    for text in (f"{record}\n", json.dumps(EXPORTS[name], indent=2), f"\n[\n{record}]"):
        (tmp_path / "a.json").write_text(text)
        [found] = read(tmp_path / "a.json")
        assert (
            found.source == name.partition(",")[0]
            and found.dialect is not None
            and found.dialect.name == "chat"
        )
        assert found.chat is not None and found.chat.model == "gpt-4.1"
        said = texts(found)
        assert all(
            part in said
            for part in ("You read logs.", "Read a.log.", "call_1", "read_log", "line 2")
        )
        assert [json.loads(bytes(entry))["role"] for entry in found.chat.entries] == [
            one["role"] for one in HISTORY
        ]
        assert found.reported is not None and (found.reported.prompt, found.reported.cached) == (
            120,
            100,
        )


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (SPENT | {"messages": "{}"}, "store_prompts_in_spend_logs"),
        (
            {"object": "chat.completion", "model": "m", "choices": []},
            "GET /chat/completions/ID/messages",
        ),
        ({"request_id": "1", "request_model": "m"}, "--include-body"),
        (
            {"attributes": {"gen_ai.request.model": "m"}, "context": {}, "kind": 1},
            "capture content",
        ),
        ({"traceId": "t", "type": "GENERATION", "input": "hello"}, "kept no list of messages"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: Json, why: str
) -> None:
    path = written(tmp_path / "a.jsonl", record, BODY)
    assert main(["replay", str(path)]) == OK
    out, _ = capsys.readouterr()
    assert f"not planned: {read(path)[0].reason}" in out and why in out
    assert "1 of 2" in out


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (USAGE | {"cache_read_input_tokens": 100}, (120, 100)),
        (
            {"input_tokens": 15, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 5},
            (120, 100),
        ),
        ({"input_tokens": 120, "cached_input_tokens": 100, "output_tokens": 9}, (120, 100)),
        (json.dumps(USAGE), (120, 100)),
        ({"prompt_tokens": 120}, None),
        ({"prompt_tokens": "many", "cached_tokens": -1}, None),
        (None, None),
    ],
)
def test_usage_is_read_in_everybodys_words(usage: Any, said: tuple[int, int] | None) -> None:
    found = usage_of(usage)
    assert (found and (found.prompt, found.cached)) == said


def test_records_that_ask_no_model_are_passed_over(tmp_path: Path) -> None:
    others = [
        {"traceId": "t", "type": "SPAN", "input": "x"},
        {"run_type": "chain", "inputs": {}},
        {"attributes": {"http.method": "GET"}, "context": {}, "kind": 1},
        {"attributes": GENAI | {"gen_ai.operation.name": "invoke_agent"}, "context": {}, "kind": 1},
    ]
    assert read(written(tmp_path / "a.jsonl", *others)) == []


def test_a_whole_conversation_is_one_request_for_each_reply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.jsonl", {"messages": [*HISTORY, REPLY]})
    assert [(len(one.chat.entries), one.expanded) for one in read(path) if one.chat] == [
        (2, True),
        (4, True),
    ]
    assert main(["replay", str(path)]) == OK
    said = " ".join(capsys.readouterr()[0].split())
    assert "Whole conversations count as one request for each reply in them (2 requests)." in said
    assert (
        main(["replay", str(written(tmp_path / "a.jsonl", {"messages": [*HISTORY[:2], REPLY]}))])
        == OK
    )
    assert "(1 request)." in capsys.readouterr()[0]


def test_turns_that_many_lines_share_count_once(tmp_path: Path) -> None:
    """Some logs write the reply behind the request's messages, so that each line has all earlier
    turns again."""
    turns = [*HISTORY, REPLY, {"role": "user", "content": "And b.log?"}, REPLY]
    lines = [{"model": "m", "messages": turns[:end]} for end in (3, 5, 7)]
    found = read(written(tmp_path / "a.jsonl", *lines))
    assert [len(one.chat.entries) for one in found if one.chat] == [2, 4, 6]


def test_a_data_set_of_runs_is_not_taken_for_requests(tmp_path: Path) -> None:
    """Its records have members that no API has. A run may end with a result, and the next one may
    begin alike."""
    runs = [
        [*HISTORY, REPLY, {"role": "user", "content": text}]
        for text in ("And b.log?", "And c.log?")
    ]
    lines: list[Json] = [
        {"id": "1", "source": "s", "messages": run}
        for run in (*runs, HISTORY[:2], [*runs[0], REPLY, REPLY])
    ]
    reader = recordings.Recordings()
    found = [*reader.requests(written(tmp_path / "a.jsonl", *lines))]
    assert [len(one.chat.entries) for one in found if one.chat] == [2, 4, 2, 4, 2, 7]
    assert [one.expanded for one in found] == [True] * 4 + [False, True]
    assert reader.aside == {"id", "source"}, "a client that sends these is told that nothing moves"


def test_lists_inside_a_document_are_found(tmp_path: Path) -> None:
    for name in ("data", "observations", "runs"):
        (tmp_path / "a.json").write_text(json.dumps({"object": "list", name: [BODY, BODY]}))
        found = read(tmp_path / "a.json")
        assert [(one.expanded, one.source) for one in found] == [(False, "request body")] * 2, (
            "it ends with a result"
        )


def test_anthropics_batches_are_read(tmp_path: Path) -> None:
    params = {
        "model": "claude-opus-5-5",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps({"requests": [{"custom_id": "1", "params": params | {"system": "Be brief."}}]})
    )
    [found] = read(path)
    assert (
        found.dialect is not None
        and found.dialect.name == "messages"
        and found.source == "Anthropic's batch"
    )


def test_half_surrogates_are_read(tmp_path: Path) -> None:
    record = EXPORTS["Helicone's request"] | {
        "request_body": {"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}
    }
    [found] = read(written(tmp_path / "a.jsonl", record))
    assert "\\ud83d" in texts(found)


@pytest.mark.parametrize("name", ["claude_code", "codex"])
def test_a_compaction_begins_a_new_history(tmp_path: Path, name: str) -> None:
    lines = (SAMPLES / f"{name}.jsonl").read_text().splitlines()
    if name == "codex":
        more: list[Json] = [
            {"timestamp": "t", "type": "compacted", "payload": {"message": "So far: a."}}
        ]
        more.append(json.loads(next(line for line in lines if '"function_call"' in line)))
    else:
        said = {"role": "user", "content": "So far: a."}
        more = [{"type": "system", "subtype": "compact_boundary", "sessionId": "s"}]
        more.append({"type": "user", "sessionId": "s", "isCompactSummary": True, "message": said})
        more.append(
            json.loads([line for line in lines if json.loads(line)["type"] == "assistant"][-1])
        )
        more[-1]["message"]["id"] = "msg_new"
    last = read(written(tmp_path / "a.jsonl", *map(json.loads, lines), *more))[-1]
    assert last.chat is not None and len(last.chat.entries) == 1 and "So far: a." in texts(last)


def said(id: str, *blocks: Json, **more: Any) -> Json:
    """A record of Claude Code's with blocks of the reply `id`."""
    message = {"id": id, "role": "assistant", "model": "claude-opus-5-5", "content": list(blocks)}
    return {"type": "assistant", "sessionId": "s", "message": message, **more}


def asks(content: Any, **more: Any) -> Json:
    return {
        "type": "user",
        "sessionId": "s",
        "message": {"role": "user", "content": content},
        **more,
    }


def calls(id: str) -> Json:
    return {"type": "tool_use", "id": id, "name": "Read", "input": {}}


def answers(id: str) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": f"text of {id}"}


TEXT = {"type": "text", "text": "Done."}


def test_a_call_whose_result_came_before_the_next_block_stays_in_its_reply(tmp_path: Path) -> None:
    records = [
        asks("Read both."),
        said("m1", calls("t1")),
        asks([answers("t1")]),
        said("m1", calls("t2")),
    ]
    found = read(written(tmp_path / "a.jsonl", *records, asks([answers("t2")]), said("m2", TEXT)))
    entries = json.loads(found[-1].chat.body)["messages"] if found[-1].chat else []
    assert [one["role"] for one in entries] == ["user", "assistant", "user", "user"]
    assert [one["id"] for one in entries[1]["content"]] == ["t1", "t2"]


def test_a_block_of_a_reply_that_was_left_belongs_to_no_other_reply(tmp_path: Path) -> None:
    begun = [asks("First.", uuid="u1"), said("m1", TEXT, uuid="a1")]
    asked = [asks("Second.", uuid="u2"), said("m2", calls("t1"), uuid="a2")]
    for records, count in ((asked, 1), ([*begun, *asked], 3)):
        before = "a1" if count == 3 else None
        back = [
            asks("Instead.", uuid="u3", parentUuid=before or "u0"),
            said("m2", calls("t2")),
            said("m3", TEXT),
        ]
        if before is None:
            back.insert(0, {"type": "system", "subtype": "compact_boundary", "sessionId": "s"})
        last = read(written(tmp_path / "a.jsonl", *records, *back))[-1]
        assert last.chat is not None and len(last.chat.entries) == count and "t2" not in texts(last)


def test_a_user_who_goes_back_leaves_what_came_after(tmp_path: Path) -> None:
    records = [
        asks("First.", uuid="u1"),
        said("m1", TEXT, uuid="a1", parentUuid="u1"),
        asks("Second.", uuid="u2", parentUuid="a1"),
        said("m2", TEXT, uuid="a2", parentUuid="u2"),
        asks("Instead.", uuid="u3", parentUuid="a1"),
        asks("A hook's words.", uuid="u4", parentUuid="u1", isMeta=True),
        said("m3", TEXT, uuid="a3", parentUuid="u4"),
    ]
    found = read(written(tmp_path / "a.jsonl", *records))
    assert [len(one.chat.entries) for one in found if one.chat] == [1, 3, 4]
    assert "Second." not in texts(found[-1])
    lines = [json.loads(line) for line in (SAMPLES / "codex.jsonl").read_text().splitlines()]
    back: Json = {
        "timestamp": "t",
        "type": "event_msg",
        "payload": {"type": "thread_rolled_back", "num_turns": 2},
    }
    reply = next(line for line in lines if line["payload"].get("type") == "reasoning")
    last = read(written(tmp_path / "b.jsonl", *lines, back, asked_of_codex("Once more."), reply))[
        -1
    ]
    assert (
        "logs 0 to 2" in texts(last)
        and "A rule for all" not in texts(last)
        and "Once more." in texts(last)
    )


def asked_of_codex(text: str) -> Json:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {"timestamp": "t", "type": "response_item", "payload": item}


def test_other_agents_have_histories_of_their_own(tmp_path: Path) -> None:
    """Some versions write them into the main agent's file, and name none of them."""
    side = {"isSidechain": True}
    records = [
        asks("Main.", uuid="u1"),
        asks("Left.", uuid="l1", parentUuid=None, **side),
        asks("Right.", uuid="r1", parentUuid=None, **side),
        said("m1", TEXT, uuid="l2", parentUuid="l1", **side),
        said("m2", TEXT, uuid="r2", parentUuid="r1", **side),
        said("m3", TEXT, uuid="a1", parentUuid="u1"),
    ]
    found = read(written(tmp_path / "a.jsonl", *records))
    assert [texts(one).count('"user"') for one in found] == [1, 1, 1] and len(
        {one.caller for one in found}
    ) == 3


def test_a_reply_that_a_resumed_session_has_again_counts_once(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (SAMPLES / "claude_code.jsonl").read_text().splitlines()]
    new = said("msg_new", TEXT, timestamp="2026-11-25T00:00:00Z")
    paths = (
        written(tmp_path / "a.jsonl", *lines),
        written(tmp_path / "b.jsonl", *lines, asks("Go on."), new),
    )
    readers = recordings.Recordings()
    found = [list(readers.requests(path)) for path in paths]
    assert [len(one) for one in found] == [9, 1] and "Read the logs 0 to 2" in texts(found[1][0])


def test_opencodes_summary_begins_a_new_history(tmp_path: Path) -> None:
    def told(role: str, text: str, **more: Any) -> Json:
        return {
            "session": "s",
            "message": {"role": role, **more},
            "parts": [{"type": "text", "text": text}],
        }

    records = [
        told("user", "First."),
        told("assistant", "One."),
        told("assistant", "So far: one.", summary=True),
    ]
    found = read(
        written(tmp_path / "a.jsonl", *records, told("user", "Second."), told("assistant", "Two."))
    )
    assert [len(one.chat.entries) for one in found if one.chat] == [1, 2, 3]
    assert "So far: one." in texts(found[-1]) and "First." not in texts(found[-1])


def test_without_files_the_sessions_of_the_home_directory_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["replay"]) == MISTAKE
    assert "give a FILE" in capsys.readouterr()[1]
    claude, codex = tmp_path / ".claude/projects/-logs", tmp_path / ".codex/sessions/2026/11/24"
    for folder, name, sample in (
        (claude, "s.jsonl", "claude_code"),
        (codex, "rollout-1.jsonl", "codex"),
    ):
        folder.mkdir(parents=True)
        (folder / name).write_text((SAMPLES / f"{sample}.jsonl").read_text())
    archive = tmp_path / ".codex/archived_sessions"
    archive.mkdir()
    (archive / "rollout-0.jsonl").symlink_to("nowhere")
    assert main(["replay", "--profile", "--html", str(tmp_path / "r.html")]) == OK
    out, err = capsys.readouterr()
    assert "; recorded in the home directory; policy: " in (tmp_path / "r.html").read_text()
    assert f"left out: {archive}/rollout-0.jsonl: cannot be read: No such file" in out
    assert f"Claude Code: 1 file in {claude}" in err and "nothing leaves this machine" in err
    assert "18 requests, 2 sessions, 3 files" in out and "recommended: " in out
    assert all(f"{name}: " in out for name in ("careful", "balanced", "frugal"))


def test_a_damaged_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.jsonl", {"type": "assistant", "sessionId": "s", "message": 3})
    assert main(["replay", str(path)]) == MISTAKE
    assert (
        "a.jsonl:1: looks like Claude Code's session, but cannot be read as one"
        in capsys.readouterr()[1]
    )
    path = written(tmp_path / "a.jsonl", {"type": "user", "sessionId": "s", "said": "renamed"})
    assert left_out(path) == "looks like Claude Code's session, but has no 'message'"
    path = written(
        tmp_path / "a.json",
        {"id": "msg_1", "sessionID": "ses_1", "role": "user", "time": {"created": 1}},
    )
    assert "a newer opencode moves them to opencode.db" in left_out(path)


# -- what other tools keep -------------------------------------------------------------------------

LONG = "line of a log " * 400


def exported(number: int) -> Json:
    """A reply in `opencode export`, with its calls and their results."""
    state = {"status": "completed", "input": {"path": number}, "output": LONG}
    used = {"type": "tool", "tool": "read", "callID": f"call_{number}", "state": state}
    tokens = {"input": 100, "output": 4, "cache": {"read": 50, "write": 0}}
    info = {"role": "assistant", "id": f"msg_{number}", "modelID": "gpt-x", "tokens": tokens}
    return {"info": info, "parts": [{"type": "step-start"}, used, {"type": "step-finish"}]}


def test_an_export_of_opencode_is_read_like_its_database(tmp_path: Path) -> None:
    asked = {"info": {"role": "user", "id": "msg_0"}, "parts": [{"type": "text", "text": "Read."}]}
    file = tmp_path / "session.json"
    whole = {
        "info": {"id": "ses_1", "title": "t"},
        "messages": [asked, *map(exported, range(1, 5))],
    }
    file.write_text(json.dumps(whole, indent=2))
    found = read(file)
    assert [one.source for one in found] == ["opencode's export"] * 4
    assert [len(one.chat.entries) for one in found if one.chat] == [1, 3, 5, 7]
    assert found[0].reported is not None and found[0].reported.cached == 50


def test_a_bare_list_of_messages_is_read_turn_by_turn(tmp_path: Path) -> None:
    """Cline and Roo Code keep a task's messages so (`api_conversation_history.json`)."""
    history: list[Json] = [
        {"role": "user", "content": [{"type": "text", "text": "Read."}], "ts": 1}
    ]
    for number in range(3):
        use = {
            "type": "tool_use",
            "id": f"t{number}",
            "name": "read_file",
            "input": {"path": number},
        }
        done = {"type": "tool_result", "tool_use_id": f"t{number}", "content": LONG}
        history += [
            {"role": "assistant", "content": [use], "ts": 2},
            {"role": "user", "content": [done], "ts": 3},
        ]
    file = tmp_path / "api_conversation_history.json"
    file.write_text(json.dumps(history))
    found = read(file)
    assert [one.source for one in found] == ["list of messages"] * 3
    assert [one.dialect.name for one in found if one.dialect] == ["messages"] * 3
    assert [len(one.chat.entries) for one in found if one.chat] == [1, 3, 5]
    assert b'"ts"' not in b"".join(one.chat.body for one in found if one.chat)


GEMINI: Json = {
    "sessionId": "s",
    "projectHash": "h",
    "startTime": "2026-01-01T00:00:00Z",
    "lastUpdated": "2026-01-01T00:00:00Z",
    "messages": [{"id": "1", "timestamp": "t", "type": "user", "content": "Read"}],
}
UNREAD: dict[str, tuple[list[Json], str]] = {
    # MemPalace/mempalace#155
    "Gemini CLI": ([GEMINI], "Gemini CLI's session"),
    "Gemini CLI, line by line": (
        [
            {key: value for key, value in GEMINI.items() if key != "messages"},
            {"id": "2", "timestamp": "t", "type": "gemini", "content": "", "toolCalls": []},
        ],
        "Gemini CLI's session",
    ),
    "Kimi Code": (
        [
            {"type": "metadata", "protocol_version": "1.4", "created_at": 1782295200000},
            {"type": "context.append_message", "message": {"role": "user", "content": "Read"}},
        ],
        "Kimi Code's session",
    ),
    "Kimi CLI": (
        [{"role": "_checkpoint", "id": 0}, {"role": "_usage", "token_count": 9}],
        "Kimi Code's session",
    ),
    "anything with messages": (
        [{"messages": [{"from": "human", "text": "Read"}, {"from": "model", "text": "Read."}]}],
        "expected a request body",
    ),
    "other roles": (
        [
            {
                "messages": [
                    {"role": "user", "content": "Read"},
                    {"role": "model", "content": "Read."},
                ]
            }
        ],
        "expected a request body",
    ),
    "other types": (
        [{"input": [{"type": "human", "data": "Read"}, {"type": "ai", "data": "Read."}]}],
        "expected a request body",
    ),
}


@pytest.mark.parametrize(("records", "why"), UNREAD.values(), ids=UNREAD.keys())
def test_what_is_no_request_is_left_out_by_its_name(
    tmp_path: Path, records: list[Json], why: str
) -> None:
    file = tmp_path / ("session.jsonl" if records[1:] else "session.json")
    file.write_text("\n".join(map(json.dumps, records)))
    assert read(file) == [] and why in left_out(file)


def test_a_request_with_one_unknown_entry_is_read(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    odd = {"role": "wizard", "content": "?"}
    file.write_text(json.dumps({"model": "m", "messages": [*HISTORY, odd]}))
    assert len(read(file)) == 1


@pytest.mark.parametrize(
    ("record", "seconds"),
    [
        ({"timestamp": "2026-11-24T11:14:22.5Z"}, 1_795_518_862.5),
        ({"startTime": "2026-11-24 11:14:22"}, 1_795_518_862),
        ({"startTime": 1_795_518_862.5}, 1_795_518_862.5),
        ({"message": {"time": {"created": 1_795_518_862_500}}}, 1_795_518_862.5),
        ({"start_time": "1795518862500000000"}, 1_795_518_862.5),
        ({"timestamp": "noon", "created": 1_795_518_862}, 1_795_518_862),
        ({"created": -5}, 0),
        ({"created": float("inf")}, 0),
        ({"created": float("nan")}, 0),
        ({"created": {}}, 0),
        ({"timestamp": "0001-01-01T00:00:00+14:00"}, 0),
        ({}, 0),
    ],
)
def test_records_say_when_they_were_written(record: Json, seconds: float) -> None:
    assert when(record) == seconds
