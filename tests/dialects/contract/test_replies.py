"""Any reply in all three APIs, and any short conversation: nothing is reordered, lost, doubled,
leaked or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import sse
from proxy.dialects import reply
from proxy.plan.recognise import Hidden
from proxy.plan.turn import Broken, State
from tests.dialects.contract.apis import (
    APIS,
    Api,
    Block,
    Encodings,
    Round,
    expected,
    expected_back,
    last_round,
    ours,
    server,
    text,
    theirs,
    think,
)
from tests.dialects.contract.conversations import CLIENTS, play
from tests.dialects.turning import events, run
from tests.sampling import sample

Json = dict[str, Any]

SHAPES: dict[str, list[Round]] = {
    "text": [Round([text()])],
    "thinking": [Round([think(), text()])],
    "theirs": [Round([think(), text(), theirs()])],
    "theirs, parallel": [Round([theirs("a"), theirs("b"), theirs("c")])],
    "texts between theirs": [Round([text("a"), theirs("b"), text("c"), theirs("d")])],
    "ours": [Round([ours()]), Round([text()])],
    "ours after thinking": [Round([think(), ours()]), Round([think("on"), text()])],
    "ours after text": [Round([think(), text("Let me."), ours()]), Round([text()])],
    "ours after text and thinking": [
        Round([text("a"), think(), text("b"), think("c"), ours()]),
        Round([text()]),
    ],
    "ours after text and server's": [
        Round([text("Let me."), server(), think(), ours()]),
        Round([text()]),
    ],
    "ours before text": [Round([ours(), text("a"), theirs(), text("b"), ours("y")])],
    "ours, parallel": [Round([ours("a"), ours("b")]), Round([text()])],
    "ours, then theirs": [Round([text("Let me."), ours()]), Round([text("And."), theirs()])],
    "ours, three times": [
        *(Round([think(str(n)), ours(str(n))]) for n in range(3)),
        Round([text()]),
    ],
    "mixed": [Round([theirs("a"), ours(), theirs("b")])],
    "mixed, ours first": [Round([think(), ours(), theirs()])],
    "mixed, ours last": [Round([think(), theirs(), ours()])],
    "mixed, thinking between": [
        Round([think("a"), theirs(), think("b"), ours(), think("c"), theirs("d")])
    ],
    "mixed, thinking twice": [Round([think("a"), think("b"), ours(), theirs()])],
    "mixed after text": [Round([think(), text(), ours(), theirs()])],
    "mixed, text between": [Round([text("a"), ours(), text("b"), theirs(), text("c")])],
    "mixed, later": [Round([think(), ours()]), Round([think("on"), ours("y"), theirs()])],
    "server's": [Round([server(), text()])],
    "server's, then ours": [
        Round([think(), server(), think("b"), ours()]),
        Round([server("v"), text()]),
    ],
    "cut off": [Round([think(), text()], cut=True)],
    "cut off after ours": [Round([think(), text(), ours()], cut=True)],
    "cut off, mixed": [Round([think(), ours(), theirs()], cut=True)],
    "cut off, later": [Round([think(), ours()]), Round([text()], cut=True)],
    "cut off within ours": [Round([text("Let me."), ours()]), Round([ours("y")], cut=True)],
    "only thinking": [Round([think()], cut=True)],
}


def replies(api: Api, rounds: Sequence[Round]) -> list[Json]:
    """What upstream says in each round of which the client sees something."""
    return [
        api.reply(said, number) for number, said in enumerate(rounds[: last_round(rounds) + 1], 1)
    ]


ALOUD: Json = {
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_0", "summary": []},
        {"type": "message", "id": "msg_0", "role": "assistant", "content": []},
        {"role": "user", "content": "And now?"},
    ]
}
"""The client sends reasoning back, so that it may see what belongs to a hidden call."""

BARE = ("few words", "ids alone", "new ids", "no ends", "no types")
"""Ways of Responses from which the SDK makes no reply."""


def check(
    api: Api, rounds: Sequence[Round], ways: Encodings, *, json_mode: bool, aloud: bool = False
) -> None:
    """What the client gets, whole and streamed in these ways, is what it should get, and goes back
    as it was."""
    said = replies(api, rounds)
    members = (api.json_mode if json_mode else {}) | (ALOUD if aloud else {})
    wanted = expected(api, rounds, json_mode=json_mode, aloud=aloud)

    def fits(made: Json, out: bytes) -> None:
        assert api.blocks(made) == wanted
        assert api.usage(made) == (100 * len(said), 10 * len(said))
        assert b"grep" not in out and b"read_file" not in out and b"found" not in out

    plain = api.turn(stream=False, **members)
    out, _ = run(plain, *map(api.whole, said))
    whole = json.loads(out)
    fits(whole, out)
    if wanted:  # otherwise the client has nothing to send back
        assert api.put_back(plain, whole) == expected_back(api, rounds), (
            "all rounds as they were, and our results"
        )
    for way, encode in ways.items():
        streamed = api.turn(**members)
        out, _ = run(streamed, *map(encode, said))
        fits(events(out)[-1]["response"] if way in BARE else api.assembled(out), out)
        assert api.dialect.reply_meaning(*streamed.visible) == api.dialect.reply_meaning(
            *plain.visible
        )
        assert _decoded(streamed.hidden) == _decoded(plain.hidden)
        assert streamed.spent == plain.spent


def _decoded(hidden: Hidden | None) -> Any:
    if hidden is None:
        return None
    before, after = ([json.loads(raw) for raw in raws] for raws in (hidden.before, hidden.after))
    return before, hidden.instead and json.loads(hidden.instead), after


def _thinks(said: Round) -> bool:
    return any(one.kind == "think" for one in said.blocks)


def differs(api: Api, rounds: Sequence[Round]) -> bool:
    """Whether the client gets something else of this in JSON mode."""
    return expected(api, rounds, json_mode=True) != expected(api, rounds, json_mode=False)


CASES = [
    pytest.param(name, shape, json_mode, id=f"{name}-{shape}{'-json' if json_mode else ''}")
    for name in APIS
    for shape in SHAPES
    for json_mode in (False, True)
    if name != "chat"
    or not any(one.kind == "server" for said in SHAPES[shape] for one in said.blocks)
    if not json_mode or differs(APIS[name], SHAPES[shape])
]


@pytest.mark.parametrize(
    "shape", [shape for shape, rounds in SHAPES.items() if any(map(_thinks, rounds))]
)
def test_reasoning_before_any_call_of_ours_is_shown(shape: str) -> None:
    """In the shapes in which that belongs to a hidden call, too: it goes back once, before that
    call."""
    api = APIS["responses"]
    check(api, SHAPES[shape], {"own": api.encodings["own"]}, json_mode=False, aloud=True)


@pytest.mark.parametrize(("name", "shape", "json_mode"), CASES)
def test_a_shape(name: str, shape: str, json_mode: bool) -> None:
    api = APIS[name]
    check(api, SHAPES[shape], api.encodings | api.odd, json_mode=json_mode)


BLOCKS = st.builds(
    Block,
    st.sampled_from(["think", "text", "ours", "theirs", "server"]),
    st.sampled_from(["a", "b c", "é\u2028"]),
)
ROUNDS = st.lists(
    st.builds(Round, st.lists(BLOCKS, max_size=5), st.booleans()), min_size=1, max_size=4
)


@given(ROUNDS, st.sampled_from(sorted(APIS)), st.booleans(), st.data())
def test_any_reply(rounds: list[Round], name: str, json_mode: bool, data: st.DataObject) -> None:
    api = APIS[name]
    if not api.ordered:
        rounds = [
            Round([one for one in said.blocks if one.kind != "server"], said.cut) for said in rounds
        ]
    rounds = [
        *(
            said if _calls(said) else Round([*said.blocks, text("Well.")], said.cut)
            for said in rounds
        )
    ]
    ways = api.encodings | api.odd
    way = data.draw(st.sampled_from(sorted(ways)))
    check(api, [*rounds, Round([text("The end.")])], {way: ways[way]}, json_mode=json_mode)


def _calls(said: Round) -> bool:
    return any(one.kind in ("ours", "theirs") for one in said.blocks)


CALL = '{"name": "grep", "arguments": {}}'
WORDS = ["aaaaaaa", "b ", "\n", "```\n", "    ", "> ", "<", CALL, "Grep é"]
SAID = st.builds(
    Block,
    st.sampled_from(["think", "text", "ours", "theirs"]),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map("".join),
)


def traced(api: Api, said: Sequence[bytes], members: Json) -> list[Any]:
    """What becomes of each event, with heartbeats between, and of the turn."""
    turn = api.turn(**members)
    trace: list[Any] = []
    try:
        for raw in said:
            trace.append(turn.request())
            for number, event in enumerate(sse.EventDecoder().feed(raw)):
                trace.append((turn.receive(event), turn.signs, turn.over))
                if number % 9 == 8:
                    trace.append(turn.heartbeat())
            trace.append(turn.end())
            if turn.state is State.CALLING:
                turn.answer(["found"] * len(turn.calls))
            if turn.state is State.DONE:
                return [*trace, turn.close(), turn.hidden, turn.visible, turn.spent]
    except Broken as error:
        trace.append(str(error))
    return trace


@given(
    st.lists(st.builds(Round, st.lists(SAID, max_size=4), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(sorted(APIS)),
    st.booleans(),
    st.sampled_from([{}, {"injected": False}]),
)
def test_the_short_way_of_an_event_changes_nothing(
    rounds: list[Round], name: str, json_mode: bool, members: Json
) -> None:
    api = APIS[name]
    encode = api.encodings["own"]
    said = [encode(api.reply(one, number)) for number, one in enumerate(rounds, 1)]
    members = (api.json_mode if json_mode else {}) | members
    short = traced(api, said, members)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(api.turn()).rounds_as, "extend", lambda *_: False)
        assert traced(api, said, members) == short


@pytest.mark.parametrize("first", sample(range(0, 1_000, 50), 1))
@pytest.mark.parametrize("name", CLIENTS)
def test_conversations(name: str, first: int) -> None:
    """Thousands of conversations: whether hidden rounds are put back or not, upstream refuses
    nothing."""
    assert sum(play(name, seed) for seed in range(first, first + 50)) >= 50


def test_the_oracle_notices_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, everything that was held."""
    monkeypatch.setattr(reply.Round, "flow", lambda self: [])
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(20):
            play("responses", seed)


