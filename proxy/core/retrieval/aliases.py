"""Finds the files that a model means, whatever it calls them.

A model asks for a result by what it knows: the path of its own call, with or without our folder in front, a part of
it, the tool's name, or a name that an earlier version gave. All of these lead only to files of the index, which are the
request's own, so no spelling reaches any other text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from urllib.parse import unquote

import msgspec

from proxy.core.labels import DIGITS, Label
from proxy.core.retrieval.search import below, fitting, named

Parts = tuple[str, ...]
"""The components of a path, in lower case."""

_WRAPPING = "\"'`<>()[]{},; \t\r\n"
_LINES = re.compile(
    r"(?:(?::\d+){1,2}(?:-\d+)?|#L\d+(?:-L?\d+)?|[ ,(\[]+lines? \d+(?: ?(?:-|to) ?\d+)?[)\]]*|\(\d+(?:-\d+)?\))$",
    re.I,
)
_DIGEST = re.compile(r"(.*?)[-_]([0-9a-f]{6,64})$")


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
        """Return the files that `path` means, in the order of the history; none if nothing is called so."""
        for spelled in (path, _clean(path)):
            file = named(spelled, self.paths)
            found = [file] if file is not None else below(spelled, self.paths)
            if found:
                return Meant(found, exact=True)
        wanted = self._below_folder(_parts(path))
        return Meant(self._alike(wanted) if wanted else [], exact=False)

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

    # -- from the surest likeness to the vaguest --

    def _alike(self, wanted: Parts) -> list[str]:
        last = wanted[-1]
        if match := _digest(wanted):
            if found := self._by_digest.get(match[2][:DIGITS]):
                return found
            last = match[1].removeprefix("tool_call_")  # names were once made of the call's id
            wanted = (*wanted[:-1], last)
        known = self._by_last.get(last, ())
        return (
            _files(path for parts, path in known if parts == wanted)
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


def _parts(path: str) -> Parts:
    found: list[str] = []
    for part in _clean(path).lower().split("/"):
        if part == "..":
            del found[-1:]
        elif part not in ("", "."):
            found.append(part)
    return tuple(found)


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
