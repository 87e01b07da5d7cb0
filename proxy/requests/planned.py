"""A request's history with its plan, and the request as that plan has it sent, with the records
that exist."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice, takewhile

import msgspec
from msgspec.structs import replace

from proxy.dialects import Dialect, Entry, entries, render
from proxy.dialects.render import ActiveSnapshot, Files, moved_files
from proxy.dialects.turn import Turn
from proxy.plan import compacting, summary
from proxy.plan.forecast import is_answer, worth_whole
from proxy.plan.history import History, Irregular, Terms, Transcript, extend
from proxy.plan.plan import (
    WINDOW_MARGIN,
    Cause,
    OffloadEvent,
    Plan,
    Reading,
    Role,
    Room,
    SummaryBoundary,
    ToolCall,
    live,
)
from proxy.plan.preview import has_place, names_in
from proxy.plan.prices import cache_lifetime
from proxy.plan.recognise import Hidden, Reply, Visible
from proxy.plan.texts import misses_file
from proxy.plan.turn import Request
from proxy.policy import ArchiveUse, Inject, Mode, Policy, SnapshotRole
from proxy.requests.cache import MessageCache
from proxy.tools.definitions import OTHER_NAMES, definitions

Pauses = Callable[["Planned"], Awaitable[Mapping[bytes, int]]]
"""Returns, by the digests of `Planned.points`, at which requests upstream's cache had expired, and
after how many seconds."""

MISREAD = "\n\n[{path} is no file of this tool's: {read_file} reads it, and {grep} searches it.]"
"""The line behind such a result."""

OUR_TOOLS_TOKENS = 225
"""Tokens of the definitions of our two tools, reserved whenever we may have to send them. A test
counts them."""


class Planned(msgspec.Struct, frozen=True, dict=True):
    """A request's history and its plan. `policy` is the policy for the request's model."""

    dialect: Dialect
    request: Request
    policy: Policy
    history: History
    plan: Plan
    room: Room
    names: tuple[str, str]
    relearned: bool = False
    """Whether it was planned again because upstream refused it as too long."""
    quoted: frozenset[str] = frozenset()
    """The full names of moved texts that the request quotes. They may be of the caller's earlier
    conversations."""
    role: SnapshotRole = SnapshotRole.AUTO
    restores: bool = False
    """Whether nothing moves, and only hidden rounds return to their places."""
    strict: bool = False
    """Whether our tools are strict, because upstream takes no others beside the client's."""

    @property
    def reading(self) -> Reading:
        return Reading.of(self.policy.offload, self.room.window, self.policy.upstream.members)

    @cached_property
    def transcript(self) -> Transcript:
        """The history together with the bytes of its entries."""
        return self.history.transcript(self.request.entries)

    @cached_property
    def unknown(self) -> str:
        """The path of the first thing in the history that nobody here knows; empty if everything is
        known."""
        if Irregular.SEALED not in self.history.irregular:
            return ""
        return next((message.sealed for message in self.history.messages if message.sealed), "")

    @cached_property
    def misread(self) -> Mapping[int, str]:
        """The results of the client's own tools that say nothing is there because the model gave
        them a reference of ours: by their indexes, the name that it gave."""
        if not self.quoted or self.policy.tools.inject is Inject.NEVER:
            return {}
        found = dict[int, str]()
        given = dict[str, str]()
        for index, message in enumerate(self.history.messages):
            raw = self.transcript.raws[index]
            if message.role is Role.ASSISTANT and message.names:
                for call in self.dialect.reply_parts(raw)[1]:
                    names = names_in(call.arguments.encode("utf-8", "replace"))
                    given[call.id] = min(names, default="")
            name = given.get(message.answers) if message.role is Role.TOOL else None
            if not name or message.sealed or any(piece.media for piece in message.pieces):
                continue
            if misses_file([text for _, text in self.dialect.texts(raw)]):
                found[index] = name
        return found

    def points(self, first: int = 0) -> dict[bytes, int]:
        """Return the places from `first` on at which the client made a request, this one last, by
        the digests of the history there."""
        places = takewhile(lambda point: point >= first, self._points())
        return {self.history.point_digest(point): point for point in [*places][::-1]}

    @cached_property
    def last_point_digests(self) -> list[bytes]:
        """The digests of the history at this request and the one before it, if there was one."""
        return [self.history.point_digest(point) for point in islice(self._points(), 2)][::-1]

    def _points(self) -> Iterator[int]:
        """Yield the places in the history where the client asked, the newest first."""
        items = self.history.items
        if items and items[-1].role is not Role.ASSISTANT:
            yield len(items)
        for index in range(self.history.fold.messages.unanswered - 1, 0, -1):
            if is_answer(items, index):
                yield index

    @cached_property
    def cache_lifetime(self) -> int | None:
        """The seconds for which upstream keeps in its cache what nobody reads; None if that is not
        known."""
        marks = (value for _, value in self.history.breakpoints)
        said = b"".join([self.request.aside, *marks])
        return cache_lifetime(self.policy.upstream.base_url, self.request.model, said)

    @cached_property
    def among_strict(self) -> bool:
        """Whether all of the client's tools are strict."""
        return self.dialect.requests.all_strict(self.request.tools)

    @cached_property
    def may_change(self) -> bool:
        """Whether the request may have to be changed."""
        return self.restores or (self._changes and not self.whole_for_tool_choice)

    def unmoved(self) -> Planned:
        """Return the request with a plan by which only hidden rounds return to their places."""
        return replace(self, plan=replace(self.plan, moves={}, boundaries=()), restores=True)

    @cached_property
    def whole_for_tool_choice(self) -> bool:
        """Whether it is sent whole, because the model may not read what was moved, and everything
        fits."""
        return self.request.forbids_ours and self._changes and self.room.holds(self.history.tokens)

    @property
    def _changes(self) -> bool:
        return self.policy.tools.inject is Inject.ALWAYS or not self.plan.empty or self.recalls

    @property
    def recalls(self) -> bool:
        """Whether the model gets our tools because the request quotes a moved text, whoever's it
        turns out to be."""
        return bool(self.quoted) and self.policy.tools.inject is Inject.WHEN_OFFLOADING

    @cached_property
    def summary_asked(self) -> int | None:
        """The place of the user's last message if it asks for a summary of a conversation that has
        moved results."""
        if self.plan.empty:
            return None
        messages = self.history.messages
        last = next(
            (at for at in range(len(messages) - 1, -1, -1) if messages[at].role is not Role.SYSTEM),
            0,
        )
        if not messages or self.history.items[last].role is not Role.USER:
            return None
        texts = (text for _, text in self.dialect.texts(self.transcript.raws[last]))
        return last if compacting.asks_for_summary(texts) else None

    @cached_property
    def whole_for_summary(self) -> bool:
        """Whether the history is sent whole so that its summary lacks nothing: that fits, and costs
        little more."""
        if self.summary_asked is None or not self.room.holds(self.history.tokens):
            return False
        return worth_whole(
            self.history.items, self.plan, self.policy, self.before_history, OUR_TOOLS_TOKENS
        )

    def cut(self) -> Planned:
        """Return the request with a plan by which a snapshot replaces all of its history."""
        plan = self.plan
        end = len(self.history)
        events = (*plan.events, OffloadEvent(end, end, Cause.ASKED, plan.standing.total))
        boundaries = (*plan.boundaries, SummaryBoundary(end, frozenset(), len(events)))
        return replace(self, plan=replace(plan, events=events, boundaries=boundaries, waited=0))

    @cached_property
    def asked_again(self) -> bool:
        """Whether this request is of the share of those that the plan changes that are asked again,
        to compare what follows. Of the same request the answer is always the same."""
        share = self.policy.offload.verify
        drawn = share and int.from_bytes(hashlib.sha256(b"verify" + self.chain[-1]).digest()[:8])
        return drawn < share * 2**64 and not self.unrepeatable

    @cached_property
    def unrepeatable(self) -> str:
        """Why the request is not asked again to compare what follows; empty if it can be."""
        if self.plan.empty:
            return "the plan changes nothing"
        if self.dialect.counts:
            return "no model replies to it"
        if self.whole_for_summary:
            return "it is sent whole, as it asks for a summary"
        if self.request.continues:
            return "it goes on from a reply that upstream keeps"
        if self.request.credit:
            return "it repeats one that another model refused"
        if self.dialect.requests.upstream_runs(self.request):
            return "upstream runs tools of its own for it"
        if not self.room.holds(self.history.tokens):
            return "its whole history does not fit the context window"
        return ""

    @property
    def chain(self) -> list[bytes]:
        """The digests of the history: entry *i* identifies the meaning of the first *i*
        messages."""
        return self.history.links

    @property
    def before_history(self) -> int:
        """The tokens of the prompt before the history: the client's tools and instructions."""
        return self.room.aside - self.room.reply - OUR_TOOLS_TOKENS + self.room.preamble

    @property
    def tokens_before(self) -> int:
        """The tokens of the whole prompt as the client sent it."""
        return self.before_history + self.history.tokens

    def reply_left(self, tokens: int) -> int | None:
        """Return the tokens left for the reply beside `tokens` of messages, None if the window is
        not known."""
        return None if self.room.window is None else self.room.left(tokens) + self.room.reply

    def reply_limit(self, tokens: int) -> int | None:
        """Return the limit of the reply beside `tokens` of messages; None if the client's own fits
        or there is none."""
        left = self.reply_left(tokens)
        if left is None or self.request.reply_tokens <= left:
            return None
        return self.dialect.reply_limit(self.request, left)

    def exceeds(self, *, refused: bool) -> bool:
        """Whether upstream would refuse the request as it came for its length, or probably, if it
        has just done so."""
        window = self.room.window
        if window is None or not self.request.reply_tokens:
            return False
        share = 1 - WINDOW_MARGIN if refused else 1
        return self.tokens_before + self.request.reply_tokens > int(window * share)

    def replies(self, first: int = 0) -> dict[int, Reply]:
        """Return the replies that may have hidden rounds, from this index on, by their indexes."""

        def visible(index: int) -> Visible:
            return Visible.of(*self.dialect.reply_parts(self.transcript.raws[index]))

        chain = self.chain
        found = dict[int, Reply]()
        newest, last = self._marks_before(first)
        for index, message in enumerate(islice(self.transcript.messages, first, None), first):
            if message.role is Role.ASSISTANT:
                before = chain[index]
                link = chain[index + 1]
                marks = message.marks
                ids = tuple(id for id, _ in message.calls if id)
                preceding = last if marks else newest
                found[index] = Reply(before, link, partial(visible, index), ids, marks, preceding)
                newest = marks[-1] if marks else b""
                last = newest or last
        return found

    def coming(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        """Return the reply that follows this history, with the text and the calls that the client
        sees."""
        before = self.chain[-1]
        marks = entries.marks(calls)
        link = extend(before, self.dialect.reply_meaning(text, calls))
        ids = tuple(call.id for call in calls if call.id)
        newest, last = self._marks_before(len(self.history))
        preceding = last if marks else newest
        return Reply(before, link, lambda: Visible.of(text, calls), ids, marks, preceding)

    def _marks_before(self, end: int) -> tuple[bytes, bytes]:
        """Return what marks the last call of the reply before this index, and the last one of all
        replies before it; empty if there is none."""
        messages = self.transcript.messages
        before = (messages[index] for index in range(end - 1, -1, -1))
        marks = (message.marks for message in before if message.role is Role.ASSISTANT)
        newest = next(marks, ())
        last = newest or next(filter(None, marks), ())
        return (newest[-1] if newest else b""), (last[-1] if last else b"")

    def befores(self) -> set[bytes]:
        """Return what the history before the coming reply may be in a later request: with the
        system messages at its end, or without them, because some clients add a reminder to each
        request and keep none."""
        end = len(self.transcript.messages)
        while end and self.transcript.messages[end - 1].role is Role.SYSTEM:
            end -= 1
        return {self.chain[-1], self.chain[end]}

    def snapshot_name(self, boundary: SummaryBoundary) -> str:
        """Return the name of the boundary's record: its history's meaning, our prompt's version,
        and the model."""
        made = f"{summary.PROMPT_VERSION}\n{self.summary_model}".encode("utf-8", "surrogatepass")
        variant = hashlib.sha256(made).hexdigest()[:8]
        return f"{self.chain[boundary.end].hex()}-{variant}"

    def originals_path(self, boundary: SummaryBoundary) -> str:
        return f"{self.policy.offload.store_dir}/{summary.file_name(self.chain[boundary.end])}"

    @property
    def summary_model(self) -> str:
        return self.policy.offload.compress.model or self.request.model


async def plan(
    dialect: Dialect,
    request: Request,
    policy: Policy,
    window: int | None,
    reader: MessageCache,
    caller: str = "",
    *,
    refused: bool = False,
    pauses: Pauses | None = None,
) -> Planned | None:
    """Read the history and plan for a window of so many of our tokens. Returns None if the request
    must not be changed. `refused`: whether upstream has refused this request as too long. Raises
    Unplannable."""
    names = request.names
    if (
        policy.offload.mode is Mode.OFF
        or names is None
        or request.obstacle_beside(policy.upstream.members)
    ):
        return None
    if policy.offload.results and not request.has_tools:
        # the client's own tools stand in its prompt, where their names cannot be seen
        names = OTHER_NAMES
        request = replace(request, names=names)
    policy = policy.for_request(has_tools=request.has_tools, unsent=request.unsent)
    defined = await reader.tool_tokens(request.tools, request.model, caller)
    before = await reader.tool_tokens(request.preamble, request.model, caller)
    reply = policy.upstream.reply_room(window)
    room = Room(window, defined + reply + OUR_TOOLS_TOKENS, reply, before)
    tool_definition_tokens = (
        OUR_TOOLS_TOKENS if policy.tools.inject is Inject.WHEN_OFFLOADING else 0
    )
    harmless = policy.upstream.members
    terms = Terms(request.model, policy.offload, room, tool_definition_tokens, harmless=harmless)

    def planned(history: History) -> Planned:
        quotes = history.has_place or has_place(request.aside, policy.offload.store_dir)
        quoted = named(history, request) if quotes else frozenset[str]()
        plan = history.plan()
        planned = Planned(
            dialect, request, policy, history, plan, room, names, refused and not plan.empty, quoted
        )
        # here in a thread, because a history may be long
        _ = planned.whole_for_summary, planned.last_point_digests
        return planned

    read = partial(reader.history, dialect, request, caller=caller)
    found, made = await read(terms, then=planned)
    # more or earlier, if upstream's cache has expired meanwhile
    moved = found.plan.moves or found.plan.standing.old
    may_pause = moved and policy.offload.cached_read and found.cache_lifetime
    if pauses is not None and may_pause and (expired := await pauses(found)):
        paused = replace(terms, pauses=tuple(expired.items()))
        found, _ = await read(paused, made=made, then=planned)
    return found


def named(history: History, request: Request) -> frozenset[str]:
    """Return what looks like the full names of moved texts in a request."""
    return history.names | names_in(request.aside)


class Rendered(msgspec.Struct, frozen=True):
    """A request ready to send. `plan` is the part of the history's plan that it shows."""

    planned: Planned
    plan: Plan
    shown: ActiveSnapshot | None
    rounds: Mapping[int, Hidden]
    """The hidden rounds as they are sent, by the index of the reply that hid them."""
    entries: list[Entry]
    tokens: int
    """The tokens of the entries as sent."""
    found: Mapping[int, Hidden]
    """The hidden rounds that have records, whether or not there is room for them."""
    altered: Mapping[int, Entry] = {}
    """The client's entries that are sent otherwise than they came, as they are sent."""

    @classmethod
    def of(
        cls,
        planned: Planned,
        shown: ActiveSnapshot | None,
        rounds: Mapping[int, Hidden],
        reader: MessageCache,
        plan: Plan | None = None,
    ) -> Rendered:
        """Render the plan with the records that exist. `plan` replaces the part of the plan that
        they allow."""
        dialect = planned.dialect
        transcript = planned.transcript
        plan = plan or planned.plan.shown(shown.boundary if shown else None)
        boundary, start = (shown.boundary, shown.boundary.end) if shown else (None, 0)
        sent = sent_rounds(planned, plan, rounds)
        previews = reader.previews(dialect, transcript, planned.reading.shape)
        altered = render.altered(dialect, transcript, plan, previews, boundary, planned.request)
        altered = corrected(planned, altered, start)
        entries = render.render(dialect, transcript, altered, shown=shown, rounds=sent)
        altered |= {
            at: hidden.instead
            for at, hidden in sent.items()
            if hidden.instead is not None and at >= start
        }
        asked = planned.summary_asked
        if asked is not None and asked >= start and planned.policy.tools.inject is not Inject.NEVER:
            last = asked - len(planned.history)
            part, text = dialect.texts(entries[last])[-1]
            hinted = {part: text + compacting.hint(planned.names[1])}
            altered[asked] = entries[last] = dialect.replace(entries[last], hinted)
        tokens = sum(hidden.tokens for index, hidden in sent.items() if index >= start)
        if shown:
            tokens += reader.count(render.shown_block(transcript, shown), planned.request.model)
        items = planned.history.items
        moves = plan.moves
        tokens += sum(
            [live(items[at], moves.get(at)) for at in render.staying(transcript, boundary)]
        )
        return Rendered(planned, plan, shown, sent, entries, tokens, rounds, altered)

    @property
    def changed(self) -> bool:
        """Whether the request differs from what the client sent."""
        return self.injecting or not self.plan.empty or bool(self.rounds)

    @property
    def injecting(self) -> bool:
        """Whether our tools are added. Hidden rounds alone are a reason: an event that was shown
        while the request was too large may be waiting again, and the history still has the calls of
        our tools from that time."""
        inject = self.planned.policy.tools.inject
        offloading = not self.plan.empty or bool(self.rounds) or self.planned.recalls
        return inject is Inject.ALWAYS or (inject is Inject.WHEN_OFFLOADING and offloading)

    @property
    def moves_name(self) -> str:
        """A name for all files together, which identifies the history up to the last one and the
        set of texts."""
        moves = self.plan.moves
        end = self.shown.boundary.end if self.shown else 0
        last = max(max(moves, default=-1) + 1, end)
        return (
            f"{self.planned.chain[last].hex()}-{len(self.plan.events)}-{end}-{hash(tuple(moves)):x}"
        )

    def turn(self, usage: bool = True) -> Turn:
        """Return the turn that sends this request, and asks for its `usage`."""
        planned = self.planned
        definitions = our_definitions(planned) if self.injecting else []
        left = planned.reply_left(self.tokens)
        rounds = planned.policy.tools.max_rounds
        return planned.dialect.turn(planned.request, self.entries, definitions, rounds, usage, left)

    def files(self) -> Files:
        """Return the files that our tools can read, those of a waiting event included: it may have
        been shown."""
        planned = self.planned
        boundary = self.shown.boundary if self.shown else None
        store_dir = planned.policy.offload.store_dir
        return moved_files(
            planned.dialect, planned.transcript, planned.plan, store_dir, boundary, planned.chain
        )

    def originals(self) -> dict[str, Callable[[], str]]:
        """Return functions that return the moved texts and the originals behind snapshots, by their
        files' names."""
        files = self.files()
        return {path.rpartition("/")[2]: partial(files.read, path) for path in files}

    def fitting(self, reader: MessageCache) -> Rendered:
        """Return the request without the hidden rounds that do not fit the window. The oldest are
        left out first.

        Each time that one more is left out, the prefix breaks near its beginning. So they leave in
        a few large groups, of more than half of all tokens but the newest round's. The newest is
        left out only if it does not fit itself.
        """
        planned = self.planned
        rounds = dict(self.found)
        start = self.shown.boundary.end if self.shown else 0
        sizes = [
            (index, hidden.tokens if index >= start else 0)
            for index, hidden in sorted(self.rounds.items())
        ]
        excess = -planned.room.left(self.tokens)
        group = 1 << max(sum(size for _, size in sizes[:-1]).bit_length() - 1, 0)
        freed = 0
        enough = -(-excess // group) * group
        for index, size in sizes:
            if freed >= (excess if index == sizes[-1][0] else enough):
                break
            freed += size
            alone = planned.dialect.alone([rounds.pop(index)], planned.transcript.raws[index])
            if alone is not None:
                rounds[index] = Hidden((), alone, ())
        return replace(
            Rendered.of(planned, self.shown, rounds, reader, self.plan), found=self.found
        )

    def _staying(self) -> Sequence[int]:
        return render.staying(self.planned.transcript, self.shown.boundary if self.shown else None)

    def compressed(self) -> int:
        """Return how many entries the snapshot replaces."""
        return len(self.planned.history) - len(self._staying())

    def compacted(self) -> int:
        """Return how many entries are sent with previews."""
        moves = self.plan.moves
        return sum([at in moves for at in self._staying()])


def corrected(planned: Planned, altered: Mapping[int, Entry], start: int) -> dict[int, Entry]:
    """Return the altered entries with those behind which a line says which tool of ours reads the
    reference that the model gave to another one. What has moved says so itself."""
    found = dict(altered)
    grep, read_file = planned.names
    for index, name in planned.misread.items():
        if index < start or index in altered:
            continue
        raw = planned.transcript.raws[index]
        part, text = planned.dialect.texts(raw)[-1]
        path = f"{planned.policy.offload.store_dir}/{name}"
        line = MISREAD.format(path=path, read_file=read_file, grep=grep)
        found[index] = planned.dialect.replace(raw, {part: text + line})
    return found


def sent_rounds(planned: Planned, plan: Plan, rounds: Mapping[int, Hidden]) -> dict[int, Hidden]:
    """Return the hidden rounds as they are sent: long answers that were used are pointers."""
    least = planned.policy.offload.max_tool_message_tokens
    return render.sent_rounds(
        planned.dialect, planned.transcript, plan, rounds, least, planned.names
    )


def our_definitions(planned: Planned) -> list[bytes]:
    """Return the definitions of our tools, as the request's API has them."""
    others = planned.policy.tools.archive is ArchiveUse.SEARCH
    folder = planned.policy.offload.store_dir
    return definitions(planned.names, folder, others=others, strict=planned.strict)
