"""Any reply, and any short conversation: nothing is reordered, lost, doubled or leaked, and nothing is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.reply import Round
from tests.dialects.contract import apis
from tests.dialects.contract.apis import APIS, Block, expected, last_round, text
from tests.dialects.contract.conversations import CLIENTS, play
from tests.dialects.turning import run
from tests.sampling import sample

BLOCKS = st.builds(
    Block, st.sampled_from(["think", "text", "ours", "theirs", "server"]), st.sampled_from(["a", "b c", "é\u2028"])
)
ROUNDS = st.lists(st.builds(apis.Round, st.lists(BLOCKS, max_size=5), st.booleans()), min_size=1, max_size=4)


@given(ROUNDS, st.sampled_from(sorted(APIS)), st.booleans(), st.data())
def test_any_reply(rounds: list[apis.Round], name: str, json_mode: bool, data: st.DataObject) -> None:
    api = APIS[name]
    if not api.ordered:
        rounds = [apis.Round([one for one in said.blocks if one.kind != "server"], said.cut) for said in rounds]
    rounds = [*(said if _calls(said) else apis.Round([*said.blocks, text("Well.")], said.cut) for said in rounds)]
    rounds = [*rounds, apis.Round([text("The end.")])]
    said = [api.reply(one, number) for number, one in enumerate(rounds[: last_round(rounds) + 1], 1)]
    members = api.json_mode if json_mode else {}
    wanted = expected(api, rounds, json_mode=json_mode)
    plain, _ = run(api.turn(stream=False, **members), *map(api.whole, said))
    assert api.blocks(json.loads(plain)) == wanted
    way = data.draw(st.sampled_from(sorted(set(api.encodings) - {"few words"})))
    raws = [api.encodings[way](reply) for reply in said]
    cuts = data.draw(st.lists(st.integers(0, max(map(len, raws))), max_size=3))
    out, _ = run(api.turn(**members), *raws, cuts=cuts)
    made = api.assembled(out)
    assert api.blocks(made) == wanted
    assert api.usage(made) == (100 * len(said), 10 * len(said))
    assert b"grep" not in out and b"grep" not in plain


def _calls(said: apis.Round) -> bool:
    return any(one.kind in ("ours", "theirs") for one in said.blocks)


@pytest.mark.parametrize("first", sample(range(0, 3_000, 100), 1))
@pytest.mark.parametrize("name", CLIENTS)
def test_conversations(name: str, first: int) -> None:
    """Thousands of conversations: whether hidden rounds are put back or not, upstream refuses nothing."""
    assert sum(play(name, seed) for seed in range(first, first + 100)) >= 100


def test_the_oracle_notices_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, everything that was held."""
    monkeypatch.setattr(Round, "flow", lambda self: [])
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(20):
            play("responses", seed)
