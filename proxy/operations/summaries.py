"""The summaries of one call. The tenant's upstream makes them in order, and each call includes the earlier ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from proxy.dialects.chat import CHAT
from proxy.errors import NoSummary, UpstreamSilent
from proxy.plan.summary import SCRATCHPAD_TOKENS, Section, SummaryAnswer
from proxy.requests import turn_io
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


async def made(
    call: OperationCall, policy: Policy, model: str, groups: Sequence[tuple[list[Section], int]], store_dir: str
) -> list[str]:
    """Return a summary for each group, which is given as its messages and their tokens. Raises UpstreamFault."""
    spent, texts = Spent(), list[str]()
    call.client.sent = time.perf_counter()
    try:
        for turns, tokens in groups:
            before = [Section(BEFORE, "\n\n".join(texts))] if texts else []
            job = _job(call, policy, model, [*before, *turns], tokens, store_dir)
            texts.append((await call.services.summaries.once(job, spent)).text)
    except Failed as error:
        raise NoSummary(f"No summary was made: {error}") from error
    except TimeoutError as error:
        seconds = policy.offload.compress.timeout
        raise UpstreamSilent(f"No summary was made: no answer within {seconds:g} seconds") from error
    finally:
        call.account.summary_prompt_tokens = spent.prompt_tokens
        call.account.summary_completion_tokens = spent.completion_tokens
        call.account.cached_tokens = spent.cached_tokens
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
        timeout=compress.timeout,
        group_tokens=limit,
        max_calls=compress.max_calls,
        riding=None,
        alone=lambda text: CHAT.summary_request(text, model, most=reply),
        history=lambda: turns,
        earlier="",
        originals=f"{store_dir}/",
        taken=list,
        references=dict,
        stored=None,
        ask=ask,
        prices=policy.offload,
    )


async def _asked(call: OperationCall, policy: Policy, body: bytes) -> SummaryAnswer:
    """Make one summary call with the caller's own credentials, or with those that the tenant uses instead."""
    tenant = replace(call.tenant, policy=policy)
    request = call.services.relay.request(call.client, tenant, body)
    request = turn_io.rewritten(request, body, (*turn_io.ANOTHER, b"content-type"))
    headers = Headers((*request.headers, (b"content-type", b"application/json")))
    url = url_for(policy.upstream.base_url, TARGET)
    return await turn_io.ask(call.services.upstream, replace(request, url=url, headers=headers), CHAT)
