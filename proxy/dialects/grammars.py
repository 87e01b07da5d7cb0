"""Calls that a model wrote as text, because the server that runs it did not parse them.

`GRAMMARS` lists how models write a call; a new one is one row. Around calls and between them stand
*marks*: the tags and special tokens of chat templates, brackets and white space. `read` reads a run
of calls from a place in a text on.

A run is only what is nothing else to the text's end: what an agent quotes and goes on after stays
text.
"""

from __future__ import annotations

# ruff: noqa: RUF001 - DeepSeek's tokens have wide bars
import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from proxy.dialects.reply import ToolNames

LONGEST = 64 << 10
"""Most characters of a run of calls. A search pattern and a path take a few hundred."""
NAMELESS = 400
"""Most characters of a call before its name. More are not held back, because they are no call."""

UNREADABLE = (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError)
"""What Python's own readers of JSON and of literals raise: a model may write anything."""

Read = Callable[[str, int], tuple[dict[str, Any], int]]
"""Reads arguments from a place on, and returns them and the place behind them. Raises Unfinished if
more of the text is needed, and one of `UNREADABLE` if they are none."""


class Unfinished(ValueError):
    """The text ends before it is known what it is."""


class Written(NamedTuple):
    """A call in a text: from where to where it stands, the name as it was written, and its
    arguments."""

    begins: int
    ends: int
    name: str
    arguments: dict[str, Any]


# -- arguments -------------------------------------------------------------------------------------

_decoder = json.JSONDecoder(strict=False)  # models write line breaks into strings as they are


def _json(text: str, at: int) -> tuple[Any, int]:
    """Decode a value. Raises Unfinished or one of `UNREADABLE`."""
    try:
        return _decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated") or error.pos >= len(text) - 8:
            raise Unfinished(error.msg) from error
        raise


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    value, at = _json(text, at)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value, at


