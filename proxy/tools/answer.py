"""How `grep` and `read_file` answer from given texts.

Arguments come from a model. Whatever they are, they get an answer that fits its budget, and an
error says what to send instead. A path that names no file means whatever `find` makes of it; a
search that finds nothing where it was asked to look goes on everywhere else, and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

import msgspec

from proxy.plan import summary
from proxy.plan.preview import EARLIER, line_count
from proxy.tools import pages, search
from proxy.tools.definitions import DEFAULT_MATCHES, NAMES, Arguments, Names, brief
from proxy.tools.find import LISTED, Index, line_of
from proxy.tools.search import Files, Find, LineMatch, TooSlow

Result = Literal["ok", "empty", "refused", "budget"]

BUDGET_USED_UP = "budget used up: answer with what you have"
"""The only answer that is given even if it exceeds the budget."""
TOO_MANY = "not answered: at most {most} calls are answered at once; send this call again if it is still needed"
REPEATED = (
    "the same call was answered above in this turn: use that answer, or ask for something else"
)
NOTHING_MOVED = (
    "Nothing has been moved out of this conversation: all of it is in your context. Look there."
)
"""The answer where there are no files. A weak model takes anything like *no matches* for the answer
to its question."""
GONE = (
    '"{path}" is not of this conversation, and it is not among the texts that are kept of earlier ones. Look in your '
    "context, or get it again."
)
"""The answer where a request quotes a reference that leads nowhere: it has expired, was never kept,
or is another's."""
UNREAD = (
    '"{path}" is not of this conversation, and texts of earlier ones cannot be read at the moment.'
)
"""The same, where the store does not answer."""
UNSEARCHED = "[{number} older files were not searched: send the path of one to search it]\n"
UNREACHED = "[{number} files cannot be read at the moment, and were not searched]\n"
"""Stand before the answer to a search that leaves files out."""
ELSEWHERE = "Nothing has been moved out of this conversation, but it quotes texts of earlier ones. Send one of these:"
"""The answer where there are no files, and the request quotes names that a call does not send."""
MISSING = (
    'Nothing that was moved out of this conversation is called "{path}": look in your context, or use '
    "other tools."
)

MAX_MATCHES = 1_000
"""The most matches that are shown or counted: one pattern over one endless line must not keep a
thread for minutes."""
TOKENS_PER_MATCH = 20  # the first guess at the size of a match
LEAST_LINES = 30
LEAST_CHARS = 4_000
"""A call for less of a file gets so many lines, or as many of them as these characters hold. Weak
models ask for a line at a time until their rounds are used up."""


class ToolAnswer(msgspec.Struct, frozen=True):
    """The answer to the model. `result`: ok; empty, if there is nothing; refused, if the arguments
    are wrong; budget, if there is no room."""

    text: str
    result: Result
    tokens: int
    part: str = ""  # an image or a file that follows the text: the JSON of a part of a result

    @classmethod
    def of(cls, text: str, result: Result, count: Callable[[str], int]) -> ToolAnswer:
        return cls(text, result, count(text))


class Media(msgspec.Struct, frozen=True):
    """An image or a file that was moved."""

    about: str  # what it is: `image, image/png, 34 kB`
    tokens: int
    part: str  # it, as a part of a result; empty if results of this API hold none


class _Short(Exception):
    """An answer that gives a reason instead of content: the longest of these wordings that fits."""

    def __init__(self, *wordings: str, result: Result = "refused") -> None:
        super().__init__(wordings[0])
        self.wordings = wordings
        self.result = result


class Material(msgspec.Struct, frozen=True):
    """What an answer is made of, and the most tokens that it may have, as counted by `count`.
    `matcher` compiles a pattern; if it refuses one, it raises ValueError with a text."""

    files: Files
    index: Index
    budget: int
    count: Callable[[str], int]
    matcher: Callable[[str], Find]
    names: Names = NAMES
    left: int = 0  # the tokens that the turn may still read, for what cannot be read in parts
    media: Callable[[str], Media | None] = lambda path: None
    """Takes the path of a file, and returns the image or the file that it is; None for a text."""

    def fits(self, text: str) -> bool:
        return self.count(text) <= self.budget

    def less(self, text: str) -> Material:
        """Return the same for an answer that begins with `text`."""
        return (
            msgspec.structs.replace(self, budget=self.budget - self.count(text)) if text else self
        )


def answer(given: Arguments, material: Material) -> ToolAnswer:
    """Answer a call. Never raises because of anything that a model or a file's text may contain."""
    wordings: Iterable[str]
    result: Result = "ok"
    media: Media | None = None
    try:
        if given.fault:
            raise _Short(given.fault)
        material = material.less(given.note)
        if given.tool == "grep":
            wordings = _grep(given, material)
        else:
            wordings, media = _read(given, material)
    except _Short as short:
        wordings = short.wordings
        result = short.result
    text = next(filter(material.fits, wordings), None)
    if text is None:
        return ToolAnswer.of(BUDGET_USED_UP, "budget", material.count)
    answer = ToolAnswer.of(given.note + text, result, material.count)
    if media:
        return msgspec.structs.replace(answer, tokens=answer.tokens + media.tokens, part=media.part)
    return answer


