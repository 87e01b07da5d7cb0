"""`/context_offload` and its older names: moves texts to files, and has old messages summarised.

    messages ──measured──> sizes ──decided──> Offloaded ──summaries made──> files written ──> the messages that remain

The caller adopts the result, so one call is one event: there are no pins, and nothing has to pay
for itself. Every message is accepted: one with members that we do not know stays unchanged, and is
summarised as JSON. All comparisons are strict, and sizes are in tokens. Files are written only
after all summaries are made, and the reply is sent only after all files are written. Threads do all
work on the bytes of messages.
"""

from __future__ import annotations

import re
import sys
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.apps.operations.call import OperationCall, canonical, envelope, joined
from proxy.apps.operations.schema import CompactParameters
from proxy.dialects.chat import CHAT, is_system
from proxy.dialects.render import with_previews
from proxy.errors import ClientFault, NoSummary, UpstreamSilent
from proxy.plan import preview, summary
from proxy.plan.history import Naming
from proxy.plan.plan import Message, Reading, Role, moved_pieces
from proxy.plan.summary import Section, SummaryAnswer
from proxy.policy import Mode, Policy, SnapshotRole
from proxy.requests import relay, summary_writer
from proxy.requests.summary_writer import Failed, Spent, SummaryJob
from proxy.upstream.headers import Headers

LEAST = 200
"""The smallest size in tokens that a summary call asks for, because models ignore smaller
limits."""

TARGET = b"/v1/chat/completions"

BEFORE = "earlier records, which are kept beside yours: do not repeat them"

NOTHING = (
    "Nothing was above the thresholds: the messages are as they came, and no file was written."
)

NEVER = 1 << 62
"""More tokens than any tool result has, so that no result is moved before the model has seen it."""

_ODD = re.compile(r"[^A-Za-z0-9_]+")

_REFERENCE = re.compile(
    r"\.\.\. "
    + re.escape(preview.MARK)
    + r"[^\n]+?; complete, (?:[0-9]+ lines, )?(?P<tokens>[0-9]{1,12}) tokens(?:; [^\n;)]+)?\)\Z"
)
"""The end of a replacement that we made, and how many tokens it stands for."""

Count = Callable[[str], int]


class Offloaded(msgspec.Struct, frozen=True):
    """The decision. `groups` has the indexes of the messages that each snapshot replaces; most
    calls have no groups."""

    raws: Sequence[bytes | Raw]
    messages: Sequence[Message]
    """As they came."""
    tokens: Sequence[int]
    """Of each message in `raws`."""
    files: Mapping[str, str]
    """Path → the text that was moved there."""
    compacted: int
    groups: Sequence[Sequence[int]]

    @property
    def before(self) -> int:
        return sum(message.tokens for message in self.messages)


def _in_text(raw: Raw) -> bytes | Raw:
    """Return a message with its content as text: the JSON of an object, if it is one."""
    members = rawjson.members(raw)
    content = members.get("content")
    if content is None or not rawjson.is_object(content):
        return raw
    text = bytes(content).decode("utf-8", "surrogatepass")
    return rawjson.encode({**members, "content": rawjson.string(text)})


async def offload(call: OperationCall, options: CompactParameters) -> bytes:
    """Offload in the mode that the call asks for. Raises ProxyError."""
    chat_id = options.chat_id or str(uuid.uuid4())
    policy = call.tenant.policy.for_model(options.model or "")
    model = options.model or policy.offload.compress.model or ""
    count = call.services.reader.counter(model)
    readable = await call.read(lambda: [*map(_in_text, call.messages)])
    decided = await call.read(_decided, readable, options, count)
    before = decided.before
    compressed = sum(map(len, decided.groups))
    call.noted = {
        "mode": options.mode.value,
        "model": model,
        "messages": len(call.messages),
        "tokens_before": before,
        "tokens_after": before,
        "compacted": decided.compacted,
        "compressed": compressed,
    }
    if decided.groups and not model:
        raise ClientFault(
            "No model for summaries: give `model`, or have `offload.compress.model` set in this tenant's policy"
        )
    texts = await _summaries(call, policy, model, decided, options.store_dir.rstrip("/"))
    contents = await call.read(
        lambda: {
            canonical(path): text.encode("utf-8", "surrogatepass")
            for path, text in decided.files.items()
        }
    )
    await call.shelf.put_all(contents)
    groups = {}
    stem = joined(options.store_dir, f"compressed_group_{_ODD.sub('_', chat_id)[:64]}_")
    for group in decided.groups:
        # Each message starts on a new line, so that searching and paging work.
        content = b"[\n" + b",\n".join(call.messages[index] for index in group) + b"\n]\n"
        name = await call.shelf.put_next(canonical(stem), ".json", content)
        groups[joined(options.store_dir, name.rpartition("/")[2])] = content.decode()

    def reply() -> bytes:
        came = {id(read): raw for read, raw in zip(readable, call.messages, strict=True)}
        kept = [came.get(id(raw), raw) for raw in _with_snapshots(decided, texts, [*groups])]
        known = {
            id(raw): message.tokens
            for raw, message in zip(call.messages, decided.messages, strict=True)
        }
        after = sum(known.get(id(raw)) or measured(raw, options, count).tokens for raw in kept)
        call.noted["tokens_after"] = after
        files = {**decided.files, **groups}
        metadata: dict[str, Any] = {
            "write_file_dict": files,
            "tokens_before": before,
            "tokens_after": after,
            "compact_ratio": after / before if before else 1.0,
            "chat_id": chat_id,
        }
        if groups:
            metadata["original_messages_path"] = next(iter(groups))
            metadata["original_messages_paths"] = [*groups]
            metadata["compressed_message_count"] = compressed
        answer = (
            "\n".join(f"Successfully created and wrote to new file: {path}" for path in files)
            or NOTHING
        )
        return envelope(answer, kept, metadata)

    return await call.read(reply)


