"""`replay`: recorded requests under policies, from JSONL and HAR."""

from __future__ import annotations

import io
import json
import os
import threading
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import MISTAKE, OK, main, recordings
from proxy.cli.replay import Progress

Json = dict[str, Any]
SECRET = "sk-very-secret"
EARLY = "offload: {mode: compact, max_total_tokens: 3000, min_saved_tokens: 500, cached_read: 0.5, cache_write: 1}\n"


def session(topic: str, steps: int = 8) -> list[Json]:
    """The bodies of a session's requests."""
    messages: list[Json] = [{"role": "user", "content": f"Look into {topic}."}]
    bodies = []
    for number in range(steps):
        bodies.append({"model": "gpt-4o", "messages": list(messages)})
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = "\n".join(f"{topic} {number} line {line}" for line in range(300))
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
    return bodies


def as_items(body: Json) -> Json:
    """The same request as a client of the Responses API has it."""
    items: list[Json] = []
    for message in body["messages"]:
        if message["role"] == "user":
            items.append(message)
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], "name": "look", "arguments": "{}"})
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
    return {"model": body["model"], "input": items}


def har(*entries: Json) -> Json:
    return {"log": {"version": "1.2", "entries": list(entries)}}


def entry(body: Json | None, path: str = "/v1/chat/completions", usage: Json | None = None, **content: str) -> Json:
    secret = [{"name": "Authorization", "value": f"Bearer {SECRET}"}, {"name": "Cookie", "value": SECRET}]
    request: Json = {"method": "POST", "url": f"https://api.test{path}?key={SECRET}", "headers": secret}
    if body is not None:
        request["postData"] = {"mimeType": "application/json", "text": json.dumps(body)}
    text = content or {"text": json.dumps({"choices": [], "usage": usage})}
    return {"request": request, "response": {"status": 200, "headers": secret, "content": text}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "early.yaml").write_text(EARLY)
    return tmp_path


def lines(path: Path, bodies: Iterable[Json]) -> str:
    path.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))
    return str(path)


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Json:
    assert main(["replay", "--json", *arguments]) == OK
    out, err = capsys.readouterr()
    assert err == "" and SECRET not in out
    found: Json = json.loads(out)
    return found


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["replay", *arguments]) == MISTAKE
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("offload-proxy: ") and SECRET not in err
    return err


def test_policies_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = lines(folder / "a.jsonl", [*session("one"), *session("two")])
    (folder / "off.yaml").write_text("offload: {mode: off}\n")
    before = sorted(folder.iterdir())
    assert main(["replay", "--policy", "early.yaml", "--policy", "off.yaml", recorded]) == OK
    out, err = capsys.readouterr()
    assert err == "" and sorted(folder.iterdir()) == before
    head, rows = out.splitlines()[0], {line[:25].rstrip(): line[25:].split() for line in out.splitlines()[2:16]}
    assert head == "16 requests, 2 sessions, 1 file"
    assert rows[""] == ["early.yaml", "off.yaml"]
    assert rows["requests planned"] == ["16", "of", "16", "0", "of", "16"]
    assert int(rows["events"][0]) >= 2 and rows["events"][1] == "0"
    assert rows["not planned: off"] == ["0", "16"]
    assert 0 < float(rows["  as a share"][0]) < 1 and rows["  as a share"][1] == "-"


def test_json_has_every_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = lines(folder / "a.jsonl", session("one"))
    report = asked(capsys, "--policy", "early.yaml", recorded, recorded)
    assert (report["files"], report["requests"]) == ([recorded, recorded], 16)
    [found] = report["policies"]
    assert (found["policy"], found["planned"], found["billed"], found["sessions"]) == ("early.yaml", 16, 0, 1)
    assert 0 < found["tokens_after"] < found["tokens_before"]
    assert 0 < found["cost_after"] < found["cost_before"]
    assert found["sessions_costing_more"] == 0 and found["worst_session"] < 1
    once = asked(capsys, "--policy", "early.yaml", recorded)["policies"][0]
    assert 2 * once["cost_after"] == found["cost_after"]


def test_observe_is_replayed_as_auto_and_the_defaults_are_the_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = lines(folder / "a.jsonl", session("one", 30))
    (folder / "observe.yaml").write_text("offload: {mode: observe}\n")
    [observed] = asked(capsys, "--policy", "observe.yaml", recorded)["policies"]
    [default] = asked(capsys, recorded)["policies"]
    assert observed | {"policy": ""} == default | {"policy": ""}
    assert default["policy"] == "the defaults" and default["events"] > 0


def test_responses_come_to_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = lines(folder / "chat.jsonl", session("one"))
    responses = lines(folder / "responses.jsonl", map(as_items, session("one")))
    one, other = (asked(capsys, "--policy", "early.yaml", path)["policies"][0] for path in (chat, responses))
    assert (one["planned"], one["events"], one["changed"]) == (other["planned"], other["events"], other["changed"])
    assert other["cost_after"] < other["cost_before"]


def test_the_api_of_lines_may_be_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = lines(folder / "chat.jsonl", session("one"))
    assert asked(capsys, chat, "--dialect", "chat") == asked(capsys, chat)
    said = mistake(capsys, chat, "--dialect", "responses")
    assert "chat.jsonl:1: expected a request body of responses\n" in said
    assert "--dialect fax: expected one of chat, " in mistake(capsys, chat, "--dialect", "fax")


def test_a_loss_is_shown_as_a_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "early.yaml").write_text(EARLY.replace("cached_read: 0.5", "cached_read: 0"))
    recorded = lines(folder / "a.jsonl", session("one", 12))
    [found] = asked(capsys, "--policy", "early.yaml", recorded)["policies"]
    assert found["cost_after"] > found["cost_before"]
    assert found["sessions_costing_more"] == 1 and found["worst_session"] > 1


