"""Is this reply the one that we saw, although its client has rewritten it before it sends it back?

Clients drop the text beside calls, strip thinking, keep only the first call, give calls new ids,
add defaulted arguments, render calls as text, or append the call that they made of the text. What
remains must be the same, and it must prove something: `call_0` does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import msgspec

from proxy.plan.plan import ToolCall
from proxy.rawjson import encodable

# tags around reasoning that some servers leave in the text
THINKING = ("think", "thinking", "thought", "reasoning")
MAX_ARGUMENTS = 256 << 10
MAX_TEXT = 64 << 10
"""Most characters of arguments that are parsed (larger ones are compared as they are written), and
of a text in which calls are looked for: clients render calls and not whole files."""
HIDDEN_BYTES = 700
"""Bytes that what a reply hid takes beside its entries."""
MAX_ID = 200
MAX_LABEL = 40
"""Most characters of an id that are looked at, and that a client writes before the calls that it
appends."""
MAX_CALLS = 32
MAX_LEAVES = 100
"""Most calls of a reply that is recognised, as each is compared with each, and most values of a
call that are looked for in a text. Models make a few calls at once."""

_CLOSING = re.compile(r"\A\s*</\w{1,40}>")
_QUOTED = re.compile(r"['\"](\w{1,20})['\"]\s*:")
_CALL_MEMBERS = {"name", "arguments"}
_DISTINCTIVE = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{8,}")
_RANDOM = re.compile(r"[A-Za-z0-9]+")
_RUN = re.compile(r"[A-Za-z0-9]{8,}|\d+")


class Visible(msgspec.Struct, frozen=True):
    """A reply as its client saw it, or as it sent it back."""

    text: str
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, text: str, calls: Iterable[ToolCall]) -> Visible:
        """Return the reply without halves of surrogate pairs, so that a record can hold it."""
        whole = (
            ToolCall(encodable(call.id), encodable(call.name), encodable(call.arguments))
            for call in calls
        )
        return cls(encodable(text), tuple(whole))


class Hidden(msgspec.Struct, frozen=True, dict=True):
    """What a reply hid from the client, to be put back into the client's next request. `before`
    goes in front of the reply that the client saw, and `after` directly follows it. `instead`
    replaces the reply where the model wrote another one than the client saw: a JSON array of its
    messages or items. None: it is as the client saw it."""

    before: tuple[bytes, ...]
    instead: bytes | None
    after: tuple[bytes, ...]
    # the tokens of each entry in `before` and `after`; empty as long as nobody counted
    sizes: tuple[int, ...] = ()
    api: str = ""  # the name of the dialect in which all of this is written
    model: str = ""  # the model that wrote it

    @property
    def tokens(self) -> int:
        """How many tokens putting it back adds."""
        return sum(self.sizes)

    @cached_property
    def shrunk(self) -> dict[Hashable, Hidden]:
        """What is put back once the answers have been used, as far as it was made: by the dialect,
        the least tokens and the names that it was made with."""
        return {}

    def size(self) -> int:
        """About how many bytes it takes, also shrunk."""
        entries = (*self.before, *self.after, self.instead or b"")
        return HIDDEN_BYTES + 2 * sum(map(len, entries))


def kept_calls(
    wrote: Iterable[ToolCall], answered: Container[str], sent: Iterable[ToolCall]
) -> bool:
    """Whether the client sent back its calls as the model `wrote` them, beside those that we
    `answered`, or without ids."""
    theirs = [call.id for call in wrote if call.id and call.id not in answered]
    return theirs == [call.id for call in sent if call.id]


class Reply(msgspec.Struct, frozen=True):
    """A reply in the history that a client sends, and what identifies it."""

    before: bytes  # the digest of the history before the reply
    link: bytes  # the digest of the history that ends with the reply
    visible: Callable[[], Visible]
    ids: tuple[str, ...] = ()  # the ids of its calls, where they have any
    marks: tuple[bytes, ...] = ()  # what marks these calls
    preceding: bytes = b""
    """What marks the last call before it; of a reply without calls, only one in the reply directly
    before it counts."""

    def anchors(self) -> list[bytes]:
        """Return digests of what hardly any other reply has, whatever its client made of the
        history before it: its calls, or else its text behind another one's call. A call whose id
        others have, too, counts with the call before it. All APIs have the same ones."""
        if not self.marks:
            said = plain(self.visible().text).replace(" ", "") if self.preceding else ""
            return [_digest("text", self.preceding.hex(), said)] if said else []
        found: list[bytes] = []
        before = self.preceding
        for id, mark in islice(zip(self.ids, self.marks, strict=True), MAX_CALLS):
            if unique(id):
                found.append(mark)
            elif before:
                found.append(_digest("behind", before.hex(), mark.hex()))
            before = mark
        return found


def mark(call: ToolCall, arguments: str) -> bytes:
    """Return the digest that marks a call: of its id, with the name and the canonical `arguments`
    where others may have the same id."""
    id = alphanumeric(call.id)
    return _digest("call", id) if unique(call.id) else _digest("call", id, call.name, arguments)


@lru_cache(20_000)
def unique(id: str) -> bool:
    """Whether a call's id is so random that no other call has it: `call_` with 24 letters and
    digits, or a UUID, and no number with zeros before it."""
    random = alphanumeric(id)
    return len(random) >= 20 and len(set(random)) >= 8 and any(map(str.isdigit, random))


def alphanumeric(id: str) -> str:
    """The letters and digits of an id: OpenClaw sends back nothing else of it."""
    return "".join(_RANDOM.findall(id[:MAX_ID]))


def contains(sent: Visible, seen: Visible) -> bool:
    """Whether a reply that shares an anchor with `seen` has a call of it, or else its text. Clients
    make one reply of several, and leave calls out."""
    if not sent.calls:
        return not seen.calls
    calls = {id: call for call in sent.calls if (id := alphanumeric(call.id))}
    shared = [(one, calls[id]) for one in seen.calls if (id := alphanumeric(one.id)) in calls]
    return any(one.name == other.name and _same_call(one, other) for one, other in shared)


def _digest(*words: str) -> bytes:
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).digest()[:16]


def resembles(seen: Visible, sent: Visible) -> bool:
    """Whether `sent` may be what a client made of the reply `seen`. Both have the same history
    before them."""
    if len(seen.calls) > MAX_CALLS:
        return False
    said = plain(seen.text)
    kept = plain(sent.text)
    # clients trim each part of a text, or join them by lines
    equal = said.replace(" ", "") == kept.replace(" ", "")
    same_text = bool(said) and equal
    if not sent.calls:
        return (
            same_text
            or (not seen.calls and _completed(said, kept))
            or any(_rendered(call, sent.text, said in kept) for call in seen.calls)
        )
    left = list(seen.calls)
    pairs = list[tuple[ToolCall, ToolCall]]()
    for call in sent.calls:
        likely = sorted(
            (one for one in left if one.name == call.name), key=lambda one: one.id != call.id
        )
        match = next((one for one in likely if _counterparts(one, call, same_text)), None)
        if match is None:
            return False
        left.remove(match)
        pairs.append((match, call))
    return (
        equal
        or not kept
        or all(one.id == other.id and _distinctive(one.id) for one, other in pairs)
    )


def plain(text: str) -> str:
    """Return the text without thinking, and with single spaces."""
    for tag in THINKING:
        closing = f"</{tag}>"
        if closing in text:
            *thought, rest = text.split(closing)
            # Some templates open the thinking themselves, and then nothing was said before it.
            opened = (piece.partition(f"<{tag}>") for piece in thought)
            text = " ".join([*(said if found else "" for said, found, _ in opened), rest])
    return " ".join(text.split())


def _completed(said: str, kept: str) -> bool:
    """Whether a client closed the tag at which the model had stopped, or appended the call that it
    made of the text."""
    if not said or not kept.startswith(said):
        return False
    added = _CLOSING.sub("", kept[len(said) :], count=1).strip()
    if not added:
        return True
    label, opening, calls = added.partition("[")
    labelled = not label or (len(label) <= MAX_LABEL and label.rstrip().endswith(":"))
    return (
        bool(opening)
        and labelled
        and calls.endswith("]")
        and _CALL_MEMBERS.issubset(_QUOTED.findall(calls))
    )


# -- calls -----------------------------------------------------------------------------------------


def _counterparts(seen: ToolCall, sent: ToolCall, same_text: bool) -> bool:
    """Whether a call with the same name may be the same call, perhaps with a new id. A second
    sample of the same history has other ids, too, but ids that look like those of the first."""
    if seen.id == sent.id:
        return _same_call(seen, sent)
    arguments = _given(seen.arguments)
    if arguments != _given(sent.arguments):
        return False
    return same_text or (bool(arguments) and _style(seen.id) != _style(sent.id))


def _same_call(seen: ToolCall, sent: ToolCall) -> bool:
    """Whether a call with the same id and name may be the same call, with defaulted arguments
    added."""
    before = _given(seen.arguments)
    after = _given(sent.arguments)
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return bool(before == after)
    if any(after[key] != before[key] for key in before.keys() & after.keys()):
        return False
    if _distinctive(seen.id):
        return True
    added = [after[key] for key in after.keys() - before.keys()]
    defaults = [
        not value or isinstance(value, int | float) or value == seen.name for value in added
    ]
    return before.keys() <= after.keys() and all(defaults)


def _distinctive(id: str) -> bool:
    """Whether nobody else has this id: it has a long run of letters and digits, unlike `call_0`."""
    return _DISTINCTIVE.search(id[:MAX_ID]) is not None


def _style(id: str) -> str:
    """What ids of one server have in common."""
    return _RUN.sub(
        lambda run: "0" if run[0].isdigit() and len(run[0]) < 8 else f"<{len(run[0])}>", id[:MAX_ID]
    )


def _given(text: str) -> Any:
    """Return arguments without members that are null: a client may leave them out, or write all
    that its types have."""
    if len(text) <= MAX_ARGUMENTS:
        try:
            return json.loads(text or "{}", object_hook=_without_nulls)
        except (ValueError, RecursionError):
            pass
    return text.strip()


def _without_nulls(members: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in members.items() if value is not None}


# -- calls that a client renders as text -----------------------------------------------------------


def _rendered(call: ToolCall, text: str, text_kept: bool) -> bool:
    """Whether the text names the call by its id, with its name and its arguments."""
    if not call.id or len(text) > MAX_TEXT or call.name not in text:
        return False
    if not any(f"{quote}{call.id}{quote}" in text for quote in "'\"`"):
        return False
    if not (text_kept or _distinctive(call.id)):
        return False
    for leaf in islice(_leaves(_given(call.arguments)), MAX_LEAVES):  # as Python or JSON write them
        if not any(
            form in text
            for form in (str(leaf), repr(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False))
        ):
            return False
    return True


def _leaves(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
        else:
            yield one
