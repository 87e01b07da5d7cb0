"""Plan and records → messages: what stays keeps its bytes, snapshots stand in their place, turns
are put together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from proxy.dialects import render
from proxy.dialects.chat import CHAT
from proxy.dialects.render import ActiveSnapshot, Files, moved_files
from proxy.plan.recognise import Hidden
from proxy.policy import SnapshotRole
from proxy.tools.definitions import OTHER_NAMES
from tests import written
from tests.dialects.rendering import history, rendered, snapshot

OFFLOAD = written.SMALL


def raw(role: str, content: Any = "", **more: Any) -> bytes:
    return json.dumps({"role": role, "content": content, **more}).encode()


def step(number: int, said: int, *results: int) -> list[bytes]:
    """An assistant message of `said` characters and its tools' results."""
    ids = [f"call_{number}_{place}" for place in range(len(results))]
    calls = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for id in ids
    ]
    more = {"tool_calls": calls} if calls else {}
    answers = [
        raw("tool", f"{id} " * (size // 9), tool_call_id=id)
        for id, size in zip(ids, results, strict=True)
    ]
    return [raw("assistant", f"s{number} " + "x" * said, **more), *answers]


class Case:
    """A history with its plan."""

    def __init__(self, *raws: bytes) -> None:
        self.raws = list(raws)
        self.history = history(CHAT, raws, OFFLOAD)
        self.transcript = self.history.transcript(raws)
        self.plan = self.history.plan()

    def shown(self, role: SnapshotRole = SnapshotRole.AUTO) -> ActiveSnapshot:
        found = snapshot(self.history, self.plan, role=role)
        assert found is not None
        return found

    def render(
        self, shown: ActiveSnapshot | None = None, rounds: Mapping[int, Hidden] = {}, **how: Any
    ) -> list[bytes]:
        sent = render.sent_rounds(
            CHAT, self.transcript, self.plan, rounds, OFFLOAD.max_tool_message_tokens
        )
        return rendered(CHAT, self.transcript, self.plan, OFFLOAD, shown, rounds=sent, **how)

    def files(self, shown: ActiveSnapshot | None = None) -> Files:
        boundary = shown.boundary if shown else None
        return moved_files(CHAT, self.transcript, self.plan, "/store", boundary, self.history.links)


SYSTEM, USER, LAST = (
    raw("system", "be good"),
    raw("user", "rules: never touch production"),
    raw("user", "go on"),
)
CUT = Case(SYSTEM, USER, *step(1, 680), *step(4, 300), *step(2, 680, 200), *step(3, 100), LAST)


def test_a_cut_without_a_record_is_not_shown() -> None:
    assert CUT.plan.boundaries
    assert CUT.render() == CUT.raws


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([raw("developer", "d")], "d\n\n{block}"),
        ([b'{"role":"system","content":null}'], "\n\n{block}"),
        ([b'{ "content" : "caf\\u00e9 \\/" ,"role":"system"}'], "café /\n\n{block}"),
    ],
)
def test_where_a_snapshot_goes(system: list[bytes], expected: str) -> None:
    case = Case(*system, *CUT.raws[1:])
    sent = case.render(shown=case.shown())
    assert json.loads(sent[0])["content"] == expected.format(
        block=render.shown_block(case.transcript, case.shown())
    )
    assert json.loads(sent[0])["role"] in ("system", "developer")


@pytest.mark.parametrize(
    ("role", "sent"),
    [
        (SnapshotRole.SYSTEM, [("system", "{block}"), ("user", "rules")]),
        (SnapshotRole.USER, [("user", "{block}\n\nrules")]),
        (SnapshotRole.AUTO, [("user", "{block}\n\nrules")]),
    ],
)
def test_where_a_snapshot_goes_without_a_system_message(
    role: SnapshotRole, sent: list[tuple[str, str]]
) -> None:
    case = Case(raw("user", "rules", name="ann"), *CUT.raws[2:])
    found = [json.loads(one) for one in case.render(shown=case.shown(role))]
    block = render.shown_block(case.transcript, case.shown())
    assert [(one["role"], one["content"]) for one in found[: len(sent)]] == [
        (role, text.format(block=block)) for role, text in sent
    ]
    assert found[len(sent) - 1]["name"] == "ann"


def test_in_parts_a_snapshot_is_one_more_part_and_bytes_stay() -> None:
    part = b'{"type" :"text","text":"a","cache_control":{"type":"ephemeral"}}'
    case = Case(b'{"role":"system","content":[' + part + b"]}", *CUT.raws[1:])
    sent = case.render(shown=case.shown())[0]
    assert part in sent
    assert len(json.loads(sent)["content"]) == 2