def meaning(given: Arguments, index: Index) -> tuple[object, ...]:
    """Return what a call asks for, which is equal for calls that differ only in how they name the
    same files."""
    return msgspec.structs.replace(given, path="", note=""), *(
        index.find(given.path) or [given.path]
    )


def elsewhere(names: Sequence[str], store_dir: str) -> str:
    """Return the answer to a call that names none of the earlier conversations' texts which the
    request quotes."""
    return " ".join([ELSEWHERE, *(f"{store_dir}/{name}" for name in names[: LISTED[0]])])


# -- grep ------------------------------------------------------------------------------------------


class _Scope(msgspec.Struct, frozen=True):
    """Where a search looks: in `first`, and if nothing is there, in `rest`. `where` says so;
    `missing` says why it looks everywhere from the start."""

    first: Sequence[str]
    rest: Sequence[str] = ()
    where: str = "in everything that was moved"
    missing: str = ""


def _grep(given: Arguments, material: Material) -> Iterable[str]:
    files = material.files
    index = material.index
    try:
        find = _compiled(given.pattern, material)
        if not index.paths:
            raise _Short(NOTHING_MOVED, result="empty")
        scope = _scope(given, material)
        found = _found(files, scope.first, find)
        wider = not found and bool(scope.rest)
        if wider:
            found = _found(files, scope.rest, find)
    except TooSlow as error:
        read = f"or read the file in parts: {material.names[1]} takes offset and column"
        raise _Short(f"This pattern cannot be used: {error}, {read}.") from error
    # The one file that the call named is shown if it is short and has no match.
    named = scope.first[0] if len(scope.first) == 1 and not scope.missing else ""
    short = search.short(files, index, named) if named and (wider or not found) else ""
    if found:
        return _report(
            _heads(given.pattern, scope, found, wider, short, material),
            found,
            given.limit,
            material,
        )
    if scope.missing:
        none = f'Nothing that was moved out of this conversation has a match for pattern "{given.pattern}".'
        none = f"{none} {scope.missing}"
    else:
        nor = ", nor in anything else that was moved" if scope.rest else ""
        none = f'No matches for pattern "{given.pattern}" {scope.where}{nor}.'
    shown = [f"{none}\n{short}\n---"] if short else []
    raise _Short(*shown, *index.listings(none, index.paths), result="empty")


def _compiled(pattern: str, material: Material) -> Find:
    if not pattern:
        raise _Short(
            '"pattern" is missing or empty: send a regular expression, such as {"pattern": "error"}.'
        )
    try:
        return material.matcher(pattern)
    except TooSlow:
        raise
    except ValueError as error:
        raise _Short(
            f"This pattern cannot be used: {error}. The syntax is RE2's, without look-ahead, look-behind and"
            " back-references; put a backslash before ( [ { * + ? . | ^ $ \\ to search for the character itself."
        ) from error


def _scope(given: Arguments, material: Material) -> _Scope:
    """Return where these arguments of grep look."""
    index = material.index
    glob = given.glob
    path = given.path or index.store_dir
    paths = index.find(path)
    if not paths:
        return _Scope(index.paths, missing=MISSING.format(path=brief(path)))
    where = f'in path "{brief(path)}"' + (f' (filter: "{brief(glob)}")' if glob else "")
    if glob:
        paths = index.fitting(glob, paths)
        if not paths:
            return _Scope(
                index.paths, missing=f'No file in "{brief(path)}" fits the glob "{brief(glob)}".'
            )
    chosen = set(paths)
    return _Scope(paths, [path for path in index.paths if path not in chosen], where)


def _found(files: Files, paths: Sequence[str], find: Find) -> list[LineMatch]:
    """Return the first matches, up to one more than are counted."""
    return list(islice(search.matches(files, paths, find), MAX_MATCHES + 1))


def _total(found: Sequence[LineMatch]) -> str:
    return f"{MAX_MATCHES}+" if len(found) > MAX_MATCHES else str(len(found))


def _heads(
    pattern: str,
    scope: _Scope,
    found: Sequence[LineMatch],
    wider: bool,
    short: str,
    material: Material,
) -> list[str]:
    """Return the beginning of a report in all its lengths, longest first."""
    number = f"{_total(found)} {'match' if len(found) == 1 else 'matches'}"
    numbered = f"(line numbers are {material.names[1]}'s offset)"
    if not wider:
        return [
            f'{scope.missing} Found {number} for pattern "{pattern}" {scope.where} {numbered}:'.lstrip()
        ]
    none = f'No matches for pattern "{pattern}" {scope.where}.'
    elsewhere = f"Found {number} in everything else that was moved {numbered}:"
    return [*([f"{none}\n{short}\n---\n{elsewhere}"] if short else []), f"{none} {elsewhere}"]


