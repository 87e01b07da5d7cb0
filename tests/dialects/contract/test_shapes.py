"""Every shape of a reply, in all three APIs: streamed whole, byte by byte and cut at every offset, and plain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.plan.turn import Hidden
from tests.dialects.contract.apis import (
    APIS,
    Api,
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
from tests.dialects.turning import run
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
    "ours after text and thinking": [Round([text("a"), think(), text("b"), think("c"), ours()]), Round([text()])],
    "ours after text and server's": [Round([text("Let me."), server(), think(), ours()]), Round([text()])],
    "ours before text": [Round([ours(), text("a"), theirs(), text("b"), ours("y")])],
    "ours, parallel": [Round([ours("a"), ours("b")]), Round([text()])],
    "ours, then theirs": [Round([text("Let me."), ours()]), Round([text("And."), theirs()])],
    "ours, three times": [*(Round([think(str(n)), ours(str(n))]) for n in range(3)), Round([text()])],
    "mixed": [Round([theirs("a"), ours(), theirs("b")])],
    "mixed, ours first": [Round([think(), ours(), theirs()])],
    "mixed, ours last": [Round([think(), theirs(), ours()])],
    "mixed, thinking between": [Round([think("a"), theirs(), think("b"), ours(), think("c"), theirs("d")])],
    "mixed, thinking twice": [Round([think("a"), think("b"), ours(), theirs()])],
    "mixed after text": [Round([think(), text(), ours(), theirs()])],
    "mixed, text between": [Round([text("a"), ours(), text("b"), theirs(), text("c")])],
    "mixed, later": [Round([think(), ours()]), Round([think("on"), ours("y"), theirs()])],
    "server's": [Round([server(), text()])],
    "server's, then ours": [Round([think(), server(), think("b"), ours()]), Round([server("v"), text()])],
    "cut off": [Round([think(), text()], cut=True)],
    "cut off after ours": [Round([think(), text(), ours()], cut=True)],
    "cut off, mixed": [Round([think(), ours(), theirs()], cut=True)],
    "cut off, later": [Round([think(), ours()]), Round([text()], cut=True)],
    "only thinking": [Round([think()], cut=True)],
}


CASES = [
    pytest.param(name, shape, json_mode, id=f"{name}-{shape}{'-json' if json_mode else ''}")
    for name in APIS
    for shape in SHAPES
    for json_mode in (False, True)
    if name != "chat" or not any(one.kind == "server" for said in SHAPES[shape] for one in said.blocks)
]


def replies(api: Api, rounds: list[Round]) -> list[Json]:
    """What upstream says in each round of which the client sees something."""
    return [api.reply(said, number) for number, said in enumerate(rounds[: last_round(rounds) + 1], 1)]


def check(api: Api, rounds: list[Round], said: list[Json], reply: Json, out: bytes, json_mode: bool) -> None:
    """The oracles that need only what the client got."""
    assert api.blocks(reply) == expected(api, rounds, json_mode=json_mode)
    assert api.usage(reply) == (100 * len(said), 10 * len(said))
    assert b"grep" not in out and b"read_file" not in out and b"found" not in out


@pytest.mark.parametrize(("name", "shape", "json_mode"), CASES)
def test_a_shape(name: str, shape: str, json_mode: bool) -> None:
    api, rounds = APIS[name], SHAPES[shape]
    said = replies(api, rounds)
    members = api.json_mode if json_mode else {}
    plain = api.turn(stream=False, **members)
    out, _ = run(plain, *map(api.whole, said))
    whole = json.loads(out)
    check(api, rounds, said, whole, out, json_mode)
    assert api.put_back(plain, whole) == expected_back(api, rounds), "all rounds as they were, and our results"
    for way, encode in api.encodings.items():
        streamed = api.turn(**members)
        out, _ = run(streamed, *map(encode, said))
        if way == "few words":
            continue
        made = api.assembled(out)
        check(api, rounds, said, made, out, json_mode)
        assert api.blocks(made) == api.blocks(whole)
        assert api.dialect.reply_meaning(*streamed.visible) == api.dialect.reply_meaning(*plain.visible)
        assert _decoded(streamed.hidden) == _decoded(plain.hidden)
        assert streamed.spent == plain.spent


def _decoded(hidden: Hidden | None) -> Any:
    if hidden is None:
        return None
    before, after = ([json.loads(raw) for raw in raws] for raws in (hidden.before, hidden.after))
    return before, hidden.instead and json.loads(hidden.instead), after


@pytest.mark.parametrize("number", sample([5, 1_000], 1))
@pytest.mark.parametrize(("name", "shape", "json_mode"), CASES)
def test_cuts_do_not_matter(name: str, shape: str, json_mode: bool, number: int) -> None:
    """Byte by byte, and cut once at so many offsets, or at every one."""
    api, rounds = APIS[name], SHAPES[shape]
    members = api.json_mode if json_mode else {}
    raws = [next(iter(api.encodings.values()))(reply) for reply in replies(api, rounds)]
    once = run(api.turn(**members), *raws)
    length = max(map(len, raws))
    assert run(api.turn(**members), *raws, cuts=range(length)) == once
    for cut in range(0, length, 1 + length // number):
        assert run(api.turn(**members), *raws, cuts=[cut]) == once
