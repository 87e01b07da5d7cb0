"""`/context_offload` and its older names: carries out what `one_shot` decides.

It writes files only after all summaries are made, and replies only after all files are written. Reading threads do all
work on the bytes of messages.
"""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Raw
from msgspec.structs import asdict, replace

from proxy.dialects.chat import CHAT
from proxy.errors import ClientFault, NoSummary, UpstreamSilent
from proxy.operations import names, one_shot, schema
from proxy.operations.call import OperationReply
from proxy.operations.one_shot import Offloaded
from proxy.operations.schema import OffloadParameters
from proxy.plan.message import Message
from proxy.plan.summary import SCRATCHPAD_TOKENS, Section, SummaryAnswer
from proxy.requests import relay, summary_writer
from proxy.requests.summaries import group_limits
from proxy.requests.summary_writer import Failed, Spent, SummaryJob
from proxy.upstream.headers import Headers, url_for

if TYPE_CHECKING:
    from proxy.operations.call import OperationCall
    from proxy.policy import Policy

LEAST = 200
"""The smallest size in tokens that a summary call asks for, because models ignore smaller limits."""

TARGET = b"/v1/chat/completions"

BEFORE = "earlier records, which are kept beside yours: do not repeat them"

_ODD = re.compile(r"[^A-Za-z0-9_-]+")

KEEP_RECENT = 5
"""How many messages `/context_compress` keeps by default, as its callers expect."""

NOTHING = "Nothing was above the thresholds: the messages are as they came, and no file was written."


async def offload(call: OperationCall) -> OperationReply:
    """Offload in the mode that the call asks for. Raises ProxyError."""
    return await _offload(call, await call.read(schema.taken, call.given, OffloadParameters))


async def compact(call: OperationCall) -> OperationReply:
    """Offload in compact mode. Raises ProxyError."""
    given = await call.read(schema.taken, call.given, schema.CompactParameters)
    return await _offload(call, OffloadParameters(**asdict(given), context_manage_mode="compact"))


async def compress(call: OperationCall) -> OperationReply:
    """Offload in compress mode. Raises ProxyError."""
    given = await call.read(schema.taken, call.given, schema.CompressParameters)
    if given.keep_recent_count is None:
        given = replace(given, keep_recent_count=KEEP_RECENT)
    return await _offload(call, OffloadParameters(**asdict(given), context_manage_mode="compress"))


async def _offload(call: OperationCall, options: OffloadParameters) -> OperationReply:
    chat_id = options.chat_id or str(uuid.uuid4())
    policy = call.tenant.policy.for_model(options.model or "")
    model = options.model or policy.offload.compress.model or ""
    raws = call.given.messages
    counter = call.services.reader.counter(model)
    messages = await call.read(lambda: [one_shot.measured(raw, options, counter) for raw in raws])
    decided = await call.read(one_shot.offload, raws, messages, options, counter)
    call.noted = {
        "mode": options.mode.value,
        "model": model,
        "messages": len(raws),
        "tokens_before": decided.tokens_before,
        "tokens_after": decided.tokens_before,
        "compacted": decided.compacted,
        "compressed": len(decided.taken),
    }
    if decided.groups and not model:
        raise ClientFault(
            "No model for summaries: give `model`, or have `offload.compress.model` set in this tenant's policy"
        )
    turns = [await call.read(one_shot.group_turns, decided, messages, group) for group in decided.groups]
    tokens = [sum(decided.tokens[index] for index in group) for group in decided.groups]
    texts = await _made(call, policy, model, list(zip(turns, tokens, strict=True)), names.stem(options.store_dir))
    groups = await _written(call, decided, options.store_dir, chat_id)
    snapshots = list(zip(texts, groups, strict=True))
    kept = await call.read(one_shot.with_snapshots, decided, snapshots)
    call.noted["tokens_after"] = after = await call.read(_tokens, kept, raws, messages, options, counter)
    files = {**decided.files, **groups}
    answer = "\n".join(f"Successfully created and wrote to new file: {path}" for path in files) or NOTHING
    return OperationReply(answer, kept, _metadata(decided, after, chat_id, files, list(groups)))


async def _written(call: OperationCall, decided: Offloaded, store_dir: str, chat_id: str) -> dict[str, str]:
    """Write all moved texts and the groups' files. Returns the groups' files in order, path → content."""
    await call.shelf.put_all(await call.read(_contents, decided.files))
    groups = {}
    stem = names.joined(store_dir, f"compressed_group_{_ODD.sub('_', chat_id)[:64]}_")
    for group in decided.groups:
        # Each message starts on a new line, so that searching and paging work.
        content = b"[\n" + b",\n".join(call.given.messages[index] for index in group) + b"\n]\n"
        name = await call.shelf.put_next(names.canonical(stem), ".json", content)
        groups[names.joined(store_dir, name.rpartition("/")[2])] = content.decode()
    return groups