# -- the decision --


def measured(raw: bytes | Raw, options: CompactParameters, count: Count) -> Message:
    return CHAT.read(raw, Reading(options.shape, NEVER), count)


def _decided(raws: Sequence[bytes | Raw], options: CompactParameters, count: Count) -> Offloaded:
    """Decide what the limits require."""
    messages = [measured(raw, options, count) for raw in raws]
    named, _ = Naming().named(messages)
    starts = _steps(messages)
    before = sum(message.tokens for message in messages)
    moved: dict[int, Message] = {}
    if before > options.max_total_tokens and options.mode is not Mode.COMPRESS:
        moved = _moved(raws, named[: _recent(starts, options.keep(1))], options, count)
    kept: list[bytes | Raw] = [*raws]
    tokens = [message.tokens for message in messages]
    for index, message in moved.items():
        kept[index] = with_previews(CHAT, raws[index], message, options.shape, first_preview=False)
        # Measured, not summed from parts: callers compare their threshold with the ratio that the
        # reply states.
        tokens[index] = measured(kept[index], options, count).tokens
    compresses = options.mode is Mode.COMPRESS
    if options.mode is Mode.AUTO:
        compresses = before > 0 and sum(tokens) / before > options.compact_ratio_threshold
    files = {
        joined(options.store_dir, piece.name): dict(CHAT.pieces(raws[index]))[piece.part]
        for index, message in moved.items()
        for piece in message.pieces
    }
    groups = _groups(messages, tokens, starts, options) if compresses else []
    return Offloaded(kept, messages, tokens, files, len(moved), groups)


def _moved(
    raws: Sequence[bytes | Raw],
    messages: Sequence[Message],
    options: CompactParameters,
    count: Count,
) -> dict[int, Message]:
    """Return the tool results to move, each with only the pieces that are worth moving.

    A replacement that we made ends with a reference to something larger. It stays.
    """
    moved = dict[int, Message]()
    for index, message in enumerate(messages):
        if (
            message.role is Role.TOOL
            and message.tokens > options.max_tool_message_tokens
            and message.pieces
        ):
            made = {
                part
                for part, text in CHAT.texts(raws[index])
                if (match := _REFERENCE.search(text)) and count(text) < int(match["tokens"])
            }
            pieces = tuple(
                piece
                for piece in moved_pieces(message, first_preview=False)
                if piece.part not in made
            )
            if pieces:
                moved[index] = replace(message, pieces=pieces)
    return moved


def _groups(
    messages: Sequence[Message],
    tokens: Sequence[int],
    starts: Sequence[int],
    options: CompactParameters,
) -> list[list[int]]:
    """Return the groups to compress, each with as many whole steps as fit; none if the total is
    within the limit."""
    taken = [
        index
        for index in range(_recent(starts, options.keep(2)))
        if options.compress_system_message or messages[index].role is not Role.SYSTEM
    ]
    if sum(tokens[index] for index in taken) <= options.max_total_tokens:
        return []
    groups = list[list[int]]()
    room = 0
    most = options.group_token_threshold or 0
    for _, indexes in groupby(taken, key=starts.__getitem__):
        step = [*indexes]
        size = sum(tokens[index] for index in step)
        if not groups or (most and size > room):
            groups.append([])
            room = most
        groups[-1] += step
        room -= size
    return groups


def _steps(messages: Sequence[Message]) -> list[int]:
    """Return for each message where its step begins: what may be cut off only as a whole.

    A step never separates a call from its result. A result without a call belongs to the message
    before it, and so do results in the old form.
    """
    calls = dict[str, int]()
    starts = list[int]()
    for index, message in enumerate(messages):
        partner = (
            calls.get(message.answers, max(index - 1, 0)) if message.role is Role.TOOL else index
        )
        starts.append(index)
        while starts[-1] > partner:
            starts.pop()
        calls |= {call: index for call, _ in message.calls}
    return [starts[bisect_right(starts, index) - 1] for index in range(len(messages))]


