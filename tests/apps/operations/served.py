"""Helpers for tests of the HTTP operations: a proxy with them, its callers, histories, and how to
restore these.

Each caller has its own key and so its own namespace, so tests share a proxy without affecting each
other.
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
"""Tokens that each message costs in addition to its text."""

REFERENCE = re.compile(r"\.\.\. \(detailed result is stored in ([^;)]+)[;)]")
ORIGINALS = re.compile(r"\(Original (\d+) messages are stored in: (.+?\.json)\)")
WRITTEN = "Successfully created and wrote to new file: "

_TOKENS = Tokens()


@dataclass
class Reply:
    """A reply's status and envelope."""

    status: int
    success: bool
    answer: str
    messages: list[Json]
    metadata: Json
    raw: bytes

    @property
    def files(self) -> dict[str, str]:
        """Maps each path to the whole text that the offload says it wrote there."""
        files: dict[str, str] = self.metadata["write_file_dict"]
        return files

    @property
    def references(self) -> list[str]:
        """The paths of compacted results, in the messages' order."""
        return [
            path
            for message in self.messages
            for path in REFERENCE.findall(str(message.get("content")))
        ]

    @property
    def groups(self) -> list[str]:
        """The paths of compressed groups, in the order of their snapshots."""
        return [
            path
            for message in self.messages
            for _, path in ORIGINALS.findall(str(message.get("content")))
        ]


def enveloped(response: httpx.Response) -> Reply:
    """Return the reply. Whatever its status, it must be an envelope: four members of four types,
    and no other."""
    assert response.headers["content-type"].startswith("application/json"), response.text
    body = response.json()
    assert {name: type(value) for name, value in body.items()} == MEMBERS, response.text[:500]
    assert body["success"] is (response.status_code == 200), response.text[:500]
    assert body["success"] or body["answer"], "a failure says why"
    assert "Traceback" not in response.text or response.status_code == 200
    return Reply(response.status_code, **body, raw=response.content)


class Caller:
    """A client of the operations with its own key."""

    def __init__(self, proxy: Proxy, key: str | None = None) -> None:
        self.key = key or uuid.uuid4().hex
        self.proxy = proxy
        headers = {"authorization": f"Bearer {self.key}"}
        # `verify=False`, as reading certificates takes longer than most tests and there are none to
        # verify.
        self.http = httpx.Client(
            base_url=proxy.root, headers=headers, trust_env=False, verify=False
        )

    def post(self, path: str, body: Any) -> Reply:
        """Post `body`, as it is if it is bytes, else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return enveloped(
            self.http.post(path, content=content, headers={"content-type": "application/json"})
        )

    def offload(self, messages: list[Json], **parameters: Any) -> Reply:
        return self.post(
            "/context_offload", {"messages": messages, "store_dir": STORE, **parameters}
        )

    def compact(self, messages: list[Json], **parameters: Any) -> Reply:
        """Compact every tool result but the last, whatever its size, unless `parameters` say
        otherwise."""
        tight = {
            "context_manage_mode": "compact",
            "max_total_tokens": 0,
            "max_tool_message_tokens": 0,
        }
        return self.offload(messages, **{**tight, **parameters})

    def compress(self, messages: list[Json], **parameters: Any) -> Reply:
        """Compress every message but the last two, unless `parameters` say otherwise."""
        return self.offload(
            messages,
            **{
                "context_manage_mode": "compress",
                "max_total_tokens": 0,
                "model": MODEL,
                **parameters,
            },
        )

    def grep(self, pattern: str, **parameters: Any) -> Reply:
        return self.post("/grep", {"pattern": pattern, **parameters})

    def read(self, path: str, **parameters: Any) -> Reply:
        return self.post("/read_file", {"absolute_path": path, **parameters})

    def text(self, path: str) -> str:
        """Return the whole file, which must exist."""
        reply = self.read(path)
        assert reply.status == 200, (path, reply.answer)
        return reply.answer

    def restored(self, messages: list[Json]) -> list[Json]:
        """Return the original history of `messages`, with groups for their snapshots and results
        for their previews.

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
        """Return a tool result's content with references replaced by their files."""
        if isinstance(content, list):
            return [
                {**part, "text": self._whole(part["text"])} if "text" in part else part
                for part in content
            ]
        found = REFERENCE.findall(content)
        return self.text(found[-1]) if found else content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self.http.close()