def test_har_counts_what_was_billed_and_leaves_credentials_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, body = session("one")
    usage = {"prompt_tokens": 20_000, "prompt_tokens_details": {"cached_tokens": 4_000}, "completion_tokens": 3}
    encoded = b64encode(json.dumps({"usage": usage}).encode()).decode()
    recording = har(
        entry(body, usage=usage),
        entry(body, text=encoded, encoding="base64"),
        entry(body, text="%%%", encoding="base64"),
        entry(as_items(body), "/v1/responses"),
        entry({"model": "m"}, "/v1/embeddings"),
        entry(None),
    )
    path = folder / "a.har"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(recording, indent=1).encode())
    report = asked(capsys, "--policy", "early.yaml", str(path))
    [found] = report["policies"]
    assert (report["requests"], found["planned"], found["billed"]) == (6, 4, 2)
    assert found["unplanned"] == {"other API": 1, "invalid": 1}
    path.write_text(json.dumps(har(entry(body, usage=usage))))
    [found] = asked(capsys, "--policy", "early.yaml", str(path))["policies"]
    assert found["cost_before"] == 4_000 * 0.5 + 16_000


def test_reasons_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [{**body, "n": 2} for body in session("one", 2)]
    [found] = asked(capsys, lines(folder / "a.jsonl", bodies))["policies"]
    assert found["unplanned"] == {"field n": 2} and found["worst_session"] is None


def test_blank_lines_a_mark_and_a_missing_end_do_not_matter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = json.dumps(session("one", 1)[0]).encode()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + body + b"\r\n\n  \n" + body)
    assert asked(capsys, str(folder / "a.jsonl"))["requests"] == 2
    (folder / "empty.jsonl").write_bytes(b"")
    assert asked(capsys, str(folder / "empty.jsonl"))["requests"] == 0
    assert main(["replay", str(folder / "empty.jsonl")]) == OK


def test_a_pipe_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    text = "".join(f"{json.dumps(body)}\n" for body in session("one"))
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    report = asked(capsys, str(pipe))
    writer.join()
    assert report["requests"] == 8


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "a.jsonl:2: expected a request body, a JSON object on one line:"),
        ("[1]", "a.jsonl:2: expected a request body, a JSON object on one line:"),
        ('"x"', "a.jsonl:2: expected a request body, a JSON object on one line:"),
        ('{"a": ' * 50_000, "a.jsonl:2: expected a request body, a JSON object on one line:"),
        ('{"model": "\xff\udcff"}', "a.jsonl:2: expected a request body"),
        ('{"model": "m", "prompt": "x"}', "a.jsonl:2: expected a request body of chat or responses"),
        ("{}", "a.jsonl:2: expected a request body of chat or responses"),
        ('{"model": "m", "messages": 3}', "a.jsonl:2: expected a request body of chat or responses"),
    ],
)
def test_a_bad_line_is_named(folder: Path, capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    good = json.dumps(session("one", 1)[0])
    (folder / "a.jsonl").write_bytes(f"{good}\n{line}\n{good}\n".encode("utf-8", "surrogateescape"))
    assert said in mistake(capsys, "a.jsonl")


def test_a_line_that_is_too_long_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "LONGEST", 100)
    (folder / "a.jsonl").write_text("\n" + "x" * 101)
    assert "a.jsonl:2: longer than 100 bytes" in mistake(capsys, "a.jsonl")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"log": {"entries": [{},\n\n]}}', "a.har:3: not a HAR: "),
        ('{"log": {}}', "a.har: not a HAR: "),
        ('{"log": {"entries": [{"request": {"method": 1}}]}}', "a.har: entry 1 is not a HAR's: "),
    ],
)
def test_a_bad_har_is_named(folder: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    (folder / "a.har").write_text(text)
    assert said in mistake(capsys, "a.har")


def test_files_that_cannot_be_read_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.jsonl: cannot be read: No such file or directory" in mistake(capsys, "none.jsonl")
    assert ": cannot be read: Is a directory" in mistake(capsys, str(folder))
    recorded = lines(folder / "a.jsonl", session("one", 1))
    assert "none.yaml: cannot be read" in mistake(capsys, "--policy", "none.yaml", recorded)
    (folder / "bad.yaml").write_text("offload: {mode: atuo}\n")
    assert "bad.yaml:1: offload.mode: expected one of" in mistake(capsys, "--policy", "bad.yaml", recorded)
    (folder / "bad.yaml").write_text("tools: {inject: never}\n")
    assert "bad.yaml:1: tools.inject: never leaves" in mistake(capsys, "--policy", "bad.yaml", recorded)


def test_a_tenants_policy_needs_none_of_its_callers_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "acme.yaml").write_text("api_keys: [{env: NOT_SET}]\n" + EARLY)
    recorded = lines(folder / "a.jsonl", session("one"))
    [found] = asked(capsys, "--policy", "acme.yaml", recorded)["policies"]
    assert found["planned"] == 8


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_appears_on_terminals_only_and_goes_away() -> None:
    now = [0.0]
    terminal, file = Terminal(), io.StringIO()
    with Progress(terminal, lambda: now[0]) as bar, Progress(file, lambda: now[0]) as none:
        for share in (0.1, 0.2, 0.5):
            bar.show(share, 1_000)
            none.show(share, 1_000)
            now[0] += 0.06
    assert file.getvalue() == ""
    first, second, erased, end = terminal.getvalue().split("\r")[1:]
    assert (first, second) == (
        f"[###{' ' * 27}]  10%  1,000 requests",
        f"[{'#' * 15}{' ' * 15}]  50%  1,000 requests",
    )
    assert erased.strip() == end == "" and len(erased) == len(second)
