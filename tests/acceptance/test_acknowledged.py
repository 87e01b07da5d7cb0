"""What a reply promises of the store is true: each line of the table in docs/storage.md, under each
fault of a store.

A reply that says that something is stored lets its client drop what it has. So whatever was
acknowledged is read back by another process, once the fault is over; and what was not comes back to
the client, or goes upstream as it came.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from proxy.stores import guarded
from proxy.stores.guarded import Guarded, Visit
from proxy.stores.local import Folder
from proxy.threads import Background
from tests.acceptance.test_archive import FACT, LOGS, body
from tests.acceptance.test_compaction import TRIGGER, Upstream, ask, history
from tests.apps.operations.served import Caller, page, step, user
from tests.clock import PATIENCE, wait_until
from tests.dialects.responses.api import call, reasoning, say
from tests.fake_upstream import StrictUpstream
from tests.serving import PLAIN, Proxy, served, spawned, tight
from tests.stores.engines import redis_server

Json = dict[str, Any]

LARGE = 2_000
"""Bytes of a record that a nearly full disk does not take. References and lists are smaller, moved
texts are larger."""

BUDGET = 0.2
"""Seconds for which a slow store is waited for."""


# -- what is acknowledged --------------------------------------------------------------------------


class Compaction:
    """The reply has a reference, and the client goes on with that alone."""

    def __init__(self, up: StrictUpstream) -> None:
        self.upstream = Upstream()
        self._up = up
        self._item: Json = {}
        up.respond(self.upstream)
        up.expect_refusals = True  # it does not compact

    def acknowledged(self, proxy: Proxy) -> bool:
        reply = ask(proxy, [*history(), TRIGGER])
        if reply.status_code == 200:
            [self._item] = reply.json()["output"]
            return True
        assert json.loads(self._up.requests[-1].body)["input"] == [*history(), TRIGGER], (
            "as it came"
        )
        assert "the proxy's store did not keep what would move" in reply.headers["x-offload-reason"]
        return False

    def found(self, proxy: Proxy) -> bool:
        ask(proxy, [self._item, {"role": "user", "content": "Recall: what opens the vault?"}])
        return FACT in json.dumps(self.upstream.asked["input"][-1])


class Compress:
    """The reply has previews and hashes, and a gateway sends them instead of the texts."""

    def __init__(self, up: StrictUpstream) -> None:
        self._hashes: Sequence[str] = ()

    def acknowledged(self, proxy: Proxy) -> bool:
        _, asked = body("chat", LOGS, "And?")
        reply = proxy.post(
            "/v1/compress", {"model": asked["model"], "messages": asked["messages"]}, "alice"
        )
        self._hashes = reply.json().get("ccr_hashes", ())
        assert bool(self._hashes) == (reply.status_code == 200)
        return reply.status_code == 200

    def found(self, proxy: Proxy) -> bool:
        headers = {"authorization": "Bearer alice"}
        urls = [f"{proxy.url}/retrieve/{one}" for one in self._hashes]
        replies = [httpx.get(url, headers=headers, trust_env=False, verify=PLAIN) for url in urls]
        texts = [reply.json().get("original_content") for reply in replies]
        return all(texts) and any(FACT in text for text in texts)


class Offload:
    """The reply has the messages with references, and the caller goes on with those."""

    messages = (user(), *step("c", page("result", 3_000)), user("Well?"))

    def __init__(self, up: StrictUpstream) -> None:
        self._adopted: list[Json] = []

    def acknowledged(self, proxy: Proxy) -> bool:
        with Caller(proxy, "alice") as caller:
            reply = caller.compact([*self.messages])
        assert reply.status == 200 or reply.messages == [*self.messages]
        self._adopted = reply.messages
        return reply.status == 200

    def found(self, proxy: Proxy) -> bool:
        with Caller(proxy, "alice") as caller:
            return caller.restored(self._adopted) == [*self.messages]


class Rounds:
    """A reply with hidden rounds that upstream keeps: the client goes on by its id, or sends it
    back."""

    def __init__(self, up: StrictUpstream) -> None:
        self.upstream = Upstream()
        self._id, self._output = "", list[Json]()
        up.respond(self.upstream.api)

    def acknowledged(self, proxy: Proxy) -> bool:
        looked = [reasoning("I look."), call("grep", {"pattern": "vault"})]
        self.upstream.api.script(looked, [say("It is 7741.")])
        reply = ask(proxy, history(), store=True)
        assert reply.status_code == 200 and FACT in json.dumps(self.upstream.asked["input"][-1])
        self._id, self._output = reply.json()["id"], reply.json()["output"]
        return True

    def found(self, proxy: Proxy) -> bool:
        """The answer to the hidden call is sent again, in its place."""
        last = {"role": "user", "content": "Sure?"}
        self.upstream.api.script([say("Yes.")], [say("Yes.")])
        assert ask(proxy, [last], store=True, previous_response_id=self._id).status_code == 200
        ask(proxy, [*history(), *self._output, last], store=True)
        return FACT in json.dumps(self.upstream.asked["input"][-4:])

    @staticmethod
    def stored(proxy: Proxy) -> bool:
        return all(list(proxy.store.glob(f"*/{kind}/*")) for kind in ("rounds", "continuations"))


Deed = Compaction | Compress | Offload | Rounds


# -- what fails ------------------------------------------------------------------------------------


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def nearly_full() -> Iterator[None]:
    """Small records fit, large ones do not."""
    put = Folder.put

    def some(folder: Folder, key: str, value: bytes, *, sync: bool = True) -> bool:
        return failing(errno.ENOSPC)() if len(value) > LARGE else put(folder, key, value, sync=sync)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "put", some)
        yield


@contextmanager
def read_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("put", "delete"):
            patched.setattr(Folder, name, failing(errno.EROFS))
        yield


@contextmanager
def away() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("put", "delete", "get_many", "pages"):
            patched.setattr(Folder, name, failing(errno.EIO))
        yield


@contextmanager
def slow() -> Iterator[None]:
    """No write ends before the fault does."""
    over, put = threading.Event(), Folder.put

    def late(folder: Folder, key: str, value: bytes, *, sync: bool = True) -> bool:
        over.wait(PATIENCE)
        return put(folder, key, value, sync=sync)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "put", late)
        patched.setattr(guarded, "LATER_SECONDS", BUDGET)
        patched.setattr(Guarded, "visit", lambda store, seconds=BUDGET: Visit(store, BUDGET))
        yield
        over.set()


@contextmanager
def queue_full() -> Iterator[None]:
    """There is no room for work that nobody waits for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Background, "start", lambda *_: False)
        yield