def _report(
    heads: Sequence[str], found: Sequence[LineMatch], limit: int, material: Material
) -> Iterator[str]:
    """Yield reports, the most complete first: with the lines around few matches, then as many
    matches as fit."""
    files = material.files
    index = material.index
    limit = limit or DEFAULT_MATCHES
    if len(found) <= min(search.FEW, limit):
        yield from (search.report(files, index, head, found, around=True) for head in heads)
    most = min(limit, len(found), MAX_MATCHES)

    def report(shown: int) -> str:
        foot = ""
        if shown < len(found):
            more = "send a larger limit, or narrow" if shown == limit < MAX_MATCHES else "narrow"
            foot = f"[first {shown} of {_total(found)} matches; for the rest {more} the pattern, the path or the glob]"
        return search.report(files, index, heads[-1], found[:shown], foot=foot)

    guess = 1 + material.budget // TOKENS_PER_MATCH
    yield report(pages.largest(most, guess, lambda shown: material.fits(report(shown))))


# -- read_file -------------------------------------------------------------------------------------


def _read(given: Arguments, material: Material) -> tuple[list[str], Media | None]:
    path, head = _existing(given.path, material)
    if media := material.media(path):
        left = max(material.budget, material.left) - material.count(head)
        if not media.part:
            reason = (
                f"[{media.about}] cannot be shown again, because this API's results are only text."
            )
            raise _Short(reason, result="empty")
        if media.tokens > left:
            reason = f"[{media.about}] takes {media.tokens} tokens, and only {max(left, 0)} are left for it."
            raise _Short(reason, result="budget")
        return [f"{head}[{media.about}]"], media
    text = material.files[path]
    line = _pointed_at(given.path, text, bool(head)) if given.offset is None else given.offset
    span = pages.span(text, line, given.limit or sys.maxsize, given.column)
    if span is None:
        raise _Short(head + _past_end(text, line, given.column), result="empty")
    # A call for a few lines gets more.
    more = pages.span(text, line, LEAST_LINES, given.column)
    stop = min(more.stop, span.start + LEAST_CHARS) if more else span.stop
    if stop < len(text):
        stop = text.rfind("\n", span.start, stop) + 1
    span = msgspec.structs.replace(span, stop=max(span.stop, stop))
    call = f'{material.names[1]}(path="{path}"'

    def count(shown: str) -> int:
        return material.count(head + shown)

    page = pages.page(text, span, call, material.budget, count)
    return [head + page] if page else [], None


def _existing(path: str, material: Material) -> tuple[str, str]:
    """Return the file that read_file's argument means, and a line that names it if the argument
    does not."""
    index = material.index
    if not path:
        raise _Short(*index.listings('"path" is missing: send the path of a file.', index.paths))
    if not index.paths:
        raise _Short(NOTHING_MOVED, result="empty")
    meant = index.find(path)
    if not meant:
        raise _Short(*index.listings(MISSING.format(path=brief(path)), index.paths))
    if len(meant) > 1:
        several = f'"{brief(path)}" may mean {len(meant)} files: send the path of one of them.'
        raise _Short(*index.listings(several, meant))
    [file] = meant
    about = index.about(file)
    known = file.rpartition("/")[2] in path and about != EARLIER.about
    return file, "" if known else f"[this is {file}{about and f': {about}'}]\n"


def _pointed_at(path: str, text: str, inside: bool) -> int:
    """Return the line, counted from 0, where reading begins: the one that a path such as
    `settings.py:120` names, if the text has it. `inside`: the path is not the file's own; if
    originals have calls with it, the last of them."""
    if line := line_of(path):
        return line if line < line_count(text) else 0
    sections = f"\n{text}".split(summary.HEADER) if inside else []
    for place in range(len(sections) - 1, 0, -1):
        title, _, said = sections[place].partition("\n")
        if " calls " in title and f'"{path.strip()}"' in said:
            return summary.HEADER.join(sections[:place]).count("\n")
    return 0


def _past_end(text: str, line: int, column: int) -> str:
    """Explain, in a bracketed line like those of `pages`, why there is nothing to show."""
    lines = line_count(text)
    if not lines:
        return f"{pages.OURS} 0 of 0; the file is empty]"
    if line >= lines:
        return f"{pages.OURS} 0-{lines - 1} of {lines}; offset {line} is past the end]"
    return f"{pages.OURS} {line}-{line} of {lines}; column {column} is past the end of line {line}]"
