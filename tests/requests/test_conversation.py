"""One turn driven over a scripted upstream: rounds, retries, faults on either side, and silence."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.chat.reply import ChatTurn
from proxy.dialects.turn import Turn
from proxy.errors import UpstreamBroken, UpstreamFault, UpstreamSilent, UpstreamUnreachable
from proxy.plan.plan import ToolCall
from proxy.requests import conversation, relay
from proxy.requests.versions import Refusal
from proxy.threads import SMALL
from proxy.tools.answer import ToolAnswer
from proxy.upstream.headers import Headers
from tests.asgi import ScriptedClient
from tests.clock import Clock, turns
from tests.dialects.chat.turns import (
    ANSWER,
    DONE,
    OURS,
    ROLE,
    SILENT,
    asked,
    called,
    calls,
    chunk,
    events,
    folded,
    read,
    stream,
    text,
    usage,
    whole,
)
from tests.dialects.messages import turns as messages
from tests.dialects.responses import turns as responses
from tests.dialects.turning import run
from tests.requests.scripted import JSON, STREAM, ScriptedReply, Step
from tests.wire_fuzz.honest import HEARTBEAT

OVERFLOW = b'{"error": {"message": "maximum context length is 8192 tokens", "code": "context_length_exceeded"}}'
BUSY = b'{\n  "error": {"message": "slow down"}\n}'


def refused(status: int, body: bytes = BUSY, *headers: tuple[bytes, bytes]) -> ScriptedReply:
    return ScriptedReply(body, status=status, headers=[JSON, *headers])


class Partner:
    """Sends to a script; answers each call with the same words, once `answering` is over."""

    def __init__(self, *replies: ScriptedReply | Exception) -> None:
        self.replies = list(replies)
        self.sent: list[Any] = []
        self.remembered: list[Turn] = []
        self.was_accepted = 0
        self.forgotten = 0
        self.own_fits, self.size = False, 0
        self.part = ""  # of the newest answer
        self.is_final: Callable[[Refusal], bool] = lambda refusal: False
        self.answering: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0)
        self.remembering: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0)

    async def send(self, body: bytes) -> Any:
        self.sent.append(json.loads(body))
        reply = self.replies[len(self.sent) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def on_accepted(self) -> None:
        self.was_accepted += 1

    async def resolve(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        await self.answering()
        others = [ToolAnswer("found", "ok", 1)] * (len(calls) - 1)
        return [*others, ToolAnswer("found", "ok", 1, self.part)]

    def forget_answers(self) -> None:
        self.forgotten += 1

    async def remember(self, turn: Turn) -> None:
        if turn.hidden is not None:
            await self.remembering()
            self.remembered.append(turn)

    def headers(self, turn: Turn) -> Headers:
        return [(b"x-offload-rounds", b"%d" % turn.rounds)]

    async def aside(self, work: Callable[[], bytes], size: float) -> bytes:
        return await asyncio.to_thread(work) if size > SMALL else work()

    @property
    def read(self) -> list[ScriptedReply]:
        return [
            reply for reply in self.replies[: len(self.sent)] if isinstance(reply, ScriptedReply)
        ]


class Bench:
    """A turn, its client, and what became of both."""

    def __init__(
        self,
        *replies: ScriptedReply | Exception,
        stream: bool = True,
        heartbeat: float = 3600,
        **members: Any,
    ) -> None:
        self.partner = Partner(*replies)
        self.turn: Turn = ChatTurn(asked(stream, **members))
        self.browser = ScriptedClient()
        self._heartbeat = heartbeat

    async def run(self) -> bytes:
        """What the client got."""
        await conversation.converse(
            self.turn, self.browser.client(), self.partner, heartbeat=self._heartbeat
        )
        assert self.browser.complete
        assert all(reply.closed for reply in self.partner.read)
        return self.browser.body

    def headers(self) -> dict[bytes, bytes]:
        return {name.lower(): value for name, value in self.browser.headers}


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept, without having done so."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def skip(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", skip)
    return slept


# -- replies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 10, 1 << 20])
async def test_streamed_turn_in_pieces_of_any_size(size: int) -> None:
    pieces = [[raw[at : at + size] for at in range(0, len(raw), size)] for raw in (OURS, ANSWER)]
    bench = Bench(*(ScriptedReply(*one) for one in pieces))
    out = await bench.run()
    assert out == run(ChatTurn(asked()), OURS, ANSWER)[0]
    assert [len(request["messages"]) for request in bench.partner.sent] == [1, 3]
    assert bench.browser.status == 200
    assert bench.headers()[b"content-type"].startswith(b"text/event-stream")
    assert bench.partner.remembered == [bench.turn]


async def test_a_request_is_accepted_with_the_first_event_of_its_reply() -> None:
    """A client that hangs up within the reply has been accepted, too."""
    later = asyncio.Event()
    reply = ScriptedReply(b": wait\n\n", stream(ROLE), later, ANSWER[len(stream(ROLE)) :])
    bench = Bench(reply)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(bench.run())
        await reply.reached.wait()
        assert (asked.done(), bench.partner.was_accepted) == (False, 1)
        later.set()
    assert bench.partner.was_accepted == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_round_of_many_calls_is_ended_and_answered_off_the_loop(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, number = threading.get_ident(), 300
    seen: dict[str, bool] = {}

    def noting(name: str, done: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            seen[name] = threading.get_ident() != loop
            return done(*args)

        return noted

    for name in ("end", "answer", "request"):
        monkeypatch.setattr(ChatTurn, name, noting(name, getattr(ChatTurn, name)))
    many = [
        called("grep", f'{{"pattern": "{one}"}}', f"call_{one}", index=one) for one in range(number)
    ]
    ended = [*(chunk(calls(one)) for one in many), chunk({}, "tool_calls"), DONE]
    first = stream(ROLE, *ended) if streamed else whole(calls(*many), "tool_calls")
    bench = Bench(ScriptedReply(first), ScriptedReply(ANSWER), stream=streamed)
    await bench.run()
    assert len(bench.partner.sent[1]["messages"]) == 2 + number
    assert seen == dict.fromkeys(("end", "answer", "request"), True)


async def test_reply_without_our_tools_keeps_its_bytes_and_headers() -> None:
    bench = Bench(
        ScriptedReply(
            whole({"content": "x"}),
            headers=[JSON, (b"X-Request-Id", b"7"), (b"Connection", b"close")],
        ),
        stream=False,
    )
    assert await bench.run() == whole({"content": "x"})
    assert bench.headers()[b"x-request-id"] == b"7" and b"connection" not in bench.headers()
    assert bench.partner.remembered == []


@pytest.mark.parametrize("kind", [STREAM, JSON])
async def test_compressed_reply_is_decompressed(kind: tuple[bytes, bytes]) -> None:
    body = ANSWER if kind is STREAM else whole({"content": "It is 42."})
    packed = gzip.compress(body)
    said = ScriptedReply(
        packed[:9],
        packed[9:],
        headers=[kind, (b"Content-Encoding", b"gzip"), (b"Content-Length", b"%d" % len(packed))],
    )
    bench = Bench(said, stream=kind is STREAM)
    out = await bench.run()
    assert text(folded(out) if kind is STREAM else read(out)) == "It is 42."
    assert b"content-encoding" not in bench.headers()
    assert bench.headers().get(b"content-length") == (None if kind is STREAM else b"%d" % len(out))


async def test_upstream_that_streams_unasked_or_does_not_when_asked() -> None:
    bench = Bench(ScriptedReply(SILENT), ScriptedReply(ANSWER), stream=False)
    assert text(folded(await bench.run())) == "It is 42."
    bench = Bench(
        ScriptedReply(whole(calls(called("grep")), "tool_calls")),
        ScriptedReply(whole({"content": "It is 42."})),
    )
    assert text(read(await bench.run())) == "It is 42."
    assert bench.headers()[b"content-type"] == JSON[1]


@pytest.mark.parametrize("headers", [[], [(b"content-type", b"text/plain")]])
async def test_request_decides_about_streaming_where_the_content_type_does_not(
    headers: Headers,
) -> None:
    assert (
        text(
            folded(
                await Bench(
                    ScriptedReply(SILENT, headers=headers), ScriptedReply(ANSWER, headers=headers)
                ).run()
            )
        )
        == "It is 42."
    )
    assert await Bench(ScriptedReply(b"<html>", headers=headers), stream=False).run() == b"<html>"


PAGE = b"<!DOCTYPE html>\r\n<title>Sign in</title>\n\ndata: none\n<p>Your session has ended"


async def test_a_gateways_page_in_the_place_of_a_stream_passes_byte_for_byte() -> None:
    page = (b"Content-Type", b"text/html; charset=utf-8")
    for at in range(1, len(PAGE), 7):
        bench = Bench(ScriptedReply(PAGE[:at], PAGE[at:], headers=[page]))
        assert await bench.run() == PAGE
        assert bench.browser.status == 200 and bench.headers()[b"content-type"] == page[1]


@pytest.mark.parametrize("name", [b"Content-Digest", b"Repr-Digest", b"Digest", b"Content-MD5"])
async def test_digests_of_upstreams_body_are_not_those_of_ours(name: bytes) -> None:
    bench = Bench(
        ScriptedReply(whole(calls(called("grep")), "tool_calls"), headers=[JSON, (name, b"x")]),
        ScriptedReply(whole({"content": "It is 42."}), headers=[JSON]),
        stream=False,
    )
    assert text(read(await bench.run())) == "It is 42."
    assert name.lower() not in bench.headers()


async def test_unterminated_last_event_is_terminated() -> None:
    bench = Bench(
        ScriptedReply(
            stream(ROLE, chunk({"content": "x"}), chunk({}, "stop")).removesuffix(b"\n\n")
        )
    )
    assert await bench.run() == stream(ROLE, chunk({"content": "x"}), chunk({}, "stop"))


async def test_connection_left_open_after_the_last_event_delays_nobody(clock: Clock) -> None:
    bench = Bench(
        ScriptedReply(OURS, asyncio.Event()), ScriptedReply(ANSWER, UpstreamBroken("reset"))
    )
    running = asyncio.create_task(bench.run())
    await clock.let_pass(1)
    assert text(folded(await running)) == "Let me look.\n\nIt is 42."


async def test_stream_is_read_to_its_end_after_the_last_event() -> None:
    reply = ScriptedReply(ANSWER, b": bye\n\n", b"\n")
    await Bench(reply).run()
    assert reply.read == 3


# -- one thing after another -----------------------------------------------------------------------


async def test_client_reply_ends_only_after_the_hidden_round_is_recorded() -> None:
    answered, kept, more = asyncio.Event(), asyncio.Event(), asyncio.Event()
    bench = Bench(
        ScriptedReply(stream(ROLE), more, OURS.removeprefix(stream(ROLE))), ScriptedReply(ANSWER)
    )
    bench.partner.answering, bench.partner.remembering = answered.wait, kept.wait
    task = asyncio.create_task(bench.run())
    await turns()
    assert bench.browser.body == stream(ROLE)
    more.set()
    await turns()
    assert text(folded(bench.browser.body)) == "Let me look." and len(bench.partner.sent) == 1
    answered.set()
    await turns()
    assert text(folded(bench.browser.body)) == "Let me look.\n\nIt is 42."
    assert folded(bench.browser.body)["finish"] is None and not bench.browser.complete
    kept.set()
    assert folded(await task)["finish"] == "stop"


@pytest.mark.parametrize(
    "where", ["upstream is silent", "a tool works", "upstream thinks", "the store is slow"]
)
async def test_silent_stream_gets_heartbeats_that_clients_count(where: str, clock: Clock) -> None:
    pause: tuple[Step, ...] = (60.0,)
    slow = pause if where == "upstream is silent" else ()
    bench = Bench(ScriptedReply(OURS[:200], *slow, OURS[200:]), ScriptedReply(ANSWER), heartbeat=10)
    if where == "a tool works":
        bench.partner.answering = lambda: asyncio.sleep(60)
    if where == "the store is slow":
        bench.partner.remembering = lambda: asyncio.sleep(60)
    if where == "upstream thinks":
        send = bench.partner.send

        async def slowly(body: bytes) -> Any:
            await asyncio.sleep(60)
            return await send(body)

        bench.partner.send = slowly  # type: ignore[method-assign]
    running = asyncio.create_task(bench.run())
    await clock.let_pass(120, steps=60)
    out = await running
    beats = HEARTBEAT.findall(out)
    assert len(beats) >= 5 and all(
        (b'"delta"' in beat) is (where != "the store is slow") for beat in beats
    )
    assert HEARTBEAT.sub(b"", out) == run(ChatTurn(asked()), OURS, ANSWER)[0]
    assert bench.browser.messages[0]["type"] == "http.response.start"


PING = b'event: ping\ndata: {"type": "ping"}\n\n'
EARLY = [chunk(prompt_filter_results=[]), chunk(prompt_filter_results=[])]


@pytest.mark.parametrize(
    ("turn", "idle", "beat"),
    [
        (messages.turn, PING, b'"stop_reason":null'),
        (messages.turn, b": hi\n\n", b'"stop_reason":null'),
        (lambda: ChatTurn(asked()), stream(*EARLY), b'"delta":{}'),
    ],
    ids=["pings", "comments", "events without a choice"],
)
async def test_what_clients_do_not_count_is_silence(
    turn: Callable[[], Turn], idle: bytes, beat: bytes, clock: Clock
) -> None:
    said = messages.stream(messages.message({"type": "text", "text": "It is 42."}))
    begin, end = (said if turn is messages.turn else ANSWER).split(b"\n\n", 1)
    bench = Bench(ScriptedReply(begin + b"\n\n", *[8.0, idle] * 8, end), heartbeat=10)
    bench.turn = turn()
    running = asyncio.create_task(bench.run())
    await clock.let_pass(80, steps=80)
    out = await running
    assert out.count(beat) - end.count(beat) >= 6


async def test_numbers_of_events_go_on_behind_heartbeats(clock: Clock) -> None:
    """Also where upstream's events come in pieces, and in a later round."""
    call = {"type": "function_call", "name": "grep", "arguments": '{"pattern": "x"}'}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "It is 42."}],
    }
    hides, answers = (
        responses.stream(responses.response(one, number=n)) for n, one in enumerate([call, said], 1)
    )
    waits = [
        piece for at in range(0, len(answers), 200) for piece in (answers[at : at + 200], 30.0)
    ]
    bench = Bench(
        ScriptedReply(hides[:700], 30.0, hides[700:]), ScriptedReply(*waits), heartbeat=10
    )
    bench.turn = responses.turn()
    bench.partner.answering = lambda: asyncio.sleep(60)
    running = asyncio.create_task(bench.run())
    await clock.let_pass(30 * len(waits), steps=15 * len(waits))
    out = await running
    found = [event for event in events(out) if event["type"] == "response.in_progress"]
    assert len(found) >= 20 and {event["response"]["id"] for event in found} == {"resp_1"}
    responses.accumulated(out)
    assert all("grep" not in json.dumps(event["response"]) for event in found)


