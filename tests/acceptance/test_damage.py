"""Records that a disk has damaged: conversations through the real proxy continue, with or without the record."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_compress import Model, policy, turns
from tests.acceptance.test_openai_client import TOOL, history
from tests.fake_upstream import Recorded, StrictUpstream, calls, text
from tests.serving import PLAIN, Proxy, served, tight

Json = dict[str, Any]

Damage = Callable[[Path], None]


def flipped(where: float, bits: int) -> Damage:
    def damage(path: Path) -> None:
        value = bytearray(path.read_bytes())
        value[int(where * (len(value) - 1))] ^= bits
        path.write_bytes(value)

    return damage


def cut(where: float) -> Damage:
    return lambda path: os.truncate(path, int(where * path.stat().st_size))


def replaced(value: bytes) -> Damage:
    return lambda path: path.write_bytes(value) and None


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: Sequence[Damage] = (
    *(flipped(place / 12, bits) for place in range(13) for bits in (1, 0x80)),
    *(cut(place / 4) for place in range(4)),
    replaced(b"\xff\xfe"),
    replaced(b"[" * 1_000_000),
    pipe,
    folder,
)


SOME = (*DAMAGE[:26:5], *DAMAGE[26:])
"""Each kind of damage, with a few of the flipped bits."""
each_damage = pytest.mark.parametrize("damages", [SOME, pytest.param(DAMAGE, marks=pytest.mark.sweep)])


class Callers:
    """One conversation, each with its own caller, for each damage, for an intact record and for a missing one."""

    def __init__(self, store: Path, kind: str, damages: Sequence[Damage | None]) -> None:
        self._store = store
        self._kind = kind
        self.damages = [None, os.unlink, *damages]
        self._paths: dict[int, set[Path]] = {}

    def records(self) -> set[Path]:
        return set(self._store.glob(f"*/{self._kind}/*"))

    def each(self, converse: Callable[[str], object]) -> None:
        """Hold each conversation with its caller's key, and remember its records: a round is kept in several places."""
        for number in range(len(self.damages)):
            before = self.records()
            converse(f"key-{number}")
            self._paths[number] = self.records() - before

    def damage(self) -> None:
        for number, damage in enumerate(self.damages):
            for path in self._paths[number] if damage is not None else ():
                damage(path)


def found(proxy: Proxy, kind: str) -> float:
    page = httpx.get(f"{proxy.root}/metrics", verify=PLAIN).text
    match = re.search(rf'^offload_store_damaged_records_total{{kind="{kind}"}} (\S+)$', page, re.MULTILINE)
    return float(match[1]) if match else 0.0


def ask(proxy: Proxy, key: str, messages: Sequence[Json], **members: Any) -> Json:
    body = {"model": "m", "messages": messages, **members}
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx.post(f"{proxy.url}/chat/completions", json=body, headers=headers, verify=PLAIN)
    assert reply.status_code == 200, reply.text
    message: Json = reply.json()["choices"][0]["message"]
    return message


def _greps_once(request: Recorded) -> Any:
    return (
        text("It is so.") if request.messages[-1]["role"] == "tool" else calls(("grep", {"pattern": "code is"}, "ours"))
    )


@each_damage
def test_damaged_rounds_are_ignored_and_counted(up: StrictUpstream, tmp_path: Path, damages: Sequence[Damage]) -> None:
    policies = {"default": tight(up.url)}
    callers = Callers(tmp_path, "rounds", damages)
    messages = history()
    up.respond(_greps_once)
    with served(policies, store=tmp_path) as proxy:
        callers.each(lambda key: ask(proxy, key, messages, tools=[TOOL]))
    callers.damage()
    up.respond(lambda _: text("Yes."))
    messages += [{"role": "assistant", "content": "It is so."}, {"role": "user", "content": "Thank you."}]
    sent = []
    with served(policies, store=tmp_path) as proxy:
        for number in range(len(callers.damages)):
            for _ in range(2):
                ask(proxy, f"key-{number}", messages, tools=[TOOL])
            assert up.chats[-1].raw_messages == up.chats[-2].raw_messages
            sent.append(list(up.chats[-1].raw_messages))
        assert found(proxy, "rounds") >= len(damages)
    intact, without, *damaged = sent
    assert len(intact) == len(without) + 2
    assert damaged == [without] * len(damages)


@each_damage
def test_damaged_snapshots_are_made_again(up: StrictUpstream, tmp_path: Path, damages: Sequence[Damage]) -> None:
    up.respond(Model())
    policies = {"default": policy(up)}
    callers = Callers(tmp_path, "snapshots", damages)
    messages: list[Json] = []

    def converse(key: str) -> None:
        messages[:] = [{"role": "user", "content": "Fix the deploy script."}]
        before = callers.records()
        while callers.records() == before:
            reply = ask(proxy, key, messages)
            messages.extend([reply, {"role": "user", "content": f"Go on, {len(messages)}."}])

    with served(policies, store=tmp_path) as proxy:
        callers.each(converse)
    good = {path: path.read_bytes() for path in callers.records()}
    callers.damage()
    sent = []
    with served(policies, store=tmp_path) as proxy:
        for number in range(len(callers.damages)):
            ask(proxy, f"key-{number}", messages)
            sent.append(list(turns(up)[-1].raw_messages))
        assert found(proxy, "snapshots") >= len(damages)
    assert sent == sent[:1] * len(sent)
    again = {path: path.read_bytes() for path in callers.records() if path.is_file()}
    assert all(good[path] == value for path, value in again.items())
    assert sum(path.is_file() for path in callers.records()) >= len(callers.damages) - 2, "all but pipe and folder"
