"""Finds the files that a path means: by their names, and by whatever else a model may call them.

A model asks for a result by what it knows: the path of its own call, with or without our folder in
front, a part of it, the tool's name, or a phrase in which one of these stands, such as our own
`result of read_log /var/log/billing.log`. Paths are only names in a mapping of the request's own
files, so no spelling of a path reaches any other text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cached_property
from itertools import islice
from posixpath import normpath
from urllib.parse import unquote

from proxy.plan.preview import DIGITS, NAMELESS, RESULT_OF, Label, unescaped

MAX_NAMES = 20  # the most names of a phrase that are looked up
MAX_WORDS = 64  # the most words
LEAST_WORDS = 5  # characters. A shorter part of a phrase says too little.
# how many files an answer lists: the first of these numbers that its budget allows
LISTED = (20, 5, 0)

_WRAPPING = "\"'`<>()[]{},;@ \t\r\n"
_LINES = re.compile(
    r"(?:(?::\d+){1,2}(?:-\d+)?|#L\d+(?:-L?\d+)?|[ ,(\[]+lines? \d+(?: ?(?:-|to) ?\d+)?[)\]]*|\(\d+(?:-\d+)?\))$",
    re.I,
)
_DIGEST = re.compile(r"[-_.]([0-9a-f]{16,64}|(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{6,15})$")
"""A digest at the end of a name, which a model may have cut. A short one has letters and digits:
others are words, or dates as in `app.log.20260131`."""
_BREAKS = re.compile(r":?[\s\"'`<>()\[\]{},;=|]+")
_NAMED = re.compile(r"[/\\]|\.[A-Za-z]\w{0,9}$")  # what a path or a file's name has in it
_WORD = re.compile(r"[^\W_]+")


def below(path: str, paths: Iterable[str]) -> list[str]:
    """Return the files whose paths have these components in a row: a file that is named with or
    without the directories in front, or all files of a directory. An empty path, `.` and `/` mean
    all."""
    wanted = _bare(path)
    return [known for known in paths if not wanted or f"/{wanted}/" in f"/{_bare(known)}/"]


def fitting(glob: str, paths: Iterable[str], directory: str) -> list[str]:
    """Return the files whose name matches `glob`. A glob with a slash is matched against the path
    below `directory`."""
    fits = _matcher(_short(glob))
    return [path for path in paths if fits(relative(path, directory))]


def relative(path: str, directory: str) -> str:
    """Return `path` relative to `directory`, or in full if it is elsewhere; without a leading
    slash."""
    return _bare(path).removeprefix(_bare(directory) + "/")


def line_of(path: str) -> int:
    """Return the first line that a path names at its end, counted from 0; 0 if it names none."""
    lines = _LINES.search(path.strip(_WRAPPING))
    numbers = re.findall(r"\d{1,9}", lines[0]) if lines else []
    return max(int(numbers[0]) - 1, 0) if numbers else 0


class Index:
    """What all files of a request are called. Looking up a path takes time linear in the words of
    all files."""

    def __init__(self, paths: Iterable[str], labels: Mapping[str, Label], store_dir: str) -> None:
        self.paths = list(paths)
        self._labels = labels
        self.store_dir = store_dir

    def about(self, path: str) -> str:
        """Return what the file is, such as `result of read_log /var/log/billing.log`; empty if that
        is not known."""
        return self._labels.get(path, NAMELESS).about

    def title(self, path: str) -> str:
        about = self.about(path)
        return f"File: {relative(path, self.store_dir)}" + (f" ({about})" if about else "")

    def listings(self, text: str, paths: Sequence[str]) -> list[str]:
        """Return the text followed by a list of these files with what they are, in all lengths, the
        longest first."""
        named = [
            f"{path}: {about}" if (about := self.about(path)) else path
            for path in paths[: LISTED[0]]
        ]
        found = []
        for most in LISTED:
            more = [f"and {len(paths) - most} more"] if len(paths) > most else []
            listed = (
                "\n".join(["Files:", *named[:most], *more])
                if named[:most]
                else f"{len(paths)} files exist."
            )
            found.append(f"{text} {listed}")
        return found

    def fitting(self, glob: str, paths: Sequence[str]) -> list[str]:
        """Return those of `paths` whose name fits the glob, or else those whose calls named
        something that fits."""
        if own := fitting(glob, paths, self.store_dir):
            return own
        fits = _matcher(_short(glob).lower())
        return [path for path in paths if any(map(fits, self._call_words(path)))]

    def find(self, path: str) -> list[str]:
        """Return the files that `path` means, in the order of the history; none if nothing is
        called so. It may be several, each on a line of its own."""
        several = [line for line in path.splitlines()[:MAX_NAMES] if line.strip()]
        return self._all(map(self._find, several)) if len(several) > 1 else self._find(path)

    def _find(self, path: str) -> list[str]:
        for spelled in (path, _clean(path), _clean(unescaped(path))):
            if found := below(spelled, self.paths):
                return found
        # Several names in a phrase; a name that a call used; one name in a phrase, or else its
        # longest known part.
        names = [piece for piece in _BREAKS.split(path) if _NAMED.search(piece)][:MAX_NAMES]
        by_name = self._all(map(self._called, names))
        phrase = _words(path)
        found = (by_name if len(names) > 1 else []) or self._called(path) or by_name
        if not names and not found:
            found = self._longest(
                lambda text: len(text.replace(" ", "")) >= LEAST_WORDS and text in phrase
            )
        return found

    def _called(self, path: str) -> list[str]:
        """Return the files that a name means, from the surest likeness to the vaguest."""
        name = normpath(_clean(path).lower()).lstrip("/")
        name = name.removeprefix(f"{_bare(self.store_dir)}/")
        own = _DIGEST.search(name.removesuffix(".txt"))
        if own and (
            found := [path for path in self.paths if f".{own[1][:DIGITS]}" in path.lower()]
        ):
            return found
        short = _DIGEST.sub("", name.removesuffix(".txt"))
        words = _words(short)
        whole = _words(name)
        stem = _stem(short)
        if not words:
            return []
        return (
            self._whose(lambda text: text in (words, whole))
            or (self.fitting(name, self.paths) if "*" in name else [])
            or self._longest(lambda text: words.endswith(text) or text.endswith(words))
            or [
                path
                for path in self.paths
                if "." in name and stem in map(_stem, self._call_words(path))
            ]
            or self._whose(lambda text: words in text)
        )

    def _whose(self, fits: Callable[[str], bool]) -> list[str]:
        """Return the files that are called by something that fits."""
        return [path for path, texts in self._texts.items() if any(map(fits, texts))]

    def _longest(self, fits: Callable[[str], bool]) -> list[str]:
        """Return the files that are called by the texts with the most words that fit."""
        known = {text for texts in self._texts.values() for text in texts if fits(text)}
        most = max((text.count(" ") for text in known), default=0)
        chosen = {text for text in known if text.count(" ") == most}
        return [path for path, texts in self._texts.items() if texts & chosen]

    def _all(self, found: Iterable[Iterable[str]]) -> list[str]:
        """Return every path once, in the order of the history."""
        chosen = {path for paths in found for path in paths}
        return [path for path in self.paths if path in chosen] if chosen else []

    def _call_words(self, path: str) -> list[str]:
        """Return what a call said of its result, as paths in lower case, and the file's own name
        without the digest."""
        own = path.rpartition("/")[2].lower().removesuffix(".txt")
        return [
            _DIGEST.sub("", own),
            *(_clean(said).lower() for said in self._labels.get(path, NAMELESS).call_strings),
        ]

    @cached_property
    def _texts(self) -> dict[str, set[str]]:
        """What each file may be called, as words: with the tool in front and without."""
        found = {}
        for path in self.paths:
            label = self._labels.get(path, NAMELESS)
            tool = label.origin.removeprefix(RESULT_OF)
            said = (label.about, label.stem, *label.call_strings, *self._call_words(path))
            found[path] = {_words(text) for one in said for text in (one, f"{tool} {one}")} - {""}
        return found


def _bare(path: str) -> str:
    """Strip a path of what does not tell files apart: white space around it, `./`, and slashes at
    its ends."""
    bare = path.strip().removeprefix("./").strip("/")
    return "" if bare == "." else bare


def _clean(path: str) -> str:
    """Return a path without quotes around it, a `file://` in front and a number of a line behind,
    with slashes."""
    bare = path.strip(_WRAPPING)
    if bare.lower().startswith("file:"):
        bare = unquote(bare[5:]).removeprefix("//")
    return _LINES.sub("", bare).strip(_WRAPPING).replace("\\", "/")


def _stem(path: str) -> str:
    """Return the last component without its endings."""
    return path.rpartition("/")[2].partition(".")[0]


def _words(text: str) -> str:
    """Return the first words of a text, with a space around each; empty if it has none."""
    words = [match[0] for match in islice(_WORD.finditer(text.lower()), MAX_WORDS)]
    return f" {' '.join(words)} " if words else ""


def _short(glob: str) -> str:
    return glob.strip().removeprefix("./").removeprefix("**/")


def _matcher(glob: str) -> Callable[[str], bool]:
    """Return what tells whether a path fits the glob. `fnmatch` would keep 32,768 of the globs that
    callers send; `re` keeps 512."""
    whole = re.compile(translate(glob))
    if "/" in glob:
        return lambda path: whole.match(path) is not None
    return lambda path: whole.match(path.rpartition("/")[2]) is not None
