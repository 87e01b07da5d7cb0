"""From a parsed request to the bytes of the first round."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.dialects import DIALECTS
from proxy.dialects.entries import canonical
from proxy.dialects.render import ActiveSnapshot
from proxy.plan.plan import WINDOW_MARGIN, Room
from proxy.plan.recognise import Hidden
from proxy.policy import Inject, Policy, Tools
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, Rendered
from proxy.tokens import counter
from proxy.tools.definitions import NAMES, definitions
from tests.requests.planning import (
    ALWAYS,
    CUT,
    LAST,
    MOVING,
    OFFLOAD,
    POLICY,
    SHORT,
    Json,
    planned,
)


def snapshot(made: Planned) -> ActiveSnapshot:
    [boundary] = made.plan.boundaries
    return ActiveSnapshot(boundary, "the record", made.originals_path(boundary))


async def test_tools_can_be_injected_always() -> None:
    made, reader = await planned(SHORT, ALWAYS)
    ready = Rendered.of(made, None, {}, reader)
    assert made.may_change and ready.injecting and ready.tokens == made.history.tokens
    body = json.loads(ready.turn().request())
    assert [tool["function"]["name"] for tool in body["tools"]] == ["grep", "read_file"]


@pytest.mark.parametrize(
    ("members", "ours"),
    [({"tools": [{"function": {"name": "t"}}]}, True), ({"tools": []}, False), ({}, False)],
)
async def test_agents_get_our_tools_from_the_start_and_others_when_something_moves(
    members: dict[str, Any], ours: bool
) -> None:
    agents = Policy(offload=OFFLOAD, tools=Tools(inject=Inject.AGENTS))
    made, reader = await planned(SHORT, agents, **members)
    assert (made.may_change, Rendered.of(made, None, {}, reader).injecting) == (ours, ours)
    moving, reader = await planned(MOVING, agents, **members)
    assert Rendered.of(moving, None, {}, reader).injecting


async def test_the_window_has_room_for_the_reply_and_all_tools() -> None:
    tools = [{"function": {"name": "t"}}]
    for limit in (1, 500, 9_000):
        made, _ = await planned(SHORT, window=10_000, max_tokens=limit, tools=tools)
        assert made.room == Room(10_000, len(json.dumps(tools)) + 1250 + OUR_TOOLS_TOKENS, 1250)


@pytest.mark.parametrize("arguments", ["{}", '{ "path" :  "a.txt" }', '{"b":1,"a":2}', "no JSON "])
async def test_arguments_count_in_canonical_form(arguments: str) -> None:
    spaced = json.loads(json.dumps(MOVING).replace(json.dumps("{}"), json.dumps(arguments)))
    compact = json.loads(
        json.dumps(MOVING).replace(json.dumps("{}"), json.dumps(canonical(arguments)))
    )
    (made, _), (other, _) = await planned(spaced), await planned(compact)
    assert made.plan == other.plan
    assert made.history.tokens == other.history.tokens


async def test_a_snapshot_replaces_what_is_before_its_boundary() -> None:
    made, reader = await planned(CUT)
    without = Rendered.of(made, None, {}, reader)
    ready = Rendered.of(made, snapshot(made), {}, reader)
    assert without.entries == list(made.transcript.raws), "an event waits for its snapshot"
    assert (ready.compressed(), len(ready.entries)) == (4, 2 + len(CUT) - 6)
    assert ready.tokens < without.tokens
    assert [path for path in ready.files() if "compressed_group" in path] == [snapshot(made).path]


async def test_hidden_rounds_count_and_bring_the_tools() -> None:
    made, reader = await planned([*SHORT, {"role": "assistant", "content": "hm"}, LAST])
    hidden = Hidden((b'{"role":"assistant","content":"before"}',), None, (), (50,))
    ready = Rendered.of(made, None, {2: hidden}, reader)
    assert ready.entries[2:4] == [*hidden.before, made.transcript.raws[2]]
    assert ready.tokens == made.history.tokens + 50
    assert ready.injecting


async def test_hidden_rounds_that_do_not_fit_are_left_out_in_large_steps_and_the_newest_last() -> (
    None
):
    said = {"role": "assistant", "content": "hm"}
    made, reader = await planned([*SHORT, said, LAST, said, LAST, said, LAST])
    round = Hidden((b'{"role":"assistant","content":"before"}',), None, (), (500,))
    found = {2: round, 4: round, 6: replace(round, sizes=(100,))}
    for room, kept in ((1_200, {2, 4, 6}), (700, {6}), (150, {6}), (50, set())):
        window = int((made.history.tokens + room) / 0.95) + 1
        narrow = replace(made, room=Room(window, 0))
        ready = Rendered.of(narrow, None, found, reader).fitting(reader)
        assert set(ready.rounds) == kept and ready.found == found
        assert ready.tokens == made.history.tokens + sum(found[index].tokens for index in kept)
        assert len(ready.entries) == len(made.transcript.raws) + len(kept)


# -- the limit upstream ----------------------------------------------------------------------------


async def limit_sent(
    messages: list[Json], window: int | None, **limits: int
) -> tuple[int | None, dict[str, Any]]:
    made, reader = await planned(messages, POLICY, window, **limits)
    ready = Rendered.of(made, None, {}, reader)
    return made.reply_limit(ready.tokens), json.loads(ready.turn().request())


async def test_a_limit_that_does_not_fit_beside_the_planned_prompt_is_lowered() -> None:
    window = 20_000
    made, reader = await planned(MOVING, POLICY, window, max_tokens=19_000)
    tokens = Rendered.of(made, None, {}, reader).tokens
    left = int(window * (1 - WINDOW_MARGIN)) - tokens - OUR_TOOLS_TOKENS
    assert made.room.reply < left < 19_000
    for field in ("max_tokens", "max_completion_tokens"):
        limit, sent = await limit_sent(MOVING, window, **{field: 19_000})
        assert limit == sent[field] == left
        assert await limit_sent(MOVING, window, **{field: left}) == (None, sent)
    limit, sent = await limit_sent(MOVING, None, max_tokens=19_000)
    assert (limit, sent["max_tokens"]) == (None, 19_000)


async def test_a_request_that_is_not_changed_is_lowered_only_if_upstream_would_refuse_it() -> None:
    async def exceeds(limit: int, *, refused: bool) -> bool:
        return (await planned(SHORT, POLICY, 10_000, max_tokens=limit))[0].exceeds(refused=refused)

    tokens = (await planned(SHORT))[0].history.tokens
    assert not await exceeds(10_000 - tokens, refused=False)
    assert await exceeds(10_001 - tokens, refused=False)
    assert await exceeds(9_700, refused=True), "our count may be a little low"
    assert not await exceeds(9_000, refused=True)
    assert not await exceeds(0, refused=True)


def test_our_tools_weigh_what_is_reserved_for_them() -> None:
    """As sent, in the API that takes the most words; every figure of savings rests on this
    number."""
    ours = definitions(NAMES, Policy().offload.store_dir)
    count = counter()
    sent = [b",".join(map(dialect.requests.tool, ours)).decode() for dialect in DIALECTS]
    most = max(map(count, sent))
    assert OUR_TOOLS_TOKENS - 10 < most <= OUR_TOOLS_TOKENS