async def test_slow_client_gets_no_heartbeat(clock: Clock) -> None:
    bench = Bench(ScriptedReply(ANSWER), heartbeat=10)
    send = bench.browser.send

    async def slowly(message: Any) -> None:
        await asyncio.sleep(60)
        await send(message)

    bench.browser.send = slowly  # type: ignore[method-assign]
    running = asyncio.create_task(bench.run())
    await clock.let_pass(600, steps=60)
    assert b"working" not in await running


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("status", [400, 429, 500, 302])
async def test_refusal_of_the_first_round_is_raised_whole(streamed: bool, status: int) -> None:
    bench = Bench(refused(status, BUSY, (b"Retry-After", b"7")), stream=streamed)
    with pytest.raises(Refusal) as caught:
        await bench.run()
    refusal = caught.value
    assert (refusal.status, refusal.body, refusal.headers) == (
        status,
        BUSY,
        [JSON, (b"Retry-After", b"7")],
    )
    assert bench.browser.messages == [] and len(bench.partner.sent) == 1
    assert all(reply.closed for reply in bench.partner.read)


UNREAD = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "grep", "input": "x"}}
UNUSABLE = [
    b"x" * (5 << 20),
    whole(calls(called("grep", "x" * (2 << 20))), "tool_calls"),
    whole(calls(UNREAD), "tool_calls"),
]


