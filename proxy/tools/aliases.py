"""Finds the files that a model means, whatever it calls them.

A model asks for a result by what it knows: the path of its own call, with or without our folder in front, a part of
it, the tool's name, a name that an earlier version gave, or a phrase in which one of these stands, such as our own
`result of read_log /var/log/billing.log`. All of these lead only to files of the index, which are the request's own, so
no spelling reaches any other text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from urllib.parse import unquote

import msgspec

from proxy.plan.labels import DIGITS, RESULT_OF, Label
from proxy.tools.search import below, fitting, named

Parts = tuple[str, ...]
"""The components of a path, in lower case."""

_WRAPPING = "\"'`<>()[]{},;@ \t\r\n"
_LINES = re.compile(
    r"(?:(?::\d+){1,2}(?:-\d+)?|#L\d+(?:-L?\d+)?|[ ,(\[]+lines? \d+(?: ?(?:-|to) ?\d+)?[)\]]*|\(\d+(?:-\d+)?\))$",
    re.I,
)
_DIGEST = re.compile(r"(.*?)[-_]([0-9a-f]{6,64})$")
_BREAKS = re.compile(r"[\s\"'`<>()\[\]{},;=|]+")
_NAMED = re.compile(r"[/\\]|\.[A-Za-z]\w{0,9}$")
"""What a path or a file's name has in it."""
_RUN = re.compile(r"[^\W_]+")

MAX_NAMES, MAX_RUN = 20, 64
"""The most names, and the most words, of a phrase that are looked up."""

LEAST_RUN = 5
"""Characters. A shorter part of a phrase says too little."""


class Meant(msgspec.Struct, frozen=True):
    """The files that a path means. `exact`: it is the path of a file or of our folder, and not just a word for it."""

    paths: Sequence[str]
    exact: bool


