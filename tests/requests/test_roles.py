"""User and system messages that move, from body to body: what is sent, what can be read back, whose
record it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.plan.texts import ResultPreset
from proxy.policy import Mode, Policy
from proxy.requests.planned import Planned, Rendered
from tests.requests.planning import LAST, OFFLOAD, SYSTEM, USER, Json, planned, step


def policy(**changes: Any) -> Policy:
    return Policy(offload=replace(OFFLOAD, **changes))


def messages_of(history: Planned, reader: Any) -> list[Json]:
    ready = Rendered.of(history, None, {}, reader, history.plan)
    sent: list[Json] = json.loads(ready.turn().request())["messages"]
    return sent


# -- a digest of one's own -------------------------------------------------------------------------


def gptme(result: str) -> list[Json]:
    """A run in gptme's markdown mode: the results are system messages."""
    return [
        SYSTEM,
        USER,
        *step(1, 2500),
        {"role": "system", "content": result},
        *step(2, 2500),
        *step(3, 9),
        LAST,
    ]


@pytest.mark.parametrize("size", [1, 200])
async def test_runs_whose_results_differ_share_no_snapshot(size: int) -> None:
    """The run that read BANANA was told that the results were APPLE. Large results and small
    ones."""
    for results in ((), (ResultPreset.GPTME,)):
        names = set()
        for result in ("BANANA ", "APPLE  "):
            history, _ = await planned(
                gptme(result * size), policy(results=results, mode=Mode.COMPRESS)
            )
            [boundary] = history.plan.boundaries
            assert boundary.end > 3
            names.add(history.snapshot_name(boundary))
        assert len(names) == 2


async def test_a_large_later_system_message_is_moved_in_its_place() -> None:
    result = "".join(f"line {number}\n" for number in range(400))
    history, reader = await planned(gptme(result), policy(mode=Mode.COMPACT))
    sent = messages_of(history, reader)
    assert [one["role"] for one in sent] == [one["role"] for one in gptme(result)]
    assert (
        sent[3]["content"].startswith("line 0\n") and "/store/system_message." in sent[3]["content"]
    )
    ready = Rendered.of(history, None, {}, reader)
    assert list(ready.files().values()) == [result]


# -- the user --------------------------------------------------------------------------------------

FILES = "I have added these files to the chat.\n" + "def f(): pass\n" * 300


def aider(*after: Json) -> list[Json]:
    return [
        SYSTEM,
        USER,
        *step(1, 5),
        {"role": "user", "content": FILES},
        *step(2, 5),
        LAST,
        *step(3, 4500, 900),
        *after,
    ]


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.COMPRESS, Mode.AUTO])
async def test_the_second_to_last_user_message_stays_whole(mode: Mode) -> None:
    history, reader = await planned(
        aider(*step(4, 2500, 900), *step(5, 900), *step(6, 5)), policy(mode=mode)
    )
    assert history.plan.events
    assert {"role": "user", "content": FILES} in messages_of(history, reader)


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.COMPRESS, Mode.AUTO])
async def test_an_older_large_user_message_is_moved_and_can_be_read_back(mode: Mode) -> None:
    history, reader = await planned(
        aider(LAST, *step(4, 2500, 900), *step(5, 900), LAST), policy(mode=mode)
    )
    sent = messages_of(history, reader)
    assert sent[3]["role"] == "user"
    assert sent[3]["content"].startswith(FILES[:100])
    assert "(detailed result is stored in /store/user_message." in sent[3]["content"]
    ready = Rendered.of(history, None, {}, reader)
    [name] = [name for name in ready.files() if "user_message" in name]
    assert ready.files()[name] == FILES
    assert all(3 in boundary.pins for boundary in history.plan.boundaries)


# -- results in other roles ------------------------------------------------------------------------


def observed(number: int) -> list[Json]:
    text = "Observation:\n" + f"fact {number}\n" * 100
    return [*step(number, 20), {"role": "user", "content": [{"type": "text", "text": text}]}]


RULE: Json = {"role": "user", "content": "never write to /etc"}
SMOL = [
    SYSTEM,
    USER,
    *observed(1),
    *step(2, 20),
    RULE,
    *(one for number in range(3, 12) for one in observed(number)),
]


async def test_observations_are_no_user_messages() -> None:
    """They use up no pins: the rule in the middle stays word for word, and they are moved."""
    without, _ = await planned(SMOL, policy(mode=Mode.COMPRESS, pin_user_tokens=1500))
    assert 5 not in without.plan.boundaries[-1].pins
    named = policy(mode=Mode.COMPRESS, pin_user_tokens=1500, results=(ResultPreset.SMOLAGENTS,))
    history, _ = await planned(SMOL, named)
    assert history.plan.boundaries[-1].pins == {1, 5}


async def test_a_moved_observation_keeps_its_role_and_prefix() -> None:
    history, reader = await planned(
        SMOL, policy(mode=Mode.COMPACT, results=(ResultPreset.SMOLAGENTS,))
    )
    sent = messages_of(history, reader)
    assert [one["role"] for one in sent] == [one["role"] for one in SMOL]
    moved = [json.dumps(sent[index]["content"][0]["text"]) for index in history.plan.moves]
    assert len(moved) > 5
    assert all(text.startswith('"Observation:') and "/store/tool_result." in text for text in moved)
    ready = Rendered.of(history, None, {}, reader)
    texts = {SMOL[index]["content"][0]["text"] for index in history.plan.moves}
    assert set(ready.files().values()) == texts