@pytest.mark.parametrize("reply", UNUSABLE)
async def test_unusable_reply_that_is_not_a_stream_is_broken(
    reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "WHOLE_LIMIT", 4 << 20)
    bench = Bench(ScriptedReply(reply, headers=[JSON]), stream=False)
    with pytest.raises(UpstreamBroken):
        await bench.run()
    assert bench.browser.messages == []


async def test_reply_that_cannot_be_written_back_is_broken() -> None:
    """Half a surrogate pair beside the character that stands for its escape, each in an event of
    its own."""
    blocks = [{"type": "text", "text": text} for text in ("\ud83d", "\x7fud83d")]
    reply = messages.stream(
        messages.message(*blocks, {"type": "tool_use", "name": "grep", "input": {}}), 100
    )
    bench = Bench(ScriptedReply(reply.replace(b"\\u007f", b"\x7f")))
    bench.turn = messages.turn()
    with pytest.raises(UpstreamBroken, match="cannot be used"):
        await bench.run()
    assert b"upstream_broken" in bench.browser.body


LATE: dict[str, tuple[Step, ...]] = {
    "breaks off": (stream(ROLE, chunk({"content": "x"})), UpstreamBroken("reset")),
    "breaks off within an event": (stream(ROLE), b'data: {"choi', UpstreamBroken("reset")),
    "falls silent": (stream(ROLE), UpstreamSilent("nothing for 300 s")),
    "stops within our call": (stream(ROLE, chunk(calls(called("grep", "{")))),),
    "arguments without end": (
        stream(ROLE),
        *[stream(chunk(calls(called("grep", "x" * 300_000))))] * 5,
    ),
    "a call of ours where none is read": (stream(ROLE), stream(chunk(calls(UNREAD)))),
    "an event without end": (stream(ROLE), *[b"x" * (1 << 18)] * 5),
}


