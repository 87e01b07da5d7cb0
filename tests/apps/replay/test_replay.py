"""`replay`: recorded requests under policies, from JSONL and HAR."""

from __future__ import annotations

import fcntl
import gc
import gzip
import json
import os
import signal
import sys
import termios
import threading
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from proxy.apps.replay import recommendation, recommended, recordings
from proxy.apps.replay.recordings import Recordings
from proxy.apps.replay.tally import Course, SessionKey, Tally
from proxy.cli import INTERRUPTED, MISTAKE, OK, main
from proxy.policies import defaults
from proxy.terminal import percent
from tests.clock import PATIENCE, wait_until
from tests.dialects.messages import converting as messages
from tests.dialects.responses import converting as responses
from tests.steps import chat

Json = dict[str, Any]
SECRET = "sk-very-secret"
EARLY = "offload: {mode: compact, max_total_tokens: 3000, cached_read: 0.5, cache_write: 1}\n"


def session(topic: str, steps: int = 8) -> list[Json]:
    """The bodies of a session's requests."""
    messages: list[Json] = [{"role": "user", "content": f"Look into {topic}."}]
    bodies = []
    for number in range(steps):
        bodies.append({"model": "gpt-4o", "messages": list(messages)})
        messages += chat(
            f"c{number}", "\n".join(f"{topic} {number} line {line}" for line in range(300)), "look"
        )
    return bodies


def as_items(body: Json) -> Json:
    """The same request as a client of the Responses API has it."""
    return {"model": body["model"], "input": responses.items(body["messages"])}


def as_messages(body: Json) -> Json:
    """The same request as a client of the Messages API has it."""
    return {
        "model": body["model"],
        "max_tokens": 100,
        "messages": messages.request(body["messages"])["messages"],
    }


def har(*entries: Json) -> Json:
    return {"log": {"version": "1.2", "entries": list(entries)}}


def entry(
    body: Json | None, path: str = "/v1/chat/completions", usage: Json | None = None, **content: str
) -> Json:
    secret = [
        {"name": "Authorization", "value": f"Bearer {SECRET}"},
        {"name": "Cookie", "value": SECRET},
    ]
    request: Json = {
        "method": "POST",
        "url": f"https://api.test{path}?key={SECRET}",
        "headers": secret,
    }
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
    head, rows = (
        out.splitlines()[3],
        {line[:25].rstrip(): line[25:].split() for line in out.split("\n\n")[2].splitlines()},
    )
    assert head == "16 requests, 2 sessions, 1 file"
    assert rows[""] == ["early.yaml", "off.yaml"]
    assert rows["requests planned"] == ["16", "of", "16", "0", "of", "16"]
    assert int(rows["events"][0]) >= 2 and rows["events"][1] == "0"
    assert rows["not planned: off"] == ["0", "16"]
    share, unit, none = rows["  as a share"]
    assert 0 < float(share) < 100 and (unit, none) == ("%", "-")


def test_the_recommended_profile_costs_least_where_little_is_lost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short sessions lose the tokens of our tools. One long session saves more than forty of them
    lose."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    short = [
        [body | {"tools": [tool]} for body in session(f"short {number}", 1)] for number in range(40)
    ]
    long = [body | {"tools": [tool]} for body in session("long", 40)]
    none, frugal = (
        "none, because no profile saves enough",
        "frugal, the cheapest profile whose dearer sessions lose at ",
    )
    for topics, best in ((short, none), ([*short, long], frugal)):
        assert (
            main(
                [
                    "replay",
                    "--profile",
                    lines(folder / "a.jsonl", [body for one in topics for body in one]),
                ]
            )
            == OK
        )
        out = capsys.readouterr().out
        assert f"recommended: {best}" in out
        assert f"40 of {len(topics)} sessions dearer, the worst at " in out


@pytest.mark.parametrize(
    ("sessions", "best"),
    [
        (
            {"careful": [(100, 90)], "frugal": [(50, 30), (50, 55)]},
            "careful, the cheapest profile whose",
        ),
        ({"careful": [(50, 50)], "frugal": [(50, 45), (50, 51)]}, "none, because"),
        ({"careful": [(0, 0)]}, "none, because"),
    ],
)
def test_a_profile_is_recommended_if_it_saves_and_little_is_lost(
    sessions: dict[str, list[tuple[int, int]]], best: str
) -> None:
    """A cheaper one whose dearer sessions lose too much is passed over."""
    tallies = []
    for name, costs in sessions.items():
        tally = Tally(name, defaults())
        tally.sessions = {
            SessionKey("chat", "m", bytes([number]), ""): Course(
                cost_before=before, cost_after=after
            )
            for number, (before, after) in enumerate(costs)
        }
        tally.cost_before, tally.cost_after = (sum(side) for side in zip(*costs, strict=True))
        tallies.append(tally)
    assert recommendation(recommended(tallies)).startswith(f"recommended: {best}")