def test_the_prompt_before_the_event_is_a_prefix_of_what_was_sent_before_it() -> None:
    """The summary call rides on the cached prefix: what the event moves is still whole in it."""
    [boundary] = CUT.plan.boundaries
    before = CUT.plan.before(boundary.event)
    assert (
        rendered(CHAT, CUT.transcript, before, OFFLOAD, end=boundary.end)
        == CUT.raws[: boundary.end]
    )


# -- hidden rounds ---------------------------------------------------------------------------------

CALL = {
    "id": "h1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path":"/store/x"}'},
}
HIDDEN = Hidden(
    (raw("assistant", None, tool_calls=[CALL]), raw("tool", "z" * 500, tool_call_id="h1")),
    None,
    (),
    (40, 410),
)
THEIRS = json.loads(step(3, 10, 40)[0])["tool_calls"]
WHOLE = raw("assistant", "whole", tool_calls=[CALL, *THEIRS])
MIXED = Hidden((), b"[%b]" % WHOLE, (raw("tool", "z" * 500, tool_call_id="h1"),), (500,))
SMALL = msgspec.structs.replace(MIXED, sizes=(90,))


LATER = Case(
    SYSTEM, USER, *step(1, 10, 5000, 100), *step(2, 10, 4000), *step(3, 10, 40), *step(4, 10), LAST
)


def test_hidden_rounds_stand_before_their_reply_and_a_mixed_turn_is_put_together_again() -> None:
    assert LATER.plan.used == 9
    assert LATER.render(rounds={9: HIDDEN})[9:] == [*HIDDEN.before, *LATER.raws[9:]]
    assert LATER.render(rounds={7: SMALL})[7:] == [WHOLE, *SMALL.after, *LATER.raws[8:]]


def test_a_large_answer_shrinks_with_the_second_request_after_it() -> None:
    once = Case(SYSTEM, USER, *step(1, 10, 5000), *step(2, 10, 40))
    assert once.render(rounds={4: HIDDEN})[4:6] == list(HIDDEN.before)
    twice = Case(SYSTEM, USER, *step(1, 10, 5000), *step(2, 10, 40), *step(3, 10, 40))
    assert json.loads(twice.render(rounds={4: HIDDEN})[5])["content"].count("read_file") == 1
    later = Case(*twice.raws, *step(4, 10, 40))
    assert later.render(rounds={4: HIDDEN})[: len(twice.raws) + 2] == twice.render(
        rounds={4: HIDDEN}
    )


def test_a_shrunk_round_counts_as_what_it_became() -> None:
    shrunk = CHAT.shrunk(HIDDEN, 300)
    assert shrunk.before[0] == HIDDEN.before[0] and len(shrunk.before[1]) < 250
    assert shrunk.sizes == (40, len(shrunk.before[1]) // 4) and shrunk.tokens == sum(shrunk.sizes)
    mixed = CHAT.shrunk(MIXED, 300)
    assert (mixed.instead, mixed.before) == (MIXED.instead, ()) and mixed.after == shrunk.before[1:]
    renamed = CHAT.shrunk(MIXED, 300, OTHER_NAMES)
    assert "call offload_read_file with" in json.loads(renamed.after[0])["content"], (
        "the client has a read_file now"
    )
    unknown = Hidden((raw("tool", "z" * 500, tool_call_id="other"),), None, (), (500,))
    assert CHAT.shrunk(unknown, 300).before == unknown.before


def test_rounds_before_the_cut_are_gone_with_it() -> None:
    assert CUT.render(shown=CUT.shown(), rounds={2: HIDDEN}) == CUT.render(shown=CUT.shown())


# -- what can be read back -------------------------------------------------------------------------


def test_equal_results_of_several_calls_are_one_file_that_each_of_them_finds() -> None:
    steps = [USER]
    for number, path in enumerate(("mailer/settings.py", "billing/settings.py")):
        function = {"name": "view", "arguments": json.dumps({"path": path})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        steps += [
            raw("assistant", "", tool_calls=[call]),
            raw("tool", "same " * 900, tool_call_id=f"c{number}"),
        ]
    case = Case(SYSTEM, *steps, raw("assistant", "done"), LAST)
    files = case.files()
    [path] = files
    for word in ("mailer/settings.py", "billing/settings.py", "c0", "c1"):
        assert list(files.index.find(word)) == [path]