@dataclass
class Summaries:
    """An upstream whose model writes a snapshot on request. Each snapshot says which one it is."""

    asked: list[Recorded] = field(default_factory=list)

    def __call__(self, request: Recorded) -> Answer:
        if not request.is_chat:
            return whole({"object": "list", "data": []})
        self.asked.append(request)
        return text(
            f"<state_snapshot>{SUMMARY}<progress>number {len(self.asked)}</progress></state_snapshot>"
        )


class World(NamedTuple):
    """A proxy, its model, and the upstream that runs the model."""

    proxy: Proxy
    model: Summaries
    up: StrictUpstream


DEPTH = ("1", "2", "3", "4")


@contextmanager
def operated(policy: Json | None = None, **settings: Any) -> Iterator[World]:
    """Run a proxy for everybody (default.yaml) with a model that writes summaries. Fails if it logs
    a bug."""
    logged: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="offload-test-") as root,
        StrictUpstream() as up,
        _errors(logged),
    ):
        up.respond(model := Summaries())
        policies = {"default": {"upstream": {"base_url": up.url}, **(policy or {})}}
        with served(policies, Path(root, *DEPTH, "store"), **settings) as proxy:
            yield World(proxy, model, up)
            assert strays(proxy) == []
            assert up.unused == 0
    assert logged == []


def strays(proxy: Proxy) -> list[Path]:
    """Return files that an `operated` proxy wrote anywhere but in `STORE/NAMESPACE/files`.

    The store is so deep in the test's directory that a path with `..` still ends inside that
    directory.
    """
    files = (path for path in proxy.store.parents[len(DEPTH)].rglob("*") if path.is_file())
    return [path for path in files if path.parent.name != "files" or path.parents[2] != proxy.store]


@contextmanager
def _errors(logged: list[str]) -> Iterator[None]:
    """Collect what the proxy logs as an error, that is, as a bug of its own."""
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
    """Return an assistant message with a call for each result, and the results. Later calls' ids
    get a suffix."""
    ids = [call_id if number == 0 else f"{call_id}_{number}" for number in range(len(results))]
    functions = [{"name": "search", "arguments": f'{{"query":"{one}"}}'} for one in ids]
    made = [
        {"id": one, "type": "function", "function": function}
        for one, function in zip(ids, functions, strict=True)
    ]
    pairs = zip(ids, results, strict=True)
    answers = [{"role": "tool", "tool_call_id": one, "content": result} for one, result in pairs]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *answers]


def research(total: int, result: int = 4_700, label: str = "page") -> list[Json]:
    """Return a web agent's history of at least `total` tokens, with searchable results of about
    `result` each."""
    messages = [
        system("You are a research assistant."),
        user("Find recent papers on context management."),
    ]
    size = sum(map(tokens, messages))
    for number in itertools.count():
        made = step(f"call_{label}_{number}", page(f"{label} {number}", result))
        size += sum(map(tokens, made))
        messages += made
        if size >= total:
            return messages
    raise AssertionError


def page(title: str, size: int) -> str:
    """Return a text of about `size` tokens in lines."""
    lines = [f"{title}: a result like any other"]
    while (len(lines) - 1) * 12 < size:
        lines.append(f"{title}, line {len(lines)}: some {len(lines) * 7919 % 1000} words")
    return "\n".join(lines)


def words(count: int) -> str:
    """Return a text of exactly `count` tokens."""
    made = "a" + " a" * (count - 1)
    assert _TOKENS.count(made) == count
    return made


def tokens(message: Json) -> int:
    """Return a message's tokens as the design counts them: texts, calls' names and arguments, and
    four more."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    texts += [part for call in calls for part in (call["name"], call["arguments"])]
    return MESSAGE_TOKENS + sum(map(_TOKENS.count, texts))