def test_a_session_is_dearer_from_one_per_cent_on() -> None:
    tally = Tally("", defaults())
    for number, after in enumerate((1_005, 1_010, 1_011, 1_500)):
        key = SessionKey("chat", "m", bytes([number]), "")
        tally.sessions[key] = Course(cost_before=1_000, cost_after=after)
    assert tally.losses == tally.figures()["sessions_costing_more"] == 2
    assert tally.lost == 511


def test_what_dearer_sessions_lose_is_a_share_of_all_cost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    recorded = lines(folder / "a.jsonl", [session("one", 1)[0] | {"tools": [tool]}])
    [found] = asked(capsys, recorded)["policies"]
    share = (found["cost_after"] - found["cost_before"]) / found["cost_before"]
    assert main(["replay", recorded]) == OK
    said = capsys.readouterr().out
    assert f"1 of 1 session dearer, the worst at {percent(1 + share)}" in said
    [lost] = [line for line in said.splitlines() if line.startswith("  what they lose ")]
    assert lost.endswith(f" {percent(share)}")


def test_where_nothing_moves_it_says_what_the_plan_waits_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = lines(folder / "a.jsonl", session("one"))
    (folder / "high.yaml").write_text("offload: {max_tool_message_tokens: 20000}\n")
    assert main(["replay", "--policy", "high.yaml", recorded]) == OK
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("nothing moves. In the largest request, the history is ")
    assert said.endswith("; no result above 20,000 tokens is left to move")
    (folder / "high.yaml").write_text(
        "tools: {inject: always}\noffload: {max_tool_message_tokens: 20000}\n"
    )
    assert main(["replay", "--policy", "high.yaml", recorded]) == OK
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith(
        "nothing moves, and the proxy's tools add tokens. In the largest request, the history is "
    )


def test_json_has_every_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = lines(folder / "a.jsonl", session("one"))
    report = asked(capsys, "--policy", "early.yaml", recorded, recorded)
    assert (report["files"], report["requests"]) == ([recorded, recorded], 16)
    [found] = report["policies"]
    assert (found["policy"], found["planned"], found["billed"], found["sessions"]) == (
        "early.yaml",
        16,
        0,
        1,
    )
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


def test_har_counts_what_was_billed_and_leaves_credentials_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, body = session("one")
    usage = {
        "prompt_tokens": 20_000,
        "prompt_tokens_details": {"cached_tokens": 4_000},
        "completion_tokens": 3,
    }
    encoded = b64encode(json.dumps({"usage": usage}).encode()).decode()
    recording = har(
        entry(body, usage=usage),
        entry(body, text=encoded, encoding="base64"),
        entry(body, text="%%%", encoding="base64"),
        entry(as_items(body), "/v1/responses"),
        entry({"model": "m"}, "/v1/embeddings"),
        entry(as_messages(body), "/v1/messages/count_tokens"),
        entry(None),
    )
    path = folder / "a.har"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(recording, indent=1).encode())
    report = asked(capsys, "--policy", "early.yaml", str(path))
    [found] = report["policies"]
    assert (report["requests"], found["planned"], found["billed"]) == (7, 4, 2)
    assert found["unplanned"] == {"other API": 2, "invalid": 1}
    path.write_text(json.dumps(har(entry(body, usage=usage))))
    [found] = asked(capsys, "--policy", "early.yaml", str(path))["policies"]
    assert found["cost_before"] == 4_000 * 0.5 + 16_000


def test_an_api_with_an_upstream_of_its_own_has_its_window(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "two.yaml").write_text(
        "offload: {profile: careful}\nupstreams: {messages: {context_window: 9000}}\n"
    )
    *_, body = session("one", 6)
    given = lines(folder / "a.jsonl", [body]), lines(folder / "b.jsonl", [as_messages(body)])
    for path, changed in zip(given, (0, 1), strict=True):
        [found] = asked(capsys, "--policy", "two.yaml", path)["policies"]
        assert (found["planned"], found["changed"]) == (1, changed), path


