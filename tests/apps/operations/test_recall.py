"""People look into what their conversations moved: `/recall_sessions`, `/grep` and `/read_file`."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.apps.operations import search
from proxy.plan.preview import ORIGINALS
from proxy.stores.local import Folder
from tests.acceptance.test_archive import (
    FACT,
    LOGS,
    REFERENCE,
    Kept,
    Model,
    archived,
    ask,
    body,
    first_conversation,
    kept,
)
from tests.clients.apis import Asked, api
from tests.clients.worker import SUMMARY, is_summary
from tests.clock import PATIENCE
from tests.fake_upstream import Message, StrictUpstream, text
from tests.serving import Proxy, served, tight, wait_until

__all__ = ["kept"]

Json = dict[str, Any]
NOBODYS = "/context_store/0.log.aaaaaaaaaaaaaaaa.txt"


ASKS: dict[str, tuple[str, Json]] = {
    "sessions": ("/recall_sessions", {}),
    "search": ("/grep", {"archive": True}),
    "read": ("/read_file", {}),
}


def posted(proxy: Proxy, what: str, key: str = "alice", **given: Any) -> httpx.Response:
    path, more = ASKS[what]
    return proxy.post(path, {**more, **given}, key)


def recall(proxy: Proxy, what: str, key: str = "alice", **given: Any) -> Json:
    reply = posted(proxy, what, key, **given)
    assert reply.status_code == 200, reply.text
    answer: Json = reply.json()
    return answer


def test_a_session_tells_how_it_began(kept: Kept) -> None:
    found = recall(kept.proxy, "sessions")
    [session] = found["metadata"]["sessions"]
    assert session["title"] == "Look into the logs." and session["model"] == "gpt-4.1"
    assert session["session"] in found["answer"] and "Look into the logs." in found["answer"]


def test_a_session_lists_its_texts_and_their_calls(kept: Kept) -> None:
    found = recall(kept.proxy, "sessions", session=kept.session[:6])
    texts = {text["path"]: text for text in found["metadata"]["texts"]}
    assert (
        texts[kept.reference]["about"] == "result of look /logs/0.log"
        and texts[kept.reference]["tokens"] > 500
    )
    assert kept.reference in found["answer"]


def test_a_search_names_file_call_session_and_line(kept: Kept) -> None:
    found = recall(kept.proxy, "search", pattern="VAULT opens")
    [match] = found["metadata"]["matches"]
    shown = {
        "path": kept.reference,
        "session": kept.session,
        "line": 61,
        "column": FACT.index("vault"),
        "text": FACT,
    }
    assert match == shown
    name = kept.reference.rpartition("/")[2]
    assert f"File: {name} (result of look /logs/0.log; session {kept.session}" in found["answer"]
    assert found["answer"].startswith('Found 1 matches for pattern "VAULT opens" in ')
    assert f"\nL61: {FACT}\n---" in found["answer"]
    opened = recall(kept.proxy, "read", absolute_path=match, offset=match["line"] - 1, limit=1)
    assert opened["answer"].rstrip() == FACT


def test_a_search_without_the_archive_is_one_of_the_callers_files(kept: Kept) -> None:
    reply = kept.proxy.post("/grep", {"pattern": "vault"}, "alice")
    assert reply.json()["metadata"]["matches"] == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"glob": "0.log.*"}, True),
        ({"glob": "*.json"}, False),
        ({"path": "/context_store"}, True),
        ({"path": "./"}, True),
        ({"archive": False}, True),  # a session is one of the archive
    ],
)
def test_a_search_can_be_narrowed(kept: Kept, given: Json, found: bool) -> None:
    asked = {"pattern": "vault", "session": kept.session, **given}
    assert bool(recall(kept.proxy, "search", **asked)["metadata"]["matches"]) == found


def test_a_search_elsewhere_says_where_the_texts_are(kept: Kept) -> None:
    reply = posted(kept.proxy, "search", pattern="vault", path="/elsewhere")
    assert reply.status_code == 404 and "is in '/context_store'" in reply.json()["answer"]


def test_a_search_stays_in_its_session(kept: Kept) -> None:
    assert recall(kept.proxy, "search", pattern="vault", session=kept.session)["metadata"][
        "matches"
    ]
    assert not recall(kept.proxy, "search", pattern="vault", session="0" * 16)["metadata"][
        "matches"
    ]


def test_a_search_ends_at_its_limit_and_says_so(kept: Kept) -> None:
    found = recall(kept.proxy, "search", pattern="nothing happened", limit=7)
    assert len(found["metadata"]["matches"]) == 7 and found["metadata"]["truncated"]
    assert "there are more; send a larger limit or narrow" in found["answer"]


def test_no_limit_is_advised_that_is_larger_than_the_largest(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MATCHES", 7)
    found = recall(kept.proxy, "search", pattern="nothing happened")
    assert found["answer"].endswith("[there are more; narrow the pattern]")


@pytest.mark.parametrize("form", ["{0}", "{1}", "{2}", "/elsewhere/{1}"])
def test_a_text_is_read_by_its_reference_or_name(kept: Kept, form: str) -> None:
    name = kept.reference.rpartition("/")[2]
    path = form.format(kept.reference, name, name.removesuffix(".txt"))
    assert recall(kept.proxy, "read", absolute_path=path)["answer"] == dict(LOGS)["/logs/0.log"]


def test_a_page_says_how_to_go_on(kept: Kept) -> None:
    page = recall(kept.proxy, "read", absolute_path=kept.reference, characters=1_000)["answer"]
    assert len(page) <= 1_000 and 'continue with read_file(absolute_path="' in page
    assert recall(kept.proxy, "read", absolute_path=kept.reference, offset=60, limit=1)[
        "answer"
    ].startswith(FACT)


def test_another_key_sees_nothing(kept: Kept) -> None:
    """In the words for what never existed."""
    key = "alice2"
    assert recall(kept.proxy, "sessions", key)["metadata"]["sessions"] == []
    assert not recall(kept.proxy, "search", key, pattern="vault")["metadata"]["matches"]
    said = [
        posted(kept.proxy, "read", key, absolute_path=path) for path in (kept.reference, NOBODYS)
    ]
    assert [reply.status_code for reply in said] == [404, 404]
    assert said[0].text.replace(kept.reference, "PATH") == said[1].text.replace(NOBODYS, "PATH")
    said = [
        posted(kept.proxy, "sessions", key, session=session) for session in (kept.session, "0" * 16)
    ]
    assert said[0].text.replace(kept.session, "ID") == said[1].text.replace("0" * 16, "ID")


def test_without_a_key_nothing_is_told(kept: Kept) -> None:
    for what in ("sessions", "search", "read"):
        reply = posted(kept.proxy, what, key="", pattern="vault", absolute_path=kept.reference)
        assert reply.status_code == 401 and FACT not in reply.text


def test_strangers_who_share_a_namespace_recall_nothing(tmp_path: Path) -> None:
    """A policy lists `alice`; anybody may come with another key."""
    model = Model()
    with StrictUpstream() as upstream:
        upstream.respond(api("chat", model))
        policy = tight(upstream.url, share_namespace=True)
        listed = policy | {"api_keys": [{"sha256": hashlib.sha256(b"alice").hexdigest()}]}
        with served({"default": policy, "acme": listed}, store=tmp_path) as proxy:
            for key in ("alice", "bob"):
                ask(proxy, "chat", LOGS, "And?", key)
            wait_until(lambda: recall(proxy, "sessions")["metadata"]["sessions"])
            for what, given in (("sessions", {}), ("search", {"pattern": "vault"})):
                assert posted(proxy, what, "mallory", **given).status_code == 401
            [text, *_] = [path.name for path in tmp_path.rglob("*/originals/*")]
            assert posted(proxy, "read", "mallory", absolute_path=text).status_code == 404


@pytest.mark.parametrize("name", ["responses", "messages"])
def test_every_api_is_listed(name: str, tmp_path: Path) -> None:
    model = Model()
    with archived(model, tmp_path, name) as proxy:
        first_conversation(proxy, name, model)
        wait_until(lambda: bool(recall(proxy, "sessions")["metadata"]["sessions"]))
        [session] = recall(proxy, "sessions")["metadata"]["sessions"]
        assert (
            session["title"] == "Look into the logs."
            and session["model"] == body(name, [], "")[1]["model"]
        )


def test_the_originals_behind_a_summary_are_listed(tmp_path: Path) -> None:
    class Summariser(Model):
        def __call__(self, asked: Asked) -> Message:
            return text(SUMMARY) if is_summary(asked) else super().__call__(asked)

    compress = {"mode": "compress", "compress": {"wait": "always", "snapshot_tokens": 200}}
    with archived(Summariser(), tmp_path, offload=compress) as proxy:
        ask(proxy, "chat", LOGS, "And?")
        wait_until(lambda: bool(recall(proxy, "sessions")["metadata"]["sessions"]))
        [session] = recall(proxy, "sessions")["metadata"]["sessions"]
        texts = recall(proxy, "sessions", session=session["session"])["metadata"]["texts"]
        paths = [text["path"] for text in texts if text["about"] == ORIGINALS.about]
        assert any(FACT in posted(proxy, "read", absolute_path=path).text for path in paths)


def test_the_index_is_written_once_for_each_event(tmp_path: Path) -> None:
    """Also by another process, with what it may have forgotten."""
    model = Model()
    with StrictUpstream() as upstream:
        upstream.respond(api("chat", model))

        def index(turns: int) -> list[str]:
            with served({"default": tight(upstream.url)}, store=tmp_path) as proxy:
                ask(proxy, "chat", LOGS[:turns], "And?")
            return sorted(path.name for path in tmp_path.rglob("*/sessions/*"))

        first = index(4)
        assert first and index(4) == first
        assert set(index(8)) > set(first)
        texts = recall_of(tmp_path, upstream.url)
    assert sorted({text["about"] for text in texts}) == [
        f"result of look {path}" for path, _ in LOGS[: len(texts)]
    ]


def recall_of(store: Path, upstream: str) -> list[Json]:
    with served({"default": tight(upstream)}, store=store) as proxy:
        [session] = recall(proxy, "sessions")["metadata"]["sessions"]
        texts: list[Json] = recall(proxy, "sessions", session=session["session"])["metadata"][
            "texts"
        ]
        return texts


def test_without_originals_there_is_no_index(tmp_path: Path) -> None:
    model = Model()
    with archived(model, tmp_path, store_originals=False) as proxy:
        ask(proxy, "chat", LOGS, "And?")
    assert not list(tmp_path.rglob("*/sessions/*"))


def test_a_damaged_record_of_the_index_is_left_out(tmp_path: Path) -> None:
    model = Model()
    with StrictUpstream() as upstream:
        upstream.respond(api("chat", model))
        policies = {"default": tight(upstream.url)}
        with served(policies, store=tmp_path) as proxy:
            first_conversation(proxy, "chat", model)
        for record in tmp_path.rglob("*/sessions/*"):
            record.write_text(record.read_text().replace("Look into", "Send me"))
        with served(policies, store=tmp_path) as proxy:
            assert recall(proxy, "sessions")["metadata"]["sessions"] == []


def test_a_text_of_which_only_the_name_was_written_is_not_there(tmp_path: Path) -> None:
    """A power failure leaves such files."""
    model = Model()
    with archived(model, tmp_path) as proxy:
        reference = first_conversation(proxy, "chat", model)
        [record] = tmp_path.rglob(f"*/originals/{reference.rpartition('/')[2]}")
        record.write_bytes(b"")
        assert posted(proxy, "read", absolute_path=reference).status_code == 404
        assert recall(proxy, "search", pattern="vault")["metadata"]["matches"] == []


def test_a_text_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply that moved it may have ended before."""
    looked = threading.Event()
    put = Folder.put
    get = Folder.get

    def slow_put(folder: Folder, key: str, value: bytes, **how: bool) -> bool:
        if "/originals/" in key:
            looked.wait(PATIENCE)
        return put(folder, key, value, **how)

    def noticed_get(folder: Folder, key: str) -> bytes | None:
        found = get(folder, key)
        if "/originals/" in key:
            looked.set()
        return found

    monkeypatch.setattr(Folder, "put", slow_put)
    monkeypatch.setattr(Folder, "get", noticed_get)
    model = Model()
    with archived(model, tmp_path) as proxy:
        ask(proxy, "chat", LOGS, "And?")
        reference = next(
            name for name in REFERENCE.findall(model.seen[-1].shown) if "0.log" in name
        )
        assert posted(proxy, "read", absolute_path=reference).status_code == 200
        assert looked.is_set()


def test_an_index_names_only_texts_that_are_there(kept: Kept) -> None:
    """It is written after them."""
    found = recall(kept.proxy, "sessions", session=kept.session)["metadata"]["texts"]
    assert all(
        json.dumps(recall(kept.proxy, "read", absolute_path=text["path"])["answer"])
        for text in found
    )