@pytest.mark.parametrize("steps", LATE.values(), ids=LATE.keys())
async def test_stream_that_fails_ends_with_an_error_event(
    steps: tuple[Step, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "LIMIT", 1 << 20)
    bench = Bench(ScriptedReply(*steps))
    with pytest.raises(UpstreamFault) as caught:
        await bench.run()
    last = events(bench.browser.body)[-1]
    assert last == json.loads(caught.value.body())
    assert last["error"]["type"] == "upstream_error"
    assert DONE not in events(bench.browser.body) and bench.browser.complete
    assert bench.partner.remembered == []
    assert all(reply.closed for reply in bench.partner.read)


CALLING = stream(chunk(calls(called("grep", '{"pattern":"secret"}'))))


@pytest.mark.parametrize("end", range(8, len(CALLING), 7))
async def test_stream_that_ends_within_an_event_shows_nothing_of_it(end: int) -> None:
    bench = Bench(ScriptedReply(stream(ROLE, chunk({"content": "x"})), CALLING[:end]))
    with contextlib.suppress(UpstreamBroken):
        await bench.run()
    assert [
        event["choices"][0]["delta"] for event in events(bench.browser.body) if "choices" in event
    ] == [
        {"role": "assistant", "content": ""},
        {"content": "x"},
    ]


# -- later rounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble", [UpstreamUnreachable("no"), UpstreamBroken("reset"), 429, 500, 503]
)
async def test_follow_up_round_is_retried_after_passing_faults(
    trouble: Any, no_pauses: list[float]
) -> None:
    def again() -> ScriptedReply | Exception:
        return trouble if isinstance(trouble, Exception) else refused(trouble)

    bench = Bench(ScriptedReply(OURS), again(), again(), ScriptedReply(ANSWER))
    assert text(folded(await bench.run())) == "Let me look.\n\nIt is 42."
    assert bench.partner.sent[1] == bench.partner.sent[2] == bench.partner.sent[3]
    assert [pause for pause in no_pauses if pause < 60 and pause] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("said", "waited"),
    [
        (b"7", 7),
        (b"0.25", 0.25),
        (b"3600", 30),
        (b"soon", 0.5),
        (b"-1", 0.5),
        (b"nan", 0.5),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.5),
    ],
)
async def test_retry_after_decides_the_pause_before_a_retry(
    said: bytes, waited: float, no_pauses: list[float]
) -> None:
    bench = Bench(
        ScriptedReply(OURS), refused(429, BUSY, (b"retry-after", said)), ScriptedReply(ANSWER)
    )
    await bench.run()
    assert [pause for pause in no_pauses if pause < 60 and (pause or not waited)][:1] == [waited]