def test_an_unknown_member_is_named_until_the_policy_knows_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(folder / "a.jsonl", [{**body, "n": 2} for body in session("one", 2)])
    [found] = asked(capsys, path)["policies"]
    assert found["unplanned"] == {"field n": 2} and found["worst_session"] is None
    sent = [
        {"url": "/v1/chat/completions", "body": {**body, "note": "ours"}}
        for body in session("one", 2)
    ]
    path = lines(folder / "a.jsonl", sent)
    [found] = asked(capsys, path)["policies"]
    assert found["unplanned"] == {"field note": 2}
    assert main(["replay", path]) == OK
    assert "no request is planned" in capsys.readouterr().out
    (folder / "known.yaml").write_text("upstream: {members: [note]}\n")
    [found] = asked(capsys, "--policy", "known.yaml", path)["policies"]
    assert (found["planned"], found["unplanned"]) == (2, {})


def test_members_that_only_a_log_has_are_left_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = session("one")
    plain = asked(capsys, lines(folder / "a.jsonl", bodies))["policies"]
    logged: list[Json] = [
        {"at": "noon", **body, "id": number} for number, body in enumerate(bodies)
    ]
    path = lines(folder / "a.jsonl", logged)
    assert asked(capsys, path)["policies"] == plain
    assert main(["replay", path]) == OK
    said = " ".join(capsys.readouterr().out.split())
    assert "Only a log has these members: at, id. A client that sends one needs it in the" in said


def test_blank_lines_a_mark_and_a_missing_end_do_not_matter(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps(session("one", 1)[0]).encode()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + body + b"\r\n\n  \n" + body)
    assert asked(capsys, str(folder / "a.jsonl"))["requests"] == 2
    (folder / "empty.jsonl").write_bytes(b"")
    said = "empty.jsonl: holds no request to a model, or only those of an earlier file"
    assert mistake(capsys, "empty.jsonl") == f"offload-proxy: {said}\n"


