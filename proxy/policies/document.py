"""Reads YAML text as plain values, and records the line of each. The only module that uses yaml.

The text is parsed to nodes first, because only nodes have line numbers and show repeated keys. `${VAR}` is replaced
after parsing, in each value, so that a variable's content can never become structure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

from proxy.errors import PolicyError

Path = tuple[str | int, ...]
"""The path to a value: keys and 0-based indexes from the top."""

_REFERENCE = re.compile(r"\$\{([^}]*)\}?")
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


class Document(msgspec.Struct, frozen=True):
    """A parsed file: `value` in YAML's plain types, and in `lines` the 1-based line of each key and item."""

    name: str
    value: Any
    lines: Mapping[Path, int]

    def place(self, path: Path) -> str:
        """Return the file and line of `path` as `FILE:LINE`. A path that is not in the file gets its parent's line."""
        line = next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), 1)
        return f"{self.name}:{line}"

    def error(self, path: Path, text: str) -> PolicyError:
        """Return an error whose text begins with file, line and key."""
        return PolicyError(": ".join(filter(None, (self.place(path), spelled(path), text))))


def spelled(path: Path) -> str:
    """Return a path as people write it, such as `rules[0].offload.mode`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def read(text: str, name: str, environment: Mapping[str, str]) -> Document:
    """Parse one YAML text. `name` is the file's name in errors. Raises PolicyError if the text is bad."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            # A file is empty for a moment while it is being written. That must not count as a policy of defaults.
            raise PolicyError(f"{name}:1: the file is empty; a policy of defaults only is written {{}}")
        return _Reader(name, loader, environment).document(root)
    except yaml.MarkedYAMLError as error:
        raise _malformed(text, name, error) from error
    except yaml.YAMLError as error:
        raise PolicyError(f"{name}:1: not valid YAML: it has characters that are forbidden in YAML") from error
    except RecursionError as error:
        raise PolicyError(f"{name}:1: nested too deeply, or an alias contains itself") from error


def _malformed(text: str, name: str, error: yaml.MarkedYAMLError) -> PolicyError:
    at = error.problem_mark.line if error.problem_mark else 0
    # Between braces or brackets, YAML reads `${` as the start of a mapping, but its message does not say so.
    hint = "; write ${NAME} in quotes here" if "${" in "".join(text.splitlines()[at : at + 1]) else ""
    return PolicyError(f"{name}:{at + 1}: not valid YAML: {error.problem or error.context}{hint}")


class _Reader:
    def __init__(self, name: str, loader: yaml.SafeLoader, environment: Mapping[str, str]) -> None:
        self._name, self._loader, self._environment = name, loader, environment
        self._lines: dict[Path, int] = {}

    def document(self, root: yaml.Node) -> Document:
        return Document(self._name, self._value(root, ()), self._lines)

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, path, "a key must be plain text")
            place = (*path, key.value)
            if key.value in values:
                raise self._error(key, place, f"given twice, first on line {self._lines[place]}")
            self._lines[place] = key.start_mark.line + 1
            values[key.value] = self._value(value, place)
        return values

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
            # Besides its own errors, PyYAML raises Python's where a tag does not fit: `!!bool maybe`, `!!int ''`.
            raise self._error(node, path, "cannot be read as YAML; put it in quotes if it is text") from error
        return self._filled_in(value, node, path) if isinstance(value, str) else value

    def _filled_in(self, text: str, node: yaml.Node, path: Path) -> str:
        def variable(match: re.Match[str]) -> str:
            if not _VARIABLE.fullmatch(match[0]):
                raise self._error(node, path, "expected ${NAME} with the name of an environment variable")
            if match[1] not in self._environment:
                raise self._error(node, path, f"the environment variable {match[1]} is not set")
            return self._environment[match[1]]

        return _REFERENCE.sub(variable, text)

    def _error(self, node: yaml.Node, path: Path, text: str) -> PolicyError:
        return Document(self._name, None, {path: node.start_mark.line + 1}).error(path, text)