class Index:
    """What all files of a request are called. Looking up a path takes time linear in the words that are alike."""

    def __init__(self, paths: Iterable[str], labels: Mapping[str, Label], store_dir: str) -> None:
        self.paths = list(paths)
        self._labels = labels
        self._store_dir = store_dir

    def about(self, path: str) -> str:
        """Return what the file is, such as `result of read_log /var/log/billing.log`; empty if that is not known."""
        label = self._labels.get(path)
        return label.about if label else ""

    def find(self, path: str) -> Meant:
        """Return the files that `path` means, in the order of the history; none if nothing is called so. It may be
        several, each on a line of its own."""
        several = [line for line in path.splitlines()[:MAX_NAMES] if line.strip()]
        if len(several) < 2:
            return self._find(path)
        found = [self._find(one) for one in several]
        paths = self._in_order([path for meant in found for path in meant.paths])
        return Meant(paths, all(meant.exact for meant in found))

    def _find(self, path: str) -> Meant:
        for spelled in (path, _clean(path)):
            file = named(spelled, self.paths)
            found = [file] if file is not None else below(spelled, self.paths)
            if found:
                return Meant(found, exact=True)
        ways = [self._called, self._in_phrase]
        if len(_names_in(path)) > 1:
            ways.reverse()
        return Meant(next((found for way in ways if (found := way(path))), []), exact=False)

    def _called(self, path: str) -> list[str]:
        wanted = self._below_folder(_parts(path))
        return self._alike(wanted) if wanted else []

    def fitting(self, glob: str, paths: Sequence[str]) -> list[str]:
        """Return those of `paths` whose name fits the glob, or else those whose calls named something that fits."""
        own = fitting(glob, paths, self._store_dir)
        if own:
            return own
        wanted = glob.strip().removeprefix("./").removeprefix("**/").lower()
        return [path for path in paths if any(_fits(wanted, word) for word in self._words.get(path, ()))]

    # -- words --

    @cached_property
    def _words(self) -> dict[str, list[Parts]]:
        """The words for each file."""
        return {path: [parts for said in label.said if (parts := _parts(said))] for path, label in self._labels.items()}

    @cached_property
    def _by_last(self) -> dict[str, list[tuple[Parts, str]]]:
        """Words and their files, by the words' last components."""
        return self._posted(lambda parts: [parts[-1]])

    @cached_property
    def _by_any(self) -> dict[str, list[tuple[Parts, str]]]:
        """Words and their files, by all components but the last."""
        return self._posted(lambda parts: set(parts[:-1]))

    @cached_property
    def _by_bare(self) -> dict[str, list[tuple[Parts, str]]]:
        """Words and their files, by the last components without an ending."""
        return self._posted(lambda parts: [_bare(parts[-1])])

    @cached_property
    def _by_digest(self) -> dict[str, list[str]]:
        """Files by the digest of their text, as far as names have it."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for path in self.paths:
            if match := _digest(_parts(path)):
                found[match[2][:DIGITS]].append(path)
        return found

    def _posted(self, keys: Callable[[Parts], Iterable[str]]) -> dict[str, list[tuple[Parts, str]]]:
        posted: defaultdict[str, list[tuple[Parts, str]]] = defaultdict(list)
        for path, words in self._words.items():
            for parts in words:
                for key in keys(parts):
                    posted[key].append((parts, path))
        return posted

    @cached_property
    def _runs(self) -> dict[Parts, list[str]]:
        """Files by the words in each text that they are called by, with and without the tool in front."""
        found: defaultdict[Parts, list[str]] = defaultdict(list)
        for path, label in self._labels.items():
            tool = label.origin.removeprefix(RESULT_OF)
            for said in (label.about, label.stem, *label.said):
                for text in (said, f"{tool} {said}"):
                    found[_run(text)].append(path)
        return found

    # -- from the surest likeness to the vaguest --

    def _alike(self, wanted: Parts) -> list[str]:
        last = wanted[-1]
        if match := _digest(wanted):
            if found := self._by_digest.get(match[2][:DIGITS]):
                return found
            if last not in self._by_last:  # a call's id may look like one of our names
                last = match[1].removeprefix("tool_call_")  # names were once made of the call's id
                wanted = (*wanted[:-1], last)
        known = self._by_last.get(last, ())
        return (
            _files(path for parts, path in known if parts == wanted and len(parts) > 1)
            or _files(path for parts, path in known if len(parts) > 1 < len(wanted) and _ends_alike(parts, wanted))
            or _files(path for _, path in known)
            or (self._matching(wanted) if set("*?") & set(last) else [])
            or self._in_order([*self._in_directory(wanted), *self._named_alike(last)])
        )

    def _in_order(self, paths: Sequence[str]) -> list[str]:
        """Return every path once, in the order of the history."""
        found = set(paths)
        return [path for path in self.paths if path in found] if found else []

    def _in_directory(self, wanted: Parts) -> Iterator[str]:
        """Yield the files whose calls named something in this directory."""
        size = len(wanted)
        for parts, path in self._by_any.get(wanted[-1], ()):
            if any(parts[start : start + size] == wanted for start in range(len(parts) - size)):
                yield path

    def _matching(self, wanted: Parts) -> list[str]:
        glob = "/".join(wanted).removeprefix("**/")
        return [path for path in self.paths if any(_fits(glob, word) for word in self._words.get(path, ()))]

    def _named_alike(self, last: str) -> Iterator[str]:
        """Yield the files whose words or names have the same last component but for an ending or a digest."""
        bare = _bare(last)
        yield from (path for _, path in self._by_bare.get(bare, ()))
        for path in self.paths:
            match = _digest(_parts(path))
            if match and bare in (match[1], _bare(match[1])):
                yield path

    # -- phrases --

    def _in_phrase(self, phrase: str) -> list[str]:
        """Return the files that a phrase means: all of it, or else the names in it, or else a part of it."""
        run = _run(phrase)
        folder = _run(self._store_dir)
        if run[: len(folder)] == folder:
            run = run[len(folder) :]
        if found := self._runs.get(run) or self._runs.get(run[:-1] if run[-1:] == ("txt",) else run):
            return _files(found)
        names = _names_in(phrase)
        if own := [file for name in names if (file := named(name, self.paths)) is not None]:
            return self._in_order(own)
        if names:
            return self._in_order([path for name in names for path in self._called(name)])
        return self._in_order(self._part_of(run) or self._around(run))

    def _part_of(self, run: Parts) -> list[str]:
        """Return the files that the longest part of a phrase means. A tool's name is the last resort."""
        tools = {_run(label.origin.removeprefix(RESULT_OF)) for label in self._labels.values()}
        sizes = sorted({len(known) for known in self._runs if len(known) <= MAX_RUN}, reverse=True)
        parts = [run[start : start + size] for size in sizes for start in range(len(run) - size + 1)]
        known = [part for part in parts if part in self._runs and len("".join(part)) >= LEAST_RUN]
        return next((self._runs[part] for part in sorted(known, key=tools.__contains__)), [])

    def _around(self, run: Parts) -> list[str]:
        """Return the files whose calls have these words in a row."""
        wanted = f" {' '.join(run)} "
        if len(wanted) < LEAST_RUN + 2:
            return []
        return [path for known, paths in self._runs.items() if wanted in f" {' '.join(known)} " for path in paths]

    def _below_folder(self, parts: Parts) -> Parts:
        """Return the components without our folder in front."""
        folder = _parts(self._store_dir)
        return parts[len(folder) :] if parts[: len(folder)] == folder else parts