SCHEMA: Json = {"type": "json_schema", "name": "n", "schema": {}}
JSON_WANTED: dict[str, tuple[str, Json, Json]] = {
    "responses": (
        "input",
        {"type": "configuration_update", "text": {"format": SCHEMA}},
        {"type": "configuration_update", "text": {"format": {"type": "text"}}},
    ),
    "messages": (
        "messages",
        {"role": "system", "content": [], "output_config": {"format": SCHEMA}},
        {"role": "system", "content": [], "output_config": {"effort": "low"}},
    ),
}
"""Where a history is, an entry from which on the text has to be JSON, and one that may change
that."""


@pytest.mark.parametrize("name", JSON_WANTED)
def test_an_entry_of_the_history_can_ask_for_json(name: str) -> None:
    api, rounds = APIS[name], [Round([text("{}"), ours()]), Round([text("[]")])]
    field, asks, other = JSON_WANTED[name]
    for updates in ([], [asks], [asks, other]):
        turn = api.turn(stream=False, **{field: [{"role": "user", "content": "hi"}, *updates]})
        out, _ = run(turn, *map(api.whole, replies(api, rounds)))
        json_mode = bool(updates) and (name == "messages" or other not in updates)
        assert api.blocks(json.loads(out)) == expected(api, rounds, json_mode=json_mode)