def _tokens(
    kept: Sequence[bytes | Raw],
    raws: Sequence[Raw],
    messages: Sequence[Message],
    options: OffloadParameters,
    count: Callable[[str], int],
) -> int:
    """Return the tokens of the reply's messages. Only those that were rewritten still have to be measured."""
    known = {id(raw): message.tokens for raw, message in zip(raws, messages, strict=True)}
    return sum(known[id(raw)] if id(raw) in known else one_shot.measured(raw, options, count).tokens for raw in kept)


def _contents(files: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files as they are stored, by name."""
    return {names.canonical(path): text.encode("utf-8", "surrogatepass") for path, text in files.items()}


def _metadata(
    decided: Offloaded, after: int, chat_id: str, files: dict[str, str], paths: Sequence[str]
) -> dict[str, Any]:
    before = decided.tokens_before
    metadata: dict[str, Any] = {
        "write_file_dict": files,
        "tokens_before": before,
        "tokens_after": after,
        "compact_ratio": after / before if before else 1.0,
        "chat_id": chat_id,
    }
    if paths:
        metadata["original_messages_path"] = paths[0]
        metadata["original_messages_paths"] = list(paths)
        metadata["compressed_message_count"] = len(decided.taken)
    return metadata


# -- the summaries: the tenant's upstream makes them in order, and each call includes the earlier ones --


async def _made(
    call: OperationCall, policy: Policy, model: str, groups: Sequence[tuple[list[Section], int]], store_dir: str
) -> list[str]:
    """Return a summary for each group, which is given as its messages and their tokens. Raises UpstreamFault."""
    spent, texts = Spent(), list[str]()
    if groups:
        call.client.sent = time.perf_counter()
    try:
        for turns, tokens in groups:
            before = [Section(BEFORE, "\n\n".join(texts))] if texts else []
            job = _job(call, policy, model, [*before, *turns], tokens, store_dir)
            texts.append((await call.services.summaries.once(job, spent)).text)
    except Failed as error:
        raise NoSummary(f"No summary was made: {error}") from error
    except TimeoutError as error:
        seconds = policy.upstream.idle_timeout
        raise UpstreamSilent(f"No summary was made: no answer within {seconds:g} seconds") from error
    finally:
        call.noted["summary_prompt_tokens"] = spent.prompt_tokens
        call.noted["summary_completion_tokens"] = spent.completion_tokens
        call.noted["cached_tokens"] = spent.cached_tokens
    return texts


def _job(
    call: OperationCall, policy: Policy, model: str, turns: list[Section], tokens: int, store_dir: str
) -> SummaryJob:
    """Build the job for one group.

    The caller wants a summary even if it saves nothing, so it is accepted at any size. The task asks for half of the
    group's tokens.
    """
    compress = policy.offload.compress
    window = call.services.known.window(call.tenant.namespace, policy, model)

    size = min(compress.snapshot_tokens, max(tokens // 2, LEAST))
    limit, reply = group_limits(replace(compress, group_token_threshold=0), window, size + SCRATCHPAD_TOKENS)

    async def ask(body: bytes) -> SummaryAnswer:
        return await _asked(call, policy, body)

    return SummaryJob(
        namespace=call.tenant.namespace,
        name="",
        tenant=call.tenant.name,
        model=model,
        dialect=CHAT.name,
        snapshot_tokens=size,
        replaced_tokens=sys.maxsize,
        store_dir=store_dir,
        timeout=policy.upstream.idle_timeout,
        group_tokens=limit,
        max_calls=compress.max_calls,
        riding=None,
        alone=lambda text: CHAT.summary_request(text, model, most=reply),
        history=lambda: turns,
        earlier="",
        originals=f"{store_dir}/",
        taken=list,
        references=dict,
        ask=ask,
        prices=policy.offload,
    )


async def _asked(call: OperationCall, policy: Policy, body: bytes) -> SummaryAnswer:
    """Make one summary call with the caller's own credentials, or with those that the tenant uses instead."""
    tenant = replace(call.tenant, policy=policy)
    request = call.services.relay.request(call.client, tenant, body)
    request = relay.rewritten(request, body, (*relay.ANOTHER, b"content-type"))
    headers = Headers((*request.headers, (b"content-type", b"application/json")))
    url = url_for(policy.upstream.base_url, TARGET)
    return await summary_writer.ask(call.services.upstream, replace(request, url=url, headers=headers), CHAT)
