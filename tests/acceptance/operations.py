"""What tests of the HTTP operations need: a proxy that has them, callers of it, histories, and what restores them.

Callers have keys of their own, and so namespaces of their own: tests share a proxy and never meet.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from proxy.tokens import Tokens
from tests.fake_upstream import Recorded, StrictUpstream, text, whole
from tests.fake_upstream import Reply as Answer
from tests.serving import Proxy, served

Json = dict[str, Any]

OFFLOADS = ("/context_offload", "/context_compact", "/context_compress")
ALL = (*OFFLOADS, "/grep", "/read_file")

STORE = "/context_store"
MODEL = "gpt-4.1-mini"
SUMMARY = "<overall_goal>ship it</overall_goal>"
MEMBERS = {"success": bool, "answer": str, "messages": list, "metadata": dict}
MESSAGE_TOKENS = 4
"""What each message costs beside its text."""

REFERENCE = re.compile(r"\.\.\. \(detailed result is stored in ([^;)]+)[;)]")
ORIGINALS = re.compile(r"\(Original (\d+) messages are stored in: (\S+)\)")
WRITTEN = "Successfully created and wrote to new file: "

_TOKENS = Tokens()


@dataclass
class Reply:
    """A reply's status, and its envelope."""

    status: int
    success: bool
    answer: str
    messages: list[Json]
    metadata: Json
    raw: bytes

    @property
    def files(self) -> dict[str, str]:
        """Path → the whole text that an offload says it wrote there."""
        files: dict[str, str] = self.metadata["write_file_dict"]
        return files

    @property
    def references(self) -> list[str]:
        """The paths of compacted results, in the messages' order."""
        return [path for message in self.messages for path in REFERENCE.findall(str(message.get("content")))]

    @property
    def groups(self) -> list[str]:
        """The paths of compressed groups, in the order of their snapshots."""
        return [path for message in self.messages for _, path in ORIGINALS.findall(str(message.get("content")))]


def enveloped(response: httpx.Response) -> Reply:
    """The reply, which has to be an envelope whatever its status is: four members of four types, and no other."""
    assert response.headers["content-type"].startswith("application/json"), response.text
    body = response.json()
    assert {name: type(value) for name, value in body.items()} == MEMBERS, response.text[:500]
    assert body["success"] is (response.status_code == 200), response.text[:500]
    assert body["success"] or body["answer"], "a failure says why"
    assert "Traceback" not in response.text or response.status_code == 200
    return Reply(response.status_code, **body, raw=response.content)


class Caller:
    """Somebody with a key of their own, who works with the operations."""

    def __init__(self, proxy: Proxy, key: str | None = None) -> None:
        self.key = key or uuid.uuid4().hex
        self.proxy = proxy
        headers = {"authorization": f"Bearer {self.key}"}
        # `verify`: reading certificates takes longer than most tests, and here is none to verify.
        self.http = httpx.Client(base_url=proxy.root, headers=headers, timeout=60, trust_env=False, verify=False)

    def post(self, path: str, body: Any) -> Reply:
        """`body` goes out as it is where it is bytes, else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return enveloped(self.http.post(path, content=content, headers={"content-type": "application/json"}))

    def offload(self, messages: list[Json], **parameters: Any) -> Reply:
        return self.post("/context_offload", {"messages": messages, "store_dir": STORE, **parameters})

    def compact(self, messages: list[Json], **parameters: Any) -> Reply:
        """Every tool result but the last one, whatever its size, unless `parameters` say otherwise."""
        tight = {"context_manage_mode": "compact", "max_total_tokens": 0, "max_tool_message_tokens": 0}
        return self.offload(messages, **{**tight, **parameters})

    def compress(self, messages: list[Json], **parameters: Any) -> Reply:
        """Every message but the last two, unless `parameters` say otherwise."""
        return self.offload(
            messages, **{"context_manage_mode": "compress", "max_total_tokens": 0, "model": MODEL, **parameters}
        )

    def grep(self, pattern: str, **parameters: Any) -> Reply:
        return self.post("/grep", {"pattern": pattern, **parameters})

    def read(self, path: str, **parameters: Any) -> Reply:
        return self.post("/read_file", {"absolute_path": path, **parameters})

    def text(self, path: str) -> str:
        """The whole file, which has to be there."""
        reply = self.read(path)
        assert reply.status == 200, (path, reply.answer)
        return reply.answer

    def restored(self, messages: list[Json]) -> list[Json]:
        """The history that `messages` stand for: groups in the place of their snapshots, results in that of previews.

        Without the texts of system messages, which is where snapshots stand.
        """
        return list(self._restored(messages))

    def _restored(self, messages: list[Json]) -> Iterator[Json]:
        for message in messages:
            content = message.get("content")
            if message["role"] in ("system", "developer"):
                for number, path in ORIGINALS.findall(str(content)):
                    group = json.loads(self.text(path))
                    assert len(group) == int(number)
                    yield from self._restored(group)
            elif message["role"] == "tool" and content:
                yield {**message, "content": self._whole(content)}
            else:
                yield message

    def _whole(self, content: str | list[Json]) -> str | list[Json]:
        """A tool result's content with the files in the place of their references."""
        if isinstance(content, list):
            return [{**part, "text": self._whole(part["text"])} if "text" in part else part for part in content]
        found = REFERENCE.findall(content)
        return self.text(found[-1]) if found else content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        self.http.close()