def _pairs(pair: str, ends: str) -> Read:
    """Return a reader of arguments that are pairs of tags, each with a name and a value, up to
    `ends`."""
    found = re.compile(rf"\s*{pair}", re.DOTALL)
    end = re.compile(rf"\s*{ends}")

    def read(text: str, at: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        while match := found.match(text, at):
            value = match["value"]
            at = match.end()
            value = value.removeprefix("\n").removesuffix("\n")
            typed = match.groupdict().get("string") == "false"
            values[match["key"].strip()] = json.loads(value) if typed else value
        if closing := end.match(text, at):
            return values, closing.end()
        rest = text[at:].lstrip()
        if rest and not rest.startswith("<"):
            raise ValueError("no arguments")
        raise Unfinished("pairs")

    return read


_NAMED_PARAMETER = (
    r'<(?:[\w｜]+[:｜])?parameter\s+name="(?P<key>[^"\n]+)"(?:\s+string="(?P<string>true|false)")?\s*>'
    r"(?P<value>.*?)</(?:[\w｜]+[:｜])?parameter>"
)
_GLM_PAIR = r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"


def _keywords(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Read the keyword arguments of a call in Python, behind its opening parenthesis."""
    depth = 1
    quote = ""
    place = at
    while depth:
        if place >= len(text):
            raise Unfinished("keywords")
        sign = text[place]
        if quote:
            place += sign == "\\"
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            if sign == "(" and place > at and text[place - 1].isidentifier():
                raise ValueError("a call within a call")
            depth += (sign in "([{") - (sign in ")]}")
        place += 1
    call = ast.parse(f"f({text[at:place]}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no keywords")
    values = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
    json.dumps(values)  # raises if they cannot be a call's arguments
    return values, place


_QUOTED = '<|"|>'
_GEMMA = "<|tool_call>"
_BARE_KEY = re.compile(r"([{,]\s*)([\w-]+)\s*:")


def _quoted(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Read an object whose keys have no quotes, and whose strings have those of Gemma 4."""
    made = ""
    place = at
    depth = 0
    while place < len(text):
        if text.startswith(_QUOTED, place):
            end = text.find(_QUOTED, place + len(_QUOTED))
            if end < 0:
                raise Unfinished("a string")
            made += json.dumps(text[place + len(_QUOTED) : end])
            place = end + len(_QUOTED)
            continue
        if text.startswith(_GEMMA, place):
            raise ValueError("a call within a call")
        depth += (text[place] in "{[") - (text[place] in "}]")
        made += text[place]
        place += 1
        if depth == 0:
            value = json.loads(_BARE_KEY.sub(r'\1"\2":', made))
            if not isinstance(value, dict):
                raise ValueError("no object")
            return value, place
    raise Unfinished("an object")


# -- the table -------------------------------------------------------------------------------------

_VLLM = "https://github.com/vllm-project/vllm/blob/main/vllm/tool_parsers/"
_SGLANG = "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/function_call/"

_NAMESPACES = ("", "minimax:", "antml:", "steptml:", "｜DSML｜")
"""What stands before the names of tags."""


class Grammar(NamedTuple):
    """How a kind of model writes a call: what stands up to its arguments, and how to read these.

    In `begins`, a space stands for white space or none, `{name}` for the tool's name, `{id}` for a
    word, `{some}` for words and tokens, and `{=x}` for `x`, which already belongs to the arguments.
    """

    models: str
    source: str
    begins: str
    arguments: Read
    ends: str = ""
    """What follows the arguments, if it is there: servers cut off the token with which a model
    stops."""


def _invoked(namespace: str) -> Grammar:
    ends = f"</{namespace}invoke>"
    return Grammar(
        "MiniMax M2, DeepSeek V3.2, Step 3",
        f"{_VLLM}minimax_m2_tool_parser.py, {_VLLM}deepseekv32_tool_parser.py, {_VLLM}step3_tool_parser.py",
        f'<{namespace}invoke name="{{name}}">',
        _pairs(_NAMED_PARAMETER, ends),
    )


GRAMMARS = (
    Grammar(
        "Qwen3-Coder, Seed OSS",
        f"{_VLLM}qwen3coder_tool_parser.py, {_VLLM}seed_oss_tool_parser.py",
        "<function={name}>",
        _pairs(r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>", "</function>"),
    ),
    Grammar(
        "Llama 3", f"{_SGLANG}llama32_detector.py", "<function={name}> {={}", _object, "</function>"
    ),
    *map(_invoked, _NAMESPACES),
    Grammar(
        "GLM",
        f"{_VLLM}glm4_moe_tool_parser.py",
        "<tool_call> {name} {=<}",
        _pairs(_GLM_PAIR, "</tool_call>"),
    ),
    Grammar(
        "Kimi K2",
        f"{_SGLANG}kimik2_detector.py",
        "<|tool_call_begin|> {name} <|tool_call_argument_begin|> ",
        _object,
        "<|tool_call_end|>",
    ),
    Grammar(
        "DeepSeek V3, R1",
        f"{_VLLM}deepseekv3_tool_parser.py",
        "<｜tool▁call▁begin｜> function <｜tool▁sep｜> {name} ```json ",
        _object,
        "``` <｜tool▁call▁end｜>",
    ),
    Grammar(
        "DeepSeek V3.1",
        f"{_VLLM}deepseekv31_tool_parser.py",
        "<｜tool▁call▁begin｜> {name} <｜tool▁sep｜> ",
        _object,
        "<｜tool▁call▁end｜>",
    ),
    Grammar("Mistral", f"{_VLLM}mistral_tool_parser.py", "[TOOL_CALLS] {name} {={}", _object),
    Grammar("Mistral", f"{_VLLM}mistral_tool_parser.py", "[TOOL_CALLS] {name} [ARGS] ", _object),
    Grammar(
        "Mistral",
        f"{_VLLM}mistral_tool_parser.py",
        "[TOOL_CALLS] {name} [CALL_ID] {id} [ARGS] ",
        _object,
    ),
    Grammar(
        "gpt-oss (harmony)",
        f"{_SGLANG}gpt_oss_detector.py",
        "<|channel|>{some}to={name}{some}<|message|> ",
        _object,
        "<|call|>",
    ),
    Grammar(
        "gpt-oss (harmony)",
        f"{_SGLANG}gpt_oss_detector.py",
        "<|start|>{some}to={name}{some}<|message|> ",
        _object,
        "<|call|>",
    ),
    Grammar(
        "Gemma 4",
        f"{_SGLANG}gemma4_detector.py",
        "<|tool_call>call:{name} {={}",
        _quoted,
        "<tool_call|>",
    ),
    Grammar(
        "Llama 4, LFM2, Olmo 3, Gemma 3",
        f"{_VLLM}llama4_pythonic_tool_parser.py, {_VLLM}olmo3_tool_parser.py",
        "{name}(",
        _keywords,
    ),
)
"""Besides these, a call may be a JSON object with a name and arguments: Hermes, Qwen, Llama,
Mistral, Granite and many others. Source:
https://github.com/vllm-project/vllm/blob/main/vllm/tool_parsers/hermes_tool_parser.py"""

_TAGS = ("tool_call", "tool_calls", "function_call", "function_calls", "tools", "TOOLCALL")
_PREFIXES = (*_NAMESPACES, "seed:", "longcat_")
_TAG = rf"(?:{'|'.join(map(re.escape, _PREFIXES))})(?:{'|'.join(_TAGS)})"
_MARKS = re.compile(
    r"\s+|\[/?TOOL_CALLS\]|[\[\],;]"
    r"|<\|[\w/▁ ]{1,40}\|>|<｜[\w▁ ]{1,40}｜>"
    rf"|</?{_TAG}>|<\|{_TAG}>|<{_TAG}\|>"
    r"|</(?:function|[\w｜:]*invoke)>"
)
"""What stands around calls: the tags and the tokens of chat templates, and what separates the
elements of a list."""
_PART_OF_TOKEN = re.compile(r"<(?:\|[\w/▁ ]{0,40}\|?|｜[\w▁ ]{0,40}｜?)")
_FENCE = re.compile(r"```\w*(?=\s|$)")
_PART_OF_FENCE = re.compile(r"`{1,3}\w*")
_WORDS = (
    *(f"<{prefix}{tag}>" for prefix in _PREFIXES for tag in _TAGS),
    *(f"</{prefix}{tag}>" for prefix in _PREFIXES for tag in _TAGS),
    *(f"</{prefix}invoke>" for prefix in _NAMESPACES),
    "</function>",
    "[TOOL_CALLS]",
    "[/TOOL_CALLS]",
)
_PARTS = frozenset(word[:size] for word in _WORDS for size in range(1, len(word)))
"""The beginnings of marks."""

_NAMES = ("name", "tool", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_LISTS = "tool_calls"
_KEYS = (*_NAMES, *_ARGUMENTS, _LISTS, "type", "id", "index", "tool_call_id")
"""The first keys of a JSON object that is a call."""
_NAMED = re.compile(rf'"(?:{"|".join(_NAMES)})"\s*:\s*"([^"]*)("?)')
_FIRST_KEY = re.compile(r'\{\s*(?:"(\w*)("?)|$)')

_HOLES = {
    " ": (r"\s*", r"\s*"),
    "{name}": (r"(?P<name>[\w.:-]{1,200})", r"[\w.:-]{1,200}"),
    "{id}": (r"[\w.:-]{1,80}", r"[\w.:-]{1,80}"),
    "{some}": (r"[\w\s<|>.]{0,80}?", r"[\w\s<|>.]{0,80}"),
    "{={}": (r"(?=\{)", ""),
    "{=<}": (r"(?=<(?:arg_key|/tool_call)>)", r"<[\w/]{0,10}"),
}
_PIECE = re.compile(r" |\{=?\w*[<{]?\}|.", re.DOTALL)


class _Rule(NamedTuple):
    """A grammar whose beginning and end are compiled, and what matches a part of each up to a
    text's end."""

    arguments: Read
    begins: re.Pattern[str]
    part: re.Pattern[str]
    ends: re.Pattern[str]
    part_of_ends: re.Pattern[str]


def _rule(grammar: Grammar) -> _Rule:
    pieces = [
        _HOLES.get(piece, (re.escape(piece), re.escape(piece)))
        for piece in _PIECE.findall(grammar.begins)
    ]
    begins = "".join(piece for piece, _ in pieces)
    ends = [piece for one in grammar.ends.split() for piece in (r"\s*", *map(re.escape, one))]
    return _Rule(
        grammar.arguments,
        re.compile(begins),
        re.compile(_part([partial for _, partial in pieces])),
        re.compile(f"(?:{''.join(ends)})?"),
        re.compile(_part(ends[:-1])),
    )


def _part(pieces: Sequence[str]) -> str:
    """Return what matches the first of these pieces, however many."""
    part = ""
    for piece in filter(None, reversed(pieces)):
        part = f"(?:{piece}{part})?"
    return part


_RULES = tuple(map(_rule, GRAMMARS))
_PYTHON = _RULES[-1]


# -- a run of calls --------------------------------------------------------------------------------


class CallRun:
    """The calls at the end of a text, from a place on.

    `over`: something else follows, so that the text does not end with calls there. `ended`: the
    text ends where a call may end. `first`: nothing but white space stands before, so that a fence
    may stand around the calls.
    """

    def __init__(self, text: str, at: int, names: ToolNames, *, first: bool = False) -> None:
        self.calls: list[Written] = []
        self.places = set[int]()
        """Where its marks and calls begin, and what follows them."""
        self.over = False
        self.ended = False
        self._text = text
        self._begins = at
        self._names = names
        self._first = first
        self._listed = False
        self._fenced = False
        try:
            if len(text) - at > LONGEST:
                raise ValueError("too long")
            self._read(at)
            self.ended = True
        except Unfinished:
            pass
        except UNREADABLE:
            self.over = True

    @property
    def ours(self) -> list[Written]:
        return [call for call in self.calls if self._names.recognised(call.name)]

    @property
    def rest(self) -> str:
        """What is left of the text without our calls: the calls of other tools, if there are
        any."""
        ours = self.ours
        if len(ours) == len(self.calls):
            return ""
        kept = ""
        at = self._begins
        for call in ours:
            kept += self._text[at : call.begins]
            at = call.ends
        return kept + self._text[at:]

    def _read(self, at: int) -> None:
        text = self._text
        while at < len(text):
            self.places.add(at)
            if found := self._calls(at):
                self.calls += found
                at = found[-1].ends
            else:
                at = self._after_mark(at)

    def _after_mark(self, at: int) -> int:
        text = self._text
        if mark := _MARKS.match(text, at):
            self._listed |= mark[0] == "["
            return mark.end()
        fence = (
            _FENCE.match(text, at) if self._fenced or (self._first and at == self._begins) else None
        )
        if fence:
            self._fenced = True
            return fence.end()
        rest = text[at:]
        fences = (self._first or self._fenced) and _PART_OF_FENCE.fullmatch(rest)
        if fences or rest in _PARTS or _PART_OF_TOKEN.fullmatch(rest):
            raise Unfinished("a mark")
        raise ValueError("something else")

    def _calls(self, at: int) -> list[Written]:
        """Return the calls that begin here; an empty list if no call does."""
        text = self._text
        if text[at] == "{":
            return self._objects(at)
        rest = text[at:]
        fault: Exception | None = None
        waits = False
        for rule in _RULES:
            if rule is _PYTHON and at == self._begins:
                continue
            match = rule.begins.match(text, at)
            if match is None:
                part = rest[0] != " " and not rest[0].isspace() and rule.part.fullmatch(rest)
                waits |= bool(part) and not (rule is _PYTHON and self._names.excludes(rest))
                continue
            try:
                self._check(match["name"])
                arguments, ends = rule.arguments(text, match.end())
            except Unfinished:
                waits = True
                continue
            except UNREADABLE as error:
                fault = error
                continue
            if ends < len(text) and rule.part_of_ends.fullmatch(text, ends):
                raise Unfinished("an end")
            ends = (rule.ends.match(text, ends) or match).end()
            return [Written(at, ends, match["name"], arguments)]
        if waits:
            raise Unfinished("a call")
        if fault:
            raise fault
        return []

    def _objects(self, at: int) -> list[Written]:
        """Return the calls that a JSON object is."""
        rest = self._text[at : at + NAMELESS]
        key = _FIRST_KEY.match(rest)
        if key is None or (
            key[1] is not None and not any(_may_be(key[1], key[2], word) for word in _KEYS)
        ):
            raise ValueError("no call")
        try:
            value, ends = _json(self._text, at)
        except Unfinished:
            named = _NAMED.search(self._text, at)
            if named and named[2]:
                self._check(named[1])
            elif len(self._text) - at > NAMELESS:
                raise ValueError("no name") from None
            raise
        listed = value[_LISTS] if isinstance(value.get(_LISTS), list) else [value]
        found = [Written(at, ends, *_call(one)) for one in listed]
        for call in found:
            self._check(call.name)
        return found

    def _check(self, name: str) -> None:
        """Raises ValueError for a call of another tool that stands without calls of ours."""
        beside = self.calls or (self._listed and self._names.theirs(name))
        if not (beside or self._names.recognised(name)):
            raise ValueError("no call of our tools")


def _may_be(written: str, closed: str, word: str) -> bool:
    return word == written if closed else word.startswith(written)


def _call(value: Any) -> tuple[str, dict[str, Any]]:
    """Return a call's name and arguments. Raises one of `UNREADABLE` if this is no call."""
    inner = (
        value["function"]
        if isinstance(value, dict) and isinstance(value.get("function"), dict)
        else value
    )
    if isinstance(inner, dict):
        name = next((inner[key] for key in _NAMES if isinstance(inner.get(key), str)), "")
        arguments: Any = next((inner[key] for key in _ARGUMENTS if key in inner), {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name and isinstance(arguments, dict):
            return name, arguments
    raise ValueError("no call")


# -- where one may begin ---------------------------------------------------------------------------

SIGNS = re.compile(r"[<\[{`]")
"""What each run begins with."""
_OPENINGS = (
    *("<|", "<｜", "<tool", "<func", "<TOOLCALL", "<invoke", "<seed:", "<longcat_"),
    *(f"<{namespace}" for namespace in _NAMESPACES if namespace),
)


FENCE = len("```")


INDENT = 4
"""The columns by which Markdown indents code."""


class LinesBefore:
    """What is known of the text before a place: whether it is in a fence, and what its line begins
    with."""

    def __init__(self) -> None:
        self.empty = True  # whether there is nothing but white space
        self._line = ""  # the first characters behind the white space that the line begins with
        self._indent = 0  # the columns of that white space
        self._fenced = False

    def add(self, text: str) -> None:
        if "\n" not in text and len(self._line) == FENCE:
            return
        *lines, last = (self._line + text).split("\n")
        self.empty = self.empty and not text.strip()
        for line in lines:
            self._fenced ^= line.lstrip().startswith("```")
        self._indent = 0 if lines else self._indent
        if not self._line or lines:
            self._indent += len(last.expandtabs(INDENT)) - len(last.lstrip().expandtabs(INDENT))
        self._line = last.lstrip()[:FENCE]

    def copy(self) -> LinesBefore:
        made = LinesBefore()
        made.empty = self.empty
        made._line = self._line
        made._indent = self._indent
        made._fenced = self._fenced
        return made

    def cut(self, text: str, names: ToolNames) -> int:
        """Return where in the text that comes next a run of calls may begin; its length if
        nowhere. A run that begins within one that is over ends where that does."""
        before = self.copy()
        over = set[int]()
        at = 0
        for sign in SIGNS.finditer(text):
            place = sign.start()
            before.add(text[at:place])
            at = place
            if place in over or not before._begins(text, place):
                continue
            run = CallRun(text, place, names, first=before.empty)
            if not run.over:
                return place
            over |= run.places
        return len(text)

    def _begins(self, text: str, at: int) -> bool:
        """Whether a run may begin here: in no quotation or code of Markdown's, and without a mark
        that nothing else has only on a line of its own."""
        indented = self._indent >= INDENT and not self.empty
        if self._fenced or indented or self._line.startswith(">"):
            return False
        if text[at] == "<":
            rest = text[at : at + 12]
            return any(rest.startswith(one) or one.startswith(rest) for one in _OPENINGS)
        if text[at] == "`":
            return self.empty
        return not self._line or (text[at] == "[" and "[TOOL_CALLS]".startswith(text[at : at + 12]))