def _clean(path: str) -> str:
    """Return a path without quotes around it, a `file://` in front and a number of a line behind, with slashes."""
    bare = path.strip(_WRAPPING)
    if bare.lower().startswith("file:"):
        bare = unquote(bare[5:])
        bare = bare[2:] if bare.startswith("//") else bare
    return _LINES.sub("", bare).strip(_WRAPPING).replace("\\", "/")


def line_of(path: str) -> int:
    """Return the first line that a path names at its end, counted from 0; 0 if it names none."""
    named = _LINES.search(path.strip(_WRAPPING))
    numbers = re.findall(r"\d{1,9}", named[0]) if named else []
    return max(int(numbers[0]) - 1, 0) if numbers else 0


def _parts(path: str) -> Parts:
    found: list[str] = []
    for part in _clean(path).lower().split("/"):
        if part == "..":
            del found[-1:]
        elif part not in ("", "."):
            found.append(part)
    return tuple(found)


def _names_in(phrase: str) -> list[str]:
    """Return what looks like a path or a file's name in a text."""
    return [piece for piece in _BREAKS.split(phrase) if _NAMED.search(piece)][:MAX_NAMES]


def _run(text: str) -> Parts:
    """Return the first words of a text, whatever stands between them."""
    return tuple(match[0] for match in islice(_RUN.finditer(text.lower()), MAX_RUN))


def _digest(parts: Parts) -> re.Match[str] | None:
    """Match the last component of one of our names: what precedes the digest, and the digest."""
    return _DIGEST.fullmatch(parts[-1].removesuffix(".txt")) if parts else None


def _ends_alike(parts: Parts, wanted: Parts) -> bool:
    """Whether one of the two ends with all of the other."""
    size = min(len(parts), len(wanted))
    return parts[-size:] == wanted[-size:]


def _bare(last: str) -> str:
    """Return a name without the ending, or the two endings of something that was stored as `.txt`."""
    last = last.removesuffix(".txt")
    return last.rpartition(".")[0] or last


def _fits(glob: str, parts: Parts) -> bool:
    return fnmatchcase("/".join(parts) if "/" in glob else parts[-1], glob)


def _files(paths: Iterable[str]) -> list[str]:
    """Return every path once, in the given order."""
    return list(dict.fromkeys(paths))