@dataclass
class Summaries:
    """An upstream whose model writes a snapshot when it is asked for one: each says which it is."""

    asked: list[Recorded] = field(default_factory=list)

    def __call__(self, request: Recorded) -> Answer:
        if not request.is_chat:
            return whole({"object": "list", "data": []})
        self.asked.append(request)
        return text(f"<state_snapshot>{SUMMARY}<progress>number {len(self.asked)}</progress></state_snapshot>")


class World(NamedTuple):
    """A proxy, the model behind it, and the upstream that this is on."""

    proxy: Proxy
    model: Summaries
    up: StrictUpstream


DEPTH = ("1", "2", "3", "4")


@contextmanager
def operated(policy: Json | None = None, **settings: Any) -> Iterator[World]:
    """The proxy for everybody (default.yaml), in front of a model that writes summaries. It must not log any bug."""
    logged: list[str] = []
    with tempfile.TemporaryDirectory(prefix="offload-test-") as root, StrictUpstream() as up, _errors(logged):
        up.respond(model := Summaries())
        policies = {"default": {"upstream": {"base_url": up.url}, **(policy or {})}}
        with served(policies, Path(root, *DEPTH, "store"), **settings) as proxy:
            yield World(proxy, model, up)
            assert strays(proxy) == []
            assert up.unused == 0
    assert logged == []


def strays(proxy: Proxy) -> list[Path]:
    """Files that an `operated` proxy wrote anywhere but in `STORE/NAMESPACE/files`.

    The store lies so deep in a directory of the test's that a path that climbs ends up in there.
    """
    files = (path for path in proxy.store.parents[len(DEPTH)].rglob("*") if path.is_file())
    return [path for path in files if path.parent.name != "files" or path.parents[2] != proxy.store]


@contextmanager
def _errors(logged: list[str]) -> Iterator[None]:
    """What the proxy logs as an error, which is to say as a bug of its own."""
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("proxy")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


# Histories


def system(content: str = "Be brief.") -> Json:
    return {"role": "system", "content": content}


def user(content: str = "Go on.") -> Json:
    return {"role": "user", "content": content}


def assistant(content: str = "Done.") -> Json:
    return {"role": "assistant", "content": content}


def step(call_id: str, *results: Any) -> list[Json]:
    """An assistant message with as many calls as there are results, and these; the ids of later ones get a suffix."""
    ids = [call_id if number == 0 else f"{call_id}_{number}" for number in range(len(results))]
    made = [{"id": one, "type": "function", "function": {"name": "search", "arguments": "{}"}} for one in ids]
    pairs = zip(ids, results, strict=True)
    answers = [{"role": "tool", "tool_call_id": one, "content": result} for one, result in pairs]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *answers]


def research(total: int, result: int = 4_700, label: str = "page") -> list[Json]:
    """A web agent's history of at least `total` tokens: searches of about `result` tokens, with lines to find."""
    messages = [system("You are a research assistant."), user("Find recent papers on context management.")]
    size = sum(map(tokens, messages))
    for number in itertools.count():
        made = step(f"call_{label}_{number}", page(f"{label} {number}", result))
        size += sum(map(tokens, made))
        messages += made
        if size >= total:
            return messages
    raise AssertionError


def page(title: str, size: int) -> str:
    """A text of about `size` tokens, line by line."""
    lines = [f"{title}: a result like any other"]
    while (len(lines) - 1) * 12 < size:
        lines.append(f"{title}, line {len(lines)}: some {len(lines) * 7919 % 1000} words")
    return "\n".join(lines)


def words(count: int) -> str:
    """A text of exactly so many tokens."""
    made = "a" + " a" * (count - 1)
    assert _TOKENS.count(made) == count
    return made


def tokens(message: Json) -> int:
    """A message's tokens as the design has them: its texts, its calls' names and arguments, and four."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    texts += [part for call in calls for part in (call["name"], call["arguments"])]
    return MESSAGE_TOKENS + sum(map(_TOKENS.count, texts))
