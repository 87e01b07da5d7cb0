"""Finds the files that a path means: by their names, and by whatever else a model may call them.

A model asks for a result by what it knows: the path of its own call, with or without our folder in front, a part of
it, the tool's name, or a phrase in which one of these stands, such as our own `result of read_log
/var/log/billing.log`. Paths are only names in a mapping of the request's own files, so no spelling of a path reaches
any other text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from urllib.parse import unquote

import msgspec

from proxy.plan.preview import DIGITS, RESULT_OF, Label

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
_WORD = re.compile(r"[^\W_]+")

MAX_NAMES, MAX_WORDS = 20, 64
"""The most names, and the most words, of a phrase that are looked up."""

LEAST_WORDS = 5
"""Characters. A shorter part of a phrase says too little."""

# -- names --


def named(path: str, paths: Sequence[str]) -> str | None:
    """Return the one file that `path` names, or None.

    The path may lack slashes at its ends and leading directories, as long as exactly one file fits.
    """
    if path in paths:
        return path
    wanted = _bare(path)
    exact = [known for known in paths if _bare(known) == wanted]
    ending = [known for known in paths if _bare(known).endswith(f"/{wanted}")]
    return next((found[0] for found in (exact, ending) if len(found) == 1), None)


def below(directory: str, paths: Iterable[str]) -> list[str]:
    """Return the files in `directory` and its subdirectories, or all files if it is empty, `.` or `/`."""
    wanted = _bare(directory)
    return [known for known in paths if not wanted or f"/{wanted}/" in f"/{_bare(known)}"]


def fitting(glob: str, paths: Iterable[str], directory: str) -> list[str]:
    """Return the files whose name matches `glob`. A glob with a slash is matched against the path below `directory`."""
    glob = glob.strip().removeprefix("./").removeprefix("**/")
    return [path for path in paths if _fits(glob, tuple(relative(path, directory).split("/")))]


def relative(path: str, directory: str) -> str:
    """Return `path` relative to `directory`, or in full if it is elsewhere; without a leading slash."""
    return _bare(path).removeprefix(_bare(directory) + "/")


def line_of(path: str) -> int:
    """Return the first line that a path names at its end, counted from 0; 0 if it names none."""
    lines = _LINES.search(path.strip(_WRAPPING))
    numbers = re.findall(r"\d{1,9}", lines[0]) if lines else []
    return max(int(numbers[0]) - 1, 0) if numbers else 0


# -- words --


class Meant(msgspec.Struct, frozen=True):
    """The files that a path means. `exact`: it is the path of a file or of our folder, and not just a word for it."""

    paths: Sequence[str]
    exact: bool


class Index:
    """What all files of a request are called. Looking up a path takes time linear in the words of all files."""

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
        return Meant(self._all(meant.paths for meant in found), all(meant.exact for meant in found))

    def fitting(self, glob: str, paths: Sequence[str]) -> list[str]:
        """Return those of `paths` whose name fits the glob, or else those whose calls named something that fits."""
        if own := fitting(glob, paths, self._store_dir):
            return own
        wanted = glob.strip().removeprefix("./").removeprefix("**/").lower()
        return [path for path in paths if any(_fits(wanted, parts) for parts in self._said.get(path, ()))]

    def _find(self, path: str) -> Meant:
        for spelled in (path, _clean(path)):
            file = named(spelled, self.paths)
            if found := below(spelled, self.paths) if file is None else [file]:
                return Meant(found, exact=True)
        ways = [self._called, self._in_phrase]
        if len(_names_in(path)) > 1:
            ways.reverse()
        return Meant(next((found for way in ways if (found := way(path))), []), exact=False)

    def _all(self, found: Iterable[Iterable[str]]) -> list[str]:
        """Return every path once, in the order of the history."""
        chosen = {path for paths in found for path in paths}
        return [path for path in self.paths if path in chosen] if chosen else []

    @cached_property
    def _said(self) -> dict[str, list[Parts]]:
        """The paths by which each file may be called: what its call said, and its own name without the digest."""
        found = {}
        for path in self.paths:
            label, own = self._labels.get(path), _DIGEST.fullmatch(path.rpartition("/")[2].lower().removesuffix(".txt"))
            said = [*(label.said if label else ()), *([own[1]] if own else [])]
            found[path] = [parts for one in said if (parts := _parts(one))]
        return found

    @cached_property
    def _texts(self) -> dict[str, set[str]]:
        """The same as words, with the tool in front and without, and what we say of each file ourselves."""
        found = {}
        for path, label in self._labels.items():
            said = (label.about, label.stem, *label.said)
            found[path] = {_words(text) for one in said for text in (one, f"{_tool(label)} {one}")}
        return found

    # -- from the surest likeness to the vaguest --

    def _called(self, path: str) -> list[str]:
        wanted, folder = _parts(path), _parts(self._store_dir)
        wanted = wanted[len(folder) :] if wanted[: len(folder)] == folder else wanted
        if not wanted:
            return []
        last = wanted[-1]
        if match := _DIGEST.fullmatch(last.removesuffix(".txt")):
            if found := [path for path in self.paths if f"-{match[2][:DIGITS]}" in path.lower()]:
                return found
            if not self._whose(lambda parts: parts[-1] == last):  # a call's id may look like one of our names
                last = match[1]
                wanted = (*wanted[:-1], last)
        size, glob = len(wanted), "/".join(wanted).removeprefix("**/")
        return (
            self._whose(lambda parts: len(parts) > 1 and parts == wanted)
            or self._whose(lambda parts: len(parts) > 1 < size and _end_alike(parts, wanted))
            or self._whose(lambda parts: parts[-1] == last)
            or (self._whose(lambda parts: _fits(glob, parts)) if set("*?") & set(last) else [])
            or self._whose(lambda parts: _stem(parts[-1]) == _stem(last) or _is_below(parts, wanted))
        )

    def _whose(self, fits: Callable[[Parts], bool]) -> list[str]:
        """Return the files that are called by something that fits."""
        return [path for path, said in self._said.items() if any(map(fits, said))]

    def _in_phrase(self, phrase: str) -> list[str]:
        """Return the files that a phrase means: all of it, or else the names in it, or else a part of it."""
        words, folder = _words(phrase), _words(self._store_dir)
        words = words.removeprefix(folder.rstrip())
        if found := [path for path, texts in self._texts.items() if texts & {words, words.removesuffix("txt ")}]:
            return found
        names = _names_in(phrase)
        if own := [file for name in names if (file := named(name, self.paths)) is not None]:
            return self._all([own])
        if names:
            return self._all(map(self._called, names))
        tools = {_words(_tool(label)) for label in self._labels.values()}
        known = {text for texts in self._texts.values() for text in texts if text in words}
        known = {text for text in known if len(text.replace(" ", "")) >= LEAST_WORDS}
        if known:  # the longest part of the phrase; a tool's name is the last resort
            best = max(text.count(" ") for text in known - tools or known)
            chosen = {text for text in known - tools or known if text.count(" ") == best}
            return [path for path, texts in self._texts.items() if texts & chosen]
        if len(words) < LEAST_WORDS + 2:
            return []
        return [path for path, texts in self._texts.items() if any(words in text for text in texts)]


def _tool(label: Label) -> str:
    return label.origin.removeprefix(RESULT_OF)


def _bare(path: str) -> str:
    """Strip a path of what does not tell files apart: white space around it, `./`, and slashes at its ends."""
    bare = path.strip().removeprefix("./").strip("/")
    return "" if bare == "." else bare


def _clean(path: str) -> str:
    """Return a path without quotes around it, a `file://` in front and a number of a line behind, with slashes."""
    bare = path.strip(_WRAPPING)
    if bare.lower().startswith("file:"):
        bare = unquote(bare[5:]).removeprefix("//")
    return _LINES.sub("", bare).strip(_WRAPPING).replace("\\", "/")


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


def _words(text: str) -> str:
    """Return the first words of a text, whatever stands between them, with a space around each."""
    return " ".join(["", *(match[0] for match in islice(_WORD.finditer(text.lower()), MAX_WORDS)), ""])


def _end_alike(parts: Parts, wanted: Parts) -> bool:
    """Whether one of the two ends with all of the other."""
    size = min(len(parts), len(wanted))
    return parts[-size:] == wanted[-size:]


def _is_below(parts: Parts, wanted: Parts) -> bool:
    """Whether a path leads through this directory."""
    return any(parts[start : start + len(wanted)] == wanted for start in range(len(parts) - len(wanted)))


def _stem(last: str) -> str:
    """Return a name without the ending, or the two endings of something that was stored as `.txt`."""
    last = last.removesuffix(".txt")
    return last.rpartition(".")[0] or last


def _fits(glob: str, parts: Parts) -> bool:
    return fnmatchcase("/".join(parts) if "/" in glob else parts[-1], glob)