def _recent(starts: Sequence[int], keep: int) -> int:
    """Return the index where the last `keep` messages begin, or an earlier one, so that no call
    loses its result."""
    return starts[max(len(starts) - keep, 0)] if keep else len(starts)


def _with_snapshots(
    decided: Offloaded, texts: Sequence[str], paths: Sequence[str]
) -> list[bytes | Raw]:
    """Return the messages with snapshots, each a text and the path of its originals, instead of the
    groups.

    They stand in the system message, where callers of this operation have always found them.
    """
    taken = {index for group in decided.groups for index in group}
    kept = [raw for index, raw in enumerate(decided.raws) if index not in taken]
    if not texts:
        return kept
    made = zip(texts, decided.groups, paths, strict=True)
    blocks = [summary.framed(text, len(group), path) for text, group, path in made]
    leading = next((place for place, raw in enumerate(kept) if not is_system(raw)), len(kept))
    return CHAT.with_snapshot(
        kept, leading, "\n\n".join([summary.NOTICE, *blocks]), SnapshotRole.SYSTEM
    )


# -- the summaries: the tenant's upstream makes them in order, and each call includes the earlier ones --


async def _summaries(
    call: OperationCall, policy: Policy, model: str, decided: Offloaded, store_dir: str
) -> Sequence[str]:
    """Return a summary for each group. Raises UpstreamFault."""
    spent = Spent()
    texts = list[str]()
    if decided.groups:
        call.client.sent = time.perf_counter()
    try:
        for group in decided.groups:
            sections = await call.read(_sections, decided, group)
            before = [Section(BEFORE, "\n\n".join(texts))] if texts else []
            tokens = sum(decided.tokens[index] for index in group)
            job = _job(call, policy, model, [*before, *sections], tokens, store_dir)
            texts.append((await call.services.summaries.once(job, spent)).text)
    except Failed as error:
        raise NoSummary(f"No summary was made: {error}") from error
    except TimeoutError as error:
        seconds = policy.upstream.idle_timeout
        raise UpstreamSilent(
            f"No summary was made: no answer within {seconds:g} seconds"
        ) from error
    finally:
        call.noted["summary_prompt_tokens"] = spent.prompt_tokens
        call.noted["summary_completion_tokens"] = spent.completion_tokens
        call.noted["cached_tokens"] = spent.cached_tokens
    return texts


def _sections(decided: Offloaded, group: Sequence[int]) -> list[Section]:
    """Return a group as the summarising model sees it, with references in place of the texts that
    moved."""
    tools = {call: name for message in decided.messages for call, name in message.calls}
    sections = list[Section]()
    for index in group:
        raw = decided.raws[index]
        message = decided.messages[index]
        if message.sealed:
            said = bytes(raw).decode("utf-8", "replace")
            sections.append(Section(f"{index + 1} {message.role.name.lower()}", said, message.role))
        else:
            sections += CHAT.sections(raw, index, message, tools.get(message.answers, ""))
    return sections


def _job(
    call: OperationCall,
    policy: Policy,
    model: str,
    sections: list[Section],
    tokens: int,
    store_dir: str,
) -> SummaryJob:
    """Build the job for one group. Its calls have the caller's own credentials, or those that the
    tenant uses instead.

    The caller wants a summary even if it saves nothing, so it is accepted at any size. The task
    asks for half of the group's tokens.
    """
    window = call.services.known.window(call.tenant.namespace, policy, model)
    compress = policy.offload.compress
    size = min(compress.snapshot_tokens, max(tokens // 2, LEAST))
    compress = replace(compress, snapshot_tokens=size, group_token_threshold=0)
    offload = replace(policy.offload, store_dir=store_dir, compress=compress)
    tenant = replace(call.tenant, policy=replace(policy, offload=offload))

    async def ask(body: bytes) -> SummaryAnswer:
        request = call.services.relay.request(call.client, tenant, body, TARGET)
        request = relay.rewritten(request, body, (*relay.ANOTHER, b"content-type"))
        headers = Headers((*request.headers, (b"content-type", b"application/json")))
        return await summary_writer.ask(
            call.services.upstream, replace(request, headers=headers), CHAT
        )

    return SummaryJob(
        tenant=tenant,
        model=model,
        dialect=CHAT.name,
        replaced_tokens=sys.maxsize,
        window=window,
        alone=partial(CHAT.summary_request, model=model),
        history=lambda: sections,
        originals=f"{store_dir}/",
        ask=ask,
    )
