"""The index of what a caller's conversations moved: which sessions and texts are taken, and what a
fault costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from proxy.errors import StoreFault
from proxy.requests.archive import Archive, Moved, Session, Text, index, newest
from proxy.requests.planned import Rendered
from proxy.requests.records import sealed
from proxy.stores import Store, open_store
from proxy.stores.guarded import Guarded
from proxy.stores.local import Folder
from tests.requests.planning import LAST, SYSTEM, planned, step

T = TypeVar("T")


def session(name: str, *sizes: int) -> Session:
    texts = [Text(f"{name}{number}", "", tokens) for number, tokens in enumerate(sizes)]
    return Session(name, 0, 0, "m", "", texts)


@pytest.mark.parametrize(
    ("most", "names", "left_out"),
    [
        (10_000, ["b1", "b0", "a0"], False),
        (800, ["b1", "b0"], True),
        (400, ["b1"], True),
        (1, ["b1"], True),
    ],
)
def test_the_newest_texts_come_first_and_the_first_always(
    most: int, names: Sequence[str], left_out: bool
) -> None:
    found, more = newest([session("b", 100, 100), session("a", 100)], most)
    assert ([text.name for _, text in found], more) == (names, left_out)


def test_a_text_of_several_sessions_is_the_newest_ones() -> None:
    shared = Text("shared", "", 1)
    new, old = (Session(name, 0, 0, "m", "", [shared]) for name in ("new", "old"))
    [(found, _)], _ = newest([new, old], 1_000)
    assert found is new


async def test_a_picture_is_no_title() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    reminder = {"type": "text", "text": "<reminder>"}
    first = {"role": "user", "content": [reminder, picture]}
    made, reader = await planned([SYSTEM, first, *step(1, 10, 5_000), *step(2, 10, 5_000), LAST])
    [(_, record)] = index(Rendered.of(made, None, {}, reader), 0)
    assert msgspec.json.decode(record, type=Moved).title == "<reminder>"


async def at_once(work: Callable[[], T]) -> T:
    return work()


def archive(store: Any) -> Archive:
    return Archive(Guarded(store, warn=lambda *_: None).visit(), "ns", at_once)


async def kept(folder: Path, **records: Moved) -> Archive:
    """An archive with these records, by their names with `_` for `-`."""
    store = open_store(str(folder))
    for name, record in records.items():
        key = f"ns/sessions/{name.replace('_', '-')}"
        await store.put(key, sealed(key, msgspec.json.encode(record)))
    return archive(store)


async def test_a_session_is_made_of_all_its_records(tmp_path: Path) -> None:
    first = Moved(10.0, "m", "title", [Text("a", "result of x")])
    second = Moved(20.0, "n", "title", [Text("a", "result of x"), Text("b", "result of y", 7)])
    made = await kept(tmp_path, aaaa_1=second, aaaa_2=first)
    [found], more = await made.sessions(10)
    assert (found.began, found.last, found.model, more) == (10.0, 20.0, "n", False)
    assert found.texts == [Text("a", "result of x"), Text("b", "result of y", 7)]


async def test_sessions_end_at_their_number_and_begin_as_asked(tmp_path: Path) -> None:
    made = await kept(
        tmp_path,
        aaaa_1=Moved(1, "m", "", []),
        abbb_1=Moved(2, "m", "", []),
        bbbb_1=Moved(3, "m", "", []),
    )
    found, more = await made.sessions(2)
    assert len(found) == 2 and more
    found, more = await made.sessions(10, "a")
    assert [one.session for one in found] == ["abbb", "aaaa"] and not more


async def test_a_record_under_another_key_is_no_record(tmp_path: Path) -> None:
    made = await kept(tmp_path, aaaa_1=Moved(1, "m", "", []))
    value = sealed("other/sessions/aaaa-1", msgspec.json.encode(Moved(1, "m", "", [])))
    await open_store(str(tmp_path)).put("ns/sessions/bbbb-1", value)
    assert [one.session for one in (await made.sessions(10))[0]] == ["aaaa"]


class Broken(Store):
    """Reads and lists nothing."""

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        raise StoreFault("broken")

    async def list(self, prefix: str) -> Any:
        raise StoreFault("broken")
        yield


async def test_without_a_store_people_are_told_and_the_model_has_nothing(tmp_path: Path) -> None:
    made = archive(Broken(Folder(tmp_path)))
    with pytest.raises(StoreFault, match="try again"):
        await made.sessions(10)
    with pytest.raises(StoreFault, match="try again"):
        await made.read_many(["x.0123456789abcdef.txt"])
    assert await made.last() == {}