Fault = Callable[[], AbstractContextManager[None]]
FAILS: Sequence[Fault] = (nearly_full, read_only, away, slow)

each_fault = pytest.mark.parametrize("fault", FAILS)
each_promise = pytest.mark.parametrize("kind", [Compaction, Compress, Offload])


@pytest.fixture
def up() -> Iterator[StrictUpstream]:
    with StrictUpstream() as made:
        yield made


def policies(up: StrictUpstream) -> Json:
    return {"default": tight(up.url)}


@each_promise
@each_fault
def test_what_the_store_does_not_take_is_not_acknowledged(
    kind: type[Deed], fault: Fault, up: StrictUpstream, tmp_path: Path
) -> None:
    """Nor is anything lost by it: the same request is acknowledged once the store works, by the
    next process."""
    deed = kind(up)
    with served(policies(up), tmp_path) as proxy, fault():
        assert not deed.acknowledged(proxy)
    with served(policies(up), tmp_path) as proxy:
        assert deed.acknowledged(proxy) and deed.found(proxy)


@each_promise
def test_what_is_acknowledged_needs_no_room_for_background_work(
    kind: type[Deed], up: StrictUpstream, tmp_path: Path
) -> None:
    deed = kind(up)
    with served(policies(up), tmp_path) as proxy, queue_full():
        assert deed.acknowledged(proxy)
    with served(policies(up), tmp_path) as proxy:
        assert deed.found(proxy)


@pytest.mark.parametrize("kind", [Compaction, Compress, Offload, Rounds])
def test_a_process_that_is_killed_after_a_reply_has_stored_what_it_acknowledged(
    kind: type[Deed], up: StrictUpstream, tmp_path: Path
) -> None:
    deed = kind(up)
    with spawned(policies(up), tmp_path) as proxy:
        assert deed.acknowledged(proxy)
        assert proxy.process
        proxy.process.send_signal(signal.SIGKILL)
        proxy.process.wait(PATIENCE)
    with served(policies(up), tmp_path) as proxy:
        assert deed.found(proxy)


@each_promise
def test_a_redis_without_memory_acknowledges_nothing(
    kind: type[Deed], up: StrictUpstream, tmp_path: Path
) -> None:
    deed = kind(up)
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        store: Any = f"redis://127.0.0.1:{server.port}/0"
        with served(policies(up), store=store) as proxy, Redis(port=server.port) as redis:
            redis.config_set("maxmemory", 1)
            assert not deed.acknowledged(proxy)
            redis.config_set("maxmemory", 0)
        with served(policies(up), store=store) as proxy:
            assert deed.acknowledged(proxy) and deed.found(proxy)


@each_fault
def test_hidden_rounds_are_written_once_the_store_works(
    fault: Fault, up: StrictUpstream, tmp_path: Path
) -> None:
    """The reply does not depend on them, so its client gets it, and this process owes the
    records."""
    deed = Rounds(up)
    with served(policies(up), tmp_path) as proxy:
        with fault():
            assert deed.acknowledged(proxy) and deed.found(proxy), "this process has them"
        wait_until(lambda: deed.stored(proxy))
    with served(policies(up), tmp_path) as proxy:
        assert deed.found(proxy)


def test_what_is_owed_is_written_when_the_process_ends(up: StrictUpstream, tmp_path: Path) -> None:
    """It gets a last chance, whatever the breaker says."""
    deed = Rounds(up)
    with served(policies(up), tmp_path) as proxy:
        with read_only(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(guarded, "PAUSE", PATIENCE)  # until it is tried again
            assert deed.acknowledged(proxy)
        assert not deed.stored(proxy)
    assert deed.stored(proxy)
    with served(policies(up), tmp_path) as proxy:
        assert deed.found(proxy)


def test_what_was_never_written_is_counted_when_the_process_ends(
    up: StrictUpstream, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("no folder")
    deed = Rounds(up)
    with spawned(policies(up), tmp_path / "store") as proxy:
        assert deed.acknowledged(proxy) and proxy.process
        proxy.process.terminate()
        proxy.process.wait(PATIENCE)
        assert re.search(r"\d+ records were never written", proxy.log())


@pytest.mark.parametrize("kind", ["originals", "compactions"])
def test_a_damaged_record_does_not_pass_for_a_stored_one(
    kind: str, up: StrictUpstream, tmp_path: Path
) -> None:
    """The client still has the texts when it asks for its history to be compacted again, and drops
    them then."""
    deed = Compaction(up)
    with served(policies(up), tmp_path) as proxy:
        assert deed.acknowledged(proxy)
        for record in tmp_path.glob(f"*/{kind}/*"):
            record.write_bytes(record.read_bytes()[:-9])
        assert deed.acknowledged(proxy)
    with served(policies(up), tmp_path) as proxy:
        assert deed.found(proxy)