@pytest.mark.parametrize(
    ("trouble", "tries"),
    [
        (429, 3),
        (500, 3),
        (400, 1),
        (404, 1),
        (UpstreamUnreachable("no"), 3),
        (UpstreamSilent("no"), 1),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_follow_up_round_that_keeps_failing(
    trouble: Any, tries: int, streamed: bool, no_pauses: list[float]
) -> None:
    first = OURS if streamed else whole(calls(called("grep")), "tool_calls")
    again = [trouble if isinstance(trouble, Exception) else refused(trouble) for _ in range(tries)]
    bench = Bench(ScriptedReply(first), *again, stream=streamed)
    with pytest.raises(UpstreamFault if streamed else (Refusal, UpstreamFault)) as caught:
        await bench.run()
    assert len(bench.partner.sent) == 1 + tries
    if not streamed:
        assert bench.browser.messages == []
        assert isinstance(caught.value, Refusal) == isinstance(trouble, int)
    else:
        shown = json.loads(BUSY) if isinstance(trouble, int) else json.loads(trouble.body())
        assert events(bench.browser.body)[-1] == shown
    assert all(reply.closed for reply in bench.partner.read)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"error":null}', b'{"error":"\\ud800"}', b""])
async def test_refusal_without_a_readable_error_gets_ours(body: bytes) -> None:
    bench = Bench(ScriptedReply(OURS), refused(404, body))
    with pytest.raises(UpstreamFault):
        await bench.run()
    assert events(bench.browser.body)[-1]["error"]["code"] == "upstream_broken"


@pytest.mark.parametrize("packed", [True, False])
async def test_tool_answers_that_overflow_are_shortened(packed: bool) -> None:
    said = (
        refused(400, gzip.compress(OVERFLOW), (b"content-encoding", b"gzip"))
        if packed
        else refused(400, OVERFLOW)
    )
    bench = Bench(ScriptedReply(OURS), said, ScriptedReply(ANSWER))
    assert text(folded(await bench.run())) == "Let me look.\n\nIt is 42."
    assert [request["messages"][-1]["content"] for request in bench.partner.sent] == [
        "hi",
        "found",
        conversation.TOO_LONG,
    ]
    assert bench.partner.forgotten == 1, "each may fit alone"
    hidden = bench.turn.hidden
    assert hidden is not None and json.loads(hidden.before[-1])["content"] == conversation.TOO_LONG


async def test_an_image_that_upstream_does_not_take_leaves_a_line() -> None:
    """And the answer beside it stays."""
    two = calls(called("grep"), called("read_file", id="call_2", index=1))
    refusal = refused(400, b'{"error": {"message": "content must be a string"}}')
    answer = ScriptedReply(whole({"content": "It is 42."}))
    bench = Bench(ScriptedReply(whole(two, "tool_calls")), refusal, answer, stream=False)
    bench.partner.part = '{"type": "image"}'
    assert text(read(await bench.run())) == "It is 42."
    results = [message["content"] for message in bench.partner.sent[2]["messages"][-2:]]
    assert results == ["found", conversation.NOT_TAKEN]
    assert not bench.partner.forgotten, "it would be refused again"


async def test_answers_without_their_image_can_still_be_too_long() -> None:
    """Some upstreams look at the length last."""
    two = calls(called("grep"), called("read_file", id="call_2", index=1))
    image = refused(400, b'{"error": {"message": "content must be a string"}}')
    answer = ScriptedReply(whole({"content": "It is 42."}))
    first = ScriptedReply(whole(two, "tool_calls"))
    bench = Bench(first, image, refused(400, OVERFLOW), answer, stream=False)
    bench.partner.part = '{"type": "image"}'
    assert text(read(await bench.run())) == "It is 42."
    results = [message["content"] for message in bench.partner.sent[-1]["messages"][-2:]]
    assert results == [conversation.TOO_LONG] * 2 and bench.partner.forgotten


# -- refusals in the place of a reply, and the client's own request --------------------------------

ERROR = {"error": {"message": "this model does not support tools", "code": 400}}
KEEP_ALIVE = b": OPENROUTER PROCESSING\n\n"


@pytest.mark.parametrize(
    "reply",
    [
        [stream(ERROR, DONE)],
        [KEEP_ALIVE, KEEP_ALIVE, stream(ERROR), stream(DONE)],
        [stream(chunk({"content": ""}, "error", **ERROR), DONE)],
        [b"event: error\n" + stream(ERROR)],
        [stream(ERROR)[:-1]],
    ],
    ids=["first event", "after comments", "OpenRouter's chunk", "named event", "unterminated"],
)
async def test_error_in_the_first_event_is_a_refusal(reply: list[bytes]) -> None:
    bench = Bench(ScriptedReply(*reply))
    with pytest.raises(Refusal) as caught:
        await bench.run()
    assert bench.browser.messages == []
    assert json.loads(caught.value.error_body())["error"] == ERROR["error"]
    assert (caught.value.status, caught.value.body) == (200, b"".join(reply))


async def test_a_refusal_that_comes_at_once_with_a_call_of_ours_does_not_show_the_call() -> None:
    bench = Bench(ScriptedReply(stream(ROLE, chunk(calls(called("grep"))), ERROR)))
    with pytest.raises(Refusal) as caught:
        await bench.run()
    assert bench.browser.messages == []
    assert events(caught.value.body) == [ROLE, ERROR]


async def test_head_of_a_stream_waits_for_the_first_event_as_long_as_a_silence_may_last(
    clock: Clock,
) -> None:
    bench = Bench(ScriptedReply(KEEP_ALIVE, 60.0, ANSWER), heartbeat=10)
    running = asyncio.create_task(bench.run())
    await clock.let_pass(60)
    assert text(folded(await running)) == "It is 42."
    assert b"working" in bench.browser.messages[1]["body"]


async def test_no_heartbeat_takes_the_place_of_a_refusal(clock: Clock) -> None:
    just_before_it = 9.9
    bench = Bench(ScriptedReply(just_before_it, stream(ERROR), 60.0), heartbeat=10)
    running = asyncio.create_task(bench.run())
    await clock.let_pass(11, steps=110)
    with pytest.raises(Refusal):
        await running
    assert bench.browser.messages == []


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    "trouble", [refused(400), refused(422), refused(500), ScriptedReply(json.dumps(ERROR).encode())]
)
async def test_refused_later_round_ends_with_the_clients_own_request(
    streamed: bool, trouble: ScriptedReply, no_pauses: list[float]
) -> None:
    first = SILENT if streamed else whole(calls(called("grep")), "tool_calls", usage=usage(100, 10))
    again = [trouble] * (3 if trouble.status == 500 else 1)
    answer = ANSWER if streamed else whole({"content": "It is 42."}, usage=usage(150, 5))
    bench = Bench(ScriptedReply(first), *again, ScriptedReply(answer), stream=streamed)
    bench.partner.own_fits = True
    reply = await bench.run()
    assert text(folded(reply) if streamed else read(reply)) == "It is 42."
    assert [tool["function"]["name"] for tool in bench.partner.sent[-1]["tools"]] == ["search"]
    assert bench.partner.sent[-1]["messages"] == [{"role": "user", "content": "hi"}]
    assert bench.partner.remembered == [] and bench.turn.spent.completion == 15