def test_a_record_that_is_not_whole_is_named_and_the_others_count(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is still written, or its writer was killed and has gone on later."""
    path = folder / "a.jsonl"
    lines(path, session("one", 3))
    whole = path.read_bytes()
    for cut in (1, 2, 300):
        path.write_bytes(whole[:-cut] + whole * (cut == 300))
        report = asked(capsys, "a.jsonl")
        assert report["requests"] == {1: 3, 2: 2, 300: 4}[cut]
        assert report["left_out"] == ["a.jsonl:3: not a JSON object"] * (cut > 1)


def test_a_file_that_cannot_be_read_leaves_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(folder / "a.jsonl", session("one"))
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "page.json").write_text("<!doctype html>\n<p>\n")
    (folder / "package.json").write_text('{"name": "x",\n "version": "1"}')
    for name in ("empty.jsonl", "others.har"):
        (folder / name).write_text(json.dumps(har()) if name == "others.har" else "")
    (folder / "late.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes())[:-9])
    assert main(["replay", "."]) == OK
    out, _ = capsys.readouterr()
    assert "16 requests, 1 session, 7 files, 6 of them left out or read in part" in out
    said = [
        line.removeprefix("left out: ")
        for line in out.splitlines()
        if line.startswith("left out: ")
    ]
    assert (
        said[0]
        == "empty.jsonl (and 1 more file): holds no request to a model, or only those of an earlier file"
    )
    starts = ("late.jsonl.gz: is not whole", "loop.jsonl: cannot be read: Too many", "package.json: expected a request",
              "page.json:1: not a JSON object; 1 more of its records cannot be read either")  # fmt: skip
    assert len(said) == 5 and all(
        one.startswith(start) for one, start in zip(said[1:], starts, strict=True)
    )


GOOD = json.dumps(session("one", 1)[0]) + "\n"
NO_OBJECT = "a.jsonl:2: not a JSON object"
NO_BODY = "a.jsonl:2: expected a request body of chat or responses"
UTF_16 = "a.jsonl: expected UTF-8, and this is UTF-16: PowerShell's > writes it"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD + "{\n" + GOOD, NO_OBJECT),
        (GOOD + "[1]\n" + GOOD, NO_OBJECT),
        (GOOD + '{"a": ' * 50_000 + "\n", NO_OBJECT),
        (GOOD + '{"model": "m", "prompt": "x"}\n', NO_BODY),
        (GOOD + '{"model": "m", "messages": 3}\n', NO_BODY),
        ("\n" + "x" * (5 << 20) + "\n" + GOOD, "a.jsonl:2: longer than 1,000,000 bytes"),
        (GOOD.encode("utf-16"), UTF_16),
        (f"\ufeff{GOOD}".encode("utf-16-be"), UTF_16),
        ('{"log": {"entries": [{},\n\n]}}', "a.har:3: not JSON: "),
        ('{"log": {}}', "a.har:1: expected a request body of chat"),
        (
            '{"log": {"entries": [{"request": {"method": 1}}]}}',
            "a.har: entry 1: expected a request body of chat",
        ),
    ],
)
def test_a_bad_file_is_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str | bytes,
    said: str,
) -> None:
    monkeypatch.setattr(recordings, "LONGEST", 1_000_000)
    path = folder / said.partition(":")[0]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    left = Recordings()
    assert len(list(left.requests(Path(path.name)))) == path.read_bytes().count(GOOD.encode())
    found = left.left_out[Path(path.name)]
    assert f"{found.place}: {found.why}".startswith(said)


def test_files_that_cannot_be_read_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "none.jsonl: cannot be read: No such file or directory" in mistake(capsys, "none.jsonl")
    said = mistake(capsys, str(folder))
    assert f"{folder}: has no files named *.jsonl, " in said and "name the file itself" in said
    recorded = lines(folder / "a.jsonl", session("one", 1))
    assert "none.yaml: cannot be read" in mistake(capsys, "--policy", "none.yaml", recorded)
    (folder / "bad.yaml").write_text("offload: {mode: atuo}\n")
    assert "bad.yaml:1: offload.mode: expected one of" in mistake(
        capsys, "--policy", "bad.yaml", recorded
    )
    (folder / "bad.yaml").write_text("offload: {said: [{tool: x}]}\n")
    assert "bad.yaml:1: offload.said[0]: expected text" in mistake(
        capsys, "--policy", "bad.yaml", recorded
    )


def test_a_closed_folder_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(folder / "a.jsonl", session("one", 1))
    closed = folder / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    [said] = asked(capsys, str(folder))["left_out"]
    assert said.startswith(f"{closed}: cannot be read: ")


def test_a_tenants_policy_needs_none_of_its_callers_keys(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "acme.yaml").write_text("api_keys: [{env: NOT_SET}]\n" + EARLY)
    recorded = lines(folder / "a.jsonl", session("one"))
    [found] = asked(capsys, "--policy", "acme.yaml", recorded)["policies"]
    assert found["planned"] == 8


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, 2),
        ({"system": "Be brief."}, 1),
        ({"tools": [{"name": "look", "input_schema": {"type": "object"}}]}, 1),
    ],
)
def test_lines_of_messages_are_told_from_chat(
    folder: Path, capsys: pytest.CaptureFixture[str], more: Json, steps: int
) -> None:
    *_, body = session("one", steps)
    path = lines(folder / "a.jsonl", [as_messages(body) | more])
    [found] = Recordings().requests(Path(path))
    assert (
        found.dialect is not None and found.dialect.name == "messages" and not found.dialect.counts
    )
    assert asked(capsys, path)["policies"][0]["planned"] == 1


def test_lines_of_chat_are_not_taken_for_messages(folder: Path) -> None:
    bodies = [
        *session("one", 2),
        {**session("one", 1)[0], "max_tokens": 5, "thinking": {"type": "enabled"}},
    ]
    bodies.append(
        {"model": "m", "messages": [{"role": "system", "content": "tool_result input_schema"}]}
    )
    path = lines(folder / "a.jsonl", bodies)
    assert [one.dialect and one.dialect.name for one in Recordings().requests(Path(path))] == [
        "chat"
    ] * 4


def test_a_browsers_har_may_have_anything_beside_what_models_were_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = session("one", 1)[0]
    socket = {
        "request": {"method": "GET", "url": "wss://api.test/v1/responses"},
        "_webSocketMessages": [{"data": 1}],
    }
    blocked = entry(body) | {"response": None}
    odd = entry(body) | {"response": {"status": "ok", "content": [1]}}
    nothing = entry(body) | {"response": {"status": 200, "content": {"size": -1, "text": None}}}
    form = entry(None)
    form["request"]["postData"] = {"mimeType": "multipart/form-data", "params": []}
    packed = entry(body)
    packed["request"]["postData"] = {
        "text": b64encode(json.dumps(body).encode()).decode(),
        "encoding": "base64",
    }
    bad = {"request": {"method": "POST", "url": "http://[bad/v1/chat/completions", "postData": 3}}
    path = folder / "a.har"
    path.write_text(json.dumps(har(socket, blocked, odd, nothing, form, packed, bad)))
    [found] = asked(capsys, str(path))["policies"]
    assert (found["planned"], found["billed"]) == (4, 0)
    assert found["unplanned"] == {"other API": 2, "invalid": 1}


def test_callers_that_begin_alike_have_sessions_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In captures. Bodies alone do not say whose they are."""
    first, *_, last = session("one")
    given = [
        {"url": "/v1/chat/completions", "tenant": "acme", "namespace": namespace, "body": body}
        for body in (first, last)
        for namespace in ("acme-1", "acme-2")
    ]
    [found] = asked(capsys, "--policy", "early.yaml", lines(folder / "a.jsonl", given))["policies"]
    assert (found["planned"], found["sessions"]) == (4, 2)
    [found] = asked(capsys, "--policy", "early.yaml", lines(folder / "b.jsonl", [first, last] * 2))[
        "policies"
    ]
    assert (found["planned"], found["sessions"]) == (4, 1)


def test_lines_may_name_their_address_as_batches_and_captures_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, body = session("one")
    said = {"prompt": 20_000, "completion": 3, "cached": 4_000}
    given = [
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"url": "/v1/messages?beta=true", "usage": said, "body": as_messages(body)},
        {"url": "/v1/messages/count_tokens", "body": as_messages(body)},
        {"url": "/v1/responses", "usage": {"prompt": "many"}, "body": as_items(body)},
        {
            "url": "/v1/responses",
            "body": {"model": "m", "input": "go on", "previous_response_id": "r"},
        },
        {"url": "/v1/embeddings", "body": {"model": "m", "input": "x"}},
        {"url": "/v1/chat/completions", "body": 3},
    ]
    [found] = asked(capsys, "--policy", "early.yaml", lines(folder / "a.jsonl", given))["policies"]
    assert (found["planned"], found["billed"]) == (3, 1)
    assert found["unplanned"] == {"other API": 2, "invalid": 1, "field previous_response_id": 1}


