"""What a row keeps of a short request is described when it is read, as that of a longer one is when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from proxy.dashboard.holding import BRIEF, Short, Unseen, held, shown
from proxy.dashboard.rows import NOTHING_SEEN, Damaged, Seen
from proxy.dashboard.sessions import SHORT, sent_tokens
from proxy.plan.plan import Role, Room
from proxy.requests.attempt import AsItCame
from proxy.requests.prepare import OUR_TOOLS_TOKENS
from tests.dashboard.test_faults import outcome

ROOM = Room(aside=OUR_TOOLS_TOKENS + 130, reply=30, preamble=11)


def message(role: Role, number: int) -> Any:
    text = b"%d %d" % (role, number)
    return SimpleNamespace(role=role, tokens=1 << number, digest=sha256(text).digest(), meaning=sha256(text).digest())


def history(roles: str) -> list[Any]:
    return [message(Role(int(role)), number) for number, role in enumerate(roles)]


@dataclass
class Past:
    measured: list[Any]
    sent_tokens: int = 1_000

    def __len__(self) -> int:
        return len(self.measured)


def brief(messages: list[Any]) -> Any:
    return Short(messages, 1_000, ROOM)


ROLES = ("1", "01", "001232", "0123", "12", "3", "0", "01242323")


def test_short_requests_are_read_as_they_would_have_been_described() -> None:
    found = [history(roles) for roles in ROLES]
    sessions, packed, details = shown([brief(one) for one in found], [outcome(model="gpt-4.1")] * len(found))
    assert not details
    for messages, session, kept in zip(found, sessions, packed, strict=True):
        unseen = Unseen("acme-1", "chat", "gpt-4.1", messages, 1_000, ROOM, 0)
        assert 0 < len(messages) <= SHORT
        assert session == unseen.session
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(kept))
        sent, described = sent_tokens(again), sent_tokens(unseen.seen().sent)
        assert (sent.tokens, sent.came, sent.added) == (described.tokens, described.came, described.added)
        assert sum(sent.tokens) == sum(one.tokens for one in messages) + 100 + 11
        assert sent.came == 1_000 + 100 + 11


def test_little_is_held_of_short_requests_that_went_as_they_came(caplog: pytest.LogCaptureFixture) -> None:
    parsed: Any = SimpleNamespace(tenant=SimpleNamespace(namespace="acme-1", policy=None), body=b"{}")

    def attempt(roles: str, counts: bool = False, planned: bool = True) -> Any:
        dialect, request = SimpleNamespace(name="chat", counts=counts), SimpleNamespace(model="gpt-4.1")
        found: Any = SimpleNamespace(dialect=dialect, request=request, past=Past(history(roles)), room=ROOM)
        return AsItCame(parsed, found if planned else None)

    assert [held(attempt(roles)) for roles in ROLES] == [brief(history(roles)) for roles in ROLES]
    others = attempt(""), attempt("1" * 9), attempt("1" * (BRIEF + 1))
    assert [type(held(one)) for one in others] == [Seen, Seen, Unseen]
    nothing: Any = attempt("1", counts=True), attempt("1", planned=False), SimpleNamespace()
    assert [held(one) for one in nothing] == [NOTHING_SEEN] * 3
    assert caplog.text.count("a bug, in describing") == 1


def test_requests_of_all_kinds_that_end_together_are_described_in_their_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    user, unseen = history("1"), Unseen("acme-1", "chat", "other", history("1" * 99), 1_000, ROOM, 0)
    broken: Any = [None]
    held = [NOTHING_SEEN, brief(user), unseen, brief(broken), Seen(7), brief(user)]
    outcomes = [outcome(model=name) for name in ("", "gpt-4.1", "other", "broken", "seven", "\ud800" * 300)]
    found = shown(held, outcomes)
    assert found.sessions[:5] == [None, *shown(held[1:2], outcomes[1:2]).sessions, unseen.session, None, 7]
    assert [bool(one) for one in found.sent] == [False, True, False, False, False, True]
    assert found.sessions[5] not in (None, found.sessions[1])
    assert "a bug, in describing" in caplog.text


@pytest.mark.parametrize("role", [256, -1, 1 << 63, "user"])
def test_figures_that_somebody_else_wrote_are_damage(role: object) -> None:
    packed = msgspec.msgpack.encode(([0, 0, 0], 7, None, None, [[role, 1, b"digest", b"meaning"]]))
    with pytest.raises(Damaged):
        sent_tokens(packed)


@pytest.mark.parametrize("room", [[], [0, 0], [0] * 8])
def test_a_room_that_somebody_else_wrote_is_damage(room: list[int]) -> None:
    with pytest.raises(Damaged):
        sent_tokens(msgspec.msgpack.encode((room, 7, None, None, [[1, 1, b"digest", b"meaning"]])))