@pytest.mark.parametrize(
    ("first", "fits", "last"),
    [(OURS, True, BUSY), (SILENT, False, BUSY), (SILENT, True, OVERFLOW)],
    ids=["text was shown", "does not fit", "is refused, too"],
)
async def test_refused_later_round_is_an_error_event_where_nothing_else_is_possible(
    first: bytes, fits: bool, last: bytes
) -> None:
    bench = Bench(ScriptedReply(first), refused(400), refused(422, OVERFLOW))
    bench.partner.own_fits = fits
    with pytest.raises(UpstreamFault):
        await bench.run()
    assert events(bench.browser.body)[-1] == json.loads(last)


@pytest.mark.parametrize(
    "last", [b"data: [DO", b"data: {", b'data: {"choices":[]', b"data:", b"data: x"]
)
async def test_half_an_event_at_the_end_of_a_hidden_round_is_discarded(last: bytes) -> None:
    """With the next round's first event behind it, it would be one that no client can read."""
    bench = Bench(
        ScriptedReply(OURS.removesuffix(b"data: [DONE]\n\n") + last), ScriptedReply(ANSWER)
    )
    out = await bench.run()
    assert text(folded(out)) == "Let me look.\n\nIt is 42."
    assert all(isinstance(event, dict) or event == DONE for event in events(out))