def test_gzip_is_read_and_must_be_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gzip.compress(Path(lines(folder / "a.jsonl", session("one"))).read_bytes())
    (folder / "a.jsonl.gz").write_bytes(packed)
    assert asked(capsys, "a.jsonl.gz")["policies"] == asked(capsys, "a.jsonl")["policies"]
    for damaged in (packed[:-9], packed[: len(packed) // 2], packed[:15] + b"\xff" * 99):
        (folder / "b.jsonl.gz").write_bytes(damaged)
        assert main(["replay", "b.jsonl.gz", "a.jsonl"]) == OK
        assert "left out: b.jsonl.gz: is not whole, or no gzip" in capsys.readouterr()[0]
    (folder / "c.har").write_bytes(
        gzip.compress(json.dumps(har(entry(session("one", 1)[0]))).encode())
    )
    assert asked(capsys, "c.har")["requests"] == 1


def test_a_directory_stands_for_the_recordings_below_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "deep").mkdir()
    lines(folder / "deep" / "b.jsonl", session("one"))
    lines(folder / "a.jsonl", session("two"))
    (folder / "c.har").write_text(json.dumps(har()))
    (folder / "notes.txt").write_text("none")
    os.mkfifo(folder / "pipe.jsonl")  # to open it would wait for a writer
    assert asked(capsys, str(folder))["requests"] == 16
    assert recordings.named([str(folder), "-"]) == [
        folder / "a.jsonl",
        folder / "deep" / "b.jsonl",
        folder / "c.har",
        Path("-"),
    ]


def test_names_that_are_no_text_or_move_terminals_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"\xff\x1b[31m.jsonl")
    lines(folder / name, session("one", 1))
    (folder / "\x1b[2J.yaml").write_text(EARLY)
    [file] = asked(capsys, name)["files"]
    assert file == "\ufffd\ufffd[31m.jsonl"
    assert "\ufffd[2J.yaml:1: tenant: expected" in mistake(capsys, "--policy", "\x1b[2J.yaml", name)


def test_standard_input_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.har").write_text(json.dumps(har(entry(session("one", 1)[0]))))
    for path, count in ((lines(folder / "a.jsonl", session("one")), 8), ("a.har", 1)):
        with open(path) as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert asked(capsys, "-")["requests"] == count
    reader, writer = os.pipe()
    os.write(writer, (folder / "a.har").read_bytes())
    os.close(writer)
    with open(reader) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert asked(capsys, "-")["requests"] == 1


def test_ctrl_c_ends_a_replay_that_waits_for_its_pipe(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # which a shell's background job ignores
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reader, writer = os.pipe()
    over = threading.Event()

    def interrupt() -> None:
        os.write(writer, f"{json.dumps(session('one', 1)[0])}\n".encode())
        wait_until(lambda: not fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4).strip(b"\0"))
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(PATIENCE)
        os.close(writer)

    thread = threading.Thread(target=interrupt)
    with open(reader) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        gc.disable()  # Python ignores what is raised in a callback of its collector
        thread.start()
        code = main(["replay", "-"])
        gc.enable()
        over.set()
        thread.join()
    assert (code, *capsys.readouterr()) == (INTERRUPTED, "", "")
