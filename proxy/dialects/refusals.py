"""Recognises what a refusal is about, in any vendor's wording: a context that is too long, one of
our additions, the model's output, or none of these.

Many errors quote the request, and its author must not be able to choose words that we take for
upstream's. So we read only the members in which upstream speaks for itself (`message`, `code`,
`type`; for FastAPI `msg` and `loc`), without quotations. Single quoted words name fields; they
count except where numbers are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from proxy.plan.turn import Addition, Complaint, Verdict

# -- what an error says ----------------------------------------------------------------------------

READ = 20_000
"""The most characters of a message that are looked at for quotations."""

KEPT = 2_000
"""The most characters of a message that are kept. No vendor's own words are longer."""

MOST = 4 * KEPT
"""The most characters of all its texts in which we look for wordings: some 20 ms of work, on the
event loop."""

PARTS = 50
"""The most objects of an error that are read. A FastAPI server lists each mistake in the
request."""

DEPTH = 6
"""The most levels of an error: a gateway's error may contain the provider's."""

_INSIDE = ("error", "errors", "detail", "base_resp", "metadata", "raw")
"""Members that contain an error or its text: of OpenAI, Cloudflare, FastAPI, MiniMax; the last two
of OpenRouter."""

_MESSAGES = ("message", "msg", "status_msg")
_CODES = ("code", "type", "error_type", "status_code", "status", "reason", "param")
"""Members of an error that hold a name for it, or that of the field at fault."""

_PARAMETER = re.compile(r"`(\w{1,40})`(?= (?:tokens|and|exceed|must|is no smaller)\b|\.| \+)")
"""A parameter's name in an error's own words, as TGI, Anthropic and vLLM write it. It is no
quotation."""

_QUOTE = re.compile(r"(?<!\w)['\u2019]|['\u2019](?!\w)|[\"`\u201c\u201d\u2018\u00ab\u00bb]")
"""A quotation mark. An apostrophe within a word is not one."""


_word = re.compile(r"""['`"]([\w.\[\]-]{1,64})['`"]""")
"""A quotation of a single word."""
_json = json.JSONDecoder()


class ErrorText(msgspec.Struct, frozen=True):
    """What an error says. `text` has the messages on separate lines, `told` also the words that
    they quote and the error's names, and `codes` is in lower case."""

    text: str
    quoted: str
    codes: frozenset[str]
    numbers: Mapping[str, int]
    """Numbers beside a message, by name, as llama.cpp gives them."""


def parts(body: bytes) -> Iterator[str | Mapping[str, Any]]:
    """Yield the objects and the texts of an error reply, the outermost first. The texts may quote
    the request. A body that does not look like JSON is a text; JSON that is cut off says
    nothing."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        start = body[: 4 * READ].lstrip()  # UTF-8 has at most 4 bytes for a character
        value = None if start[:1] in (b"{", b"[", b'"') else start.decode("utf-8", "replace")
    return islice(_parts(value, 0), PARTS)


def _parts(value: Any, depth: int) -> Iterator[str | Mapping[str, Any]]:
    if depth > DEPTH:
        return
    if isinstance(value, list):
        for element in value[:PARTS]:
            # a list of anything else quotes the request, or the error's place in it
            if isinstance(element, dict):
                yield from _parts(element, depth + 1)
    elif isinstance(value, str):
        yield from _texts(value, depth)
    elif isinstance(value, dict):
        yield value
        for key in (*_MESSAGES, *_INSIDE):
            if key in value:
                yield from _parts(value[key], depth + 1)


def _texts(text: str, depth: int) -> Iterator[str | Mapping[str, Any]]:
    """Yield a text, and what a gateway puts behind or between its own words: the provider's error
    as JSON."""
    own, brace, behind = text.partition("{")
    if brace and not _QUOTE.search(own):
        with suppress(ValueError, RecursionError):
            inner, end = _json.raw_decode(brace + behind)
            yield own
            yield from _parts(inner, depth + 1)
            yield behind[end - 1 :]
            return
    yield text


def error_text(body: bytes) -> ErrorText:
    """Read an error reply. A body that is neither JSON nor text says nothing."""
    said: list[str] = []
    told: list[str] = []
    codes: set[str] = set()
    numbers: dict[str, int] = {}
    for part in parts(body):
        if isinstance(part, str):
            said.append(_without_quotations(part))
            told.append(" ".join((said[-1], *_word.findall(part[:KEPT]))))
            continue
        names = [str(part[key]) for key in _CODES if isinstance(part.get(key), str | int)]
        codes.update(map(str.lower, names))
        path = part.get("loc")
        told.append(
            " ".join(
                name[:64]
                for name in (*names, *map(str, path[:4] if isinstance(path, list) else ()))
            )
        )
        numbers |= {
            key: value for key, value in part.items() if type(value) is int and key not in _CODES
        }
    return ErrorText("\n".join(said)[:READ], "\n".join(told)[:MOST], frozenset(codes), numbers)


def _without_quotations(text: str) -> str:
    """Return a message without everything between its first and its last quotation mark, as
    quotations may contain marks of their own."""
    beginning = " ".join(_PARAMETER.sub(r"\1", text[:READ]).split())
    marks = [mark.start() for mark in _QUOTE.finditer(beginning)]
    if not marks:
        return beginning[:KEPT]
    if len(text) > READ:
        return beginning[: marks[0]][:KEPT]
    return (beginning[: marks[0]] + "''" + beginning[marks[-1] + 1 :])[:KEPT]


# -- a context that is too long --------------------------------------------------------------------

LONG_STATUSES = {400, 413, 422, 500}
"""The statuses with which a reply may mean that the context is too long. Most use 400; Anthropic
and gateways also 413, TGI and vLLM 422, and Ollama and llama.cpp 500."""

LEAST = 256
"""The fewest tokens that a number may mean as a window. Smaller ones are counts of something
else."""

_TOO_LONG = {
    "context_length_exceeded",  # OpenAI, Azure, DeepSeek, OpenRouter
    "model_max_prompt_tokens_exceeded",  # GitHub Copilot
    "tokens_limit_reached",  # GitHub Models
    "exceed_context_size_error",  # llama.cpp
    "context_exceeded",  # ds4
    "model_context_window_exceeded",  # Z.ai
    "1261",  # Zhipu
}

_N = r"(\d[\d,]{0,18})(?!,?\d)"
_COUNT = r"\d[\d,]{0,18}"

WORDINGS = {
    "Mistral": rf"too large for model with {_N} maximum context length",
    "OpenAI, Azure, DeepSeek, OpenRouter, vLLM, SGLang, Fireworks": (
        rf"maximum context length(?:(?: is| of|:)? ?\(?{_N})?"
    ),
    "Anthropic": rf"prompt is too long(?:: {_COUNT} tokens > {_N} maximum)?",
    "Anthropic, with the reply": rf"exceed context limit(?:: {_COUNT} \+ {_COUNT} > {_N})?",
    "Bedrock": r"input is too long for requested model",
    "Gemini": rf"input token count(?: \(?{_COUNT}\)?)? exceeds the maximum number of tokens(?: allowed \(?{_N})?",
    "xAI": rf"maximum prompt length is {_N}",
    "Copilot": rf"prompt token count of {_COUNT} exceeds the limit of {_N}",
    "GitHub Models": rf"request body too large for [^ ]{{1,80}} model\. max size: {_N} tokens",
    "Moonshot": rf"exceeded model token limit(?:: {_N})?",
    "Zhipu": r"prompt (?:exceeds max length|too long$)|prompt ?超长",
    "DashScope": rf"range of input length should be \[{_COUNT}, ?{_N}\]",
    "SiliconFlow": rf"length of prompt_tokens \({_COUNT}\) must be less than max_seq_len \({_N}\)",
    "Cerebras": rf"reduce the length of the messages or completion\. current length is {_COUNT} while limit is {_N}",
    "OpenAI's advice, kept by many": r"reduce the length of the (?:messages|prompt|input)",
    "LM Studio": rf"is greater than the context length(?: \(n_keep: {_COUNT} ?>= ?n_ctx: {_N}\))?",
    "LM Studio, older": rf"loaded with (?:a )?context length of only {_N} tokens",
    "LM Studio, newer": rf"n_keep \({_COUNT}\) >= n_ctx \({_N}\)",
    "vLLM, older": rf"longer than the maximum model length(?: of {_N})?",
    "vLLM, without room for a reply": rf"max_tokens must be at least ?1, got -{_COUNT}",
    "SGLang, Together": rf"longer than the model's context length(?: \({_N} tokens\))?",
    "SGLang, for want of memory": rf"exceeds the maximum allowed length(?: \({_N} tokens\))?",
    "Poolside": rf"exceeds the maximum allowed input length(?: of {_N} tokens)?",
    "TGI, Together": rf"tokens \+ max_new_tokens must be <= {_N}",
    "TGI": rf"inputs(?: tokens)? must have less than {_N} tokens",
    "TensorRT-LLM": rf"prompt length \({_COUNT}\) exceeds maximum (?:input|sequence) length \({_N}\)",
    "LiteLLM": r"contextwindowexceedederror",
    "OpenAI's newer models, MiniMax, llama.cpp, llama-cpp-python, Ollama, ds4, and others": (
        rf"context (?:size|length|window|limit)(?: is| of|:)? \(?{_N}(?! ?\+)[^.]{{0,60}}exceed"
        r"|exceed\w{0,10}\b[^.]{0,60}\bcontext (?:size|length|window|limit)"
        rf"(?:(?: is| of|:)? \(?{_N}(?! ?\+))?"
        r"|context (?:size|length|window)\b[^.]{0,60}\bexceed"
        r"|input length\b[^.]{0,60}\bexceed|too many (?:input )?tokens|token limit exceeded"
    ),
}
"""Each vendor's wording; a group in it is the window. `tests/dialects/test_overflow.py` has the
whole errors and where they were seen. The first wording that names a window counts, so that the
general ones come last."""

_wordings = {vendor: re.compile(pattern, re.IGNORECASE) for vendor, pattern in WORDINGS.items()}

_others = re.compile(
    r"rate.?limit|per min|\bTPM\b|throttl|too many requests|quota|please wait", re.IGNORECASE
)
"""What speaks of tokens per minute, and not of a context."""


def is_overflow(status: int, body: bytes) -> bool:
    """Whether this error reply means that the request has too many tokens."""
    if status not in LONG_STATUSES:
        return False
    said = error_text(body)
    return bool(said.codes & _TOO_LONG) or next(_matches(said), None) is not None


def window(body: bytes) -> int | None:
    """Return the context window that the error names, in tokens, or None if it names none."""
    said = error_text(body)
    named = (
        group.replace(",", "") for match in _matches(said) for group in match.groups() if group
    )
    tokens = said.numbers.get("n_ctx") or int(next(named, "0"))  # n_ctx: llama.cpp
    return tokens if tokens >= LEAST else None


def _matches(said: ErrorText) -> Iterator[re.Match[str]]:
    if not _others.search(said.text):
        yield from filter(None, (pattern.search(said.text) for pattern in _wordings.values()))


# -- everything else -------------------------------------------------------------------------------

RawHeaders = Sequence[tuple[bytes, bytes]]

_REFUSING = (400, 404, 405, 422)
"""The statuses of a request that upstream could not accept. OpenRouter uses 404 if no provider
takes its fields, and DeepInfra 405 for tools."""

_generation = re.compile(
    r"""
      tool_use_failed | failed\ to\ call\ a\ function | failed_generation     # Groq
    | output_parse_failed | json_validate_failed | tool\ call\ validation     # Groq
    | model\ (produced|generated|returned)\ (an\ )?(invalid|malformed)        # OpenAI, DeepInfra
    | model\ response\ did\ not\ respect                                     # Databricks
    | malformed_?\ ?function_?\ ?call                                         # Gemini
    | (failed\ to\ pars|error\ pars|could\ not\ pars)\w*\ (the\ )?           # llama.cpp, Ollama
      (tool|function|model|output|input\ at\ pos)
    """,
    re.IGNORECASE | re.VERBOSE,
)

_final = re.compile(
    r"""
      content_?\ ?filter | content_policy | content\ management\ policy | responsibleai    # Azure, OpenAI, Moonshot
    | \bsafety\b | moderation | \bflagged\b | prohibited_content | invalid_prompt          # OpenAI, Gemini, OpenRouter
    | data_?inspection_?failed | content\ exists\ risk | high\ risk | new_sensitive       # DashScope, DeepSeek, MiniMax
    | api[ _-]?key | authenticat | unauthori[sz]ed | permission | user\ location           # Gemini and xAI use 400
    | quota | billing | credit\ balance | insufficient\ (balance|credit|fund) | rate[ _-]?limit | too\ many\ requests
    | not_found_error | model_not_(found|exist|supported) | unsupported_api_for_model | model_terms_required
    | deploymentnotfound | model_decommissioned | (unknown|invalid)\ model\b
    | \bmodel\b.{0,120}\b(does\ not\ exist|not\ exist|not\ found|no\ longer\ available|decommissioned)
    | not\ a\ valid\ model | models?/\S{1,100}\ is\ not\ found | no\ endpoints\ found\ for
    | unable\ to\ access\ (\S{1,40}\ )?model | no\ endpoints\ available\ matching               # Together, OpenRouter
    """,
    re.IGNORECASE | re.VERBOSE,
)

_usage = re.compile(r"stream_options|stream\ options|include_usage", re.IGNORECASE)

_strict = re.compile(r"\bstrict\b", re.IGNORECASE)
"""Cerebras refuses tools of which some are strict (RooCodeInc/Roo-Code#10334)."""

_ours = re.compile(
    r"(?<![\w-])(?:tools?|(?:tool|function)[ _-]?call\w*)(?![\w-]|:\w)|\broles?\b|template|jinja|system message",
    re.IGNORECASE,
)
"""What a server's fault says if our version of the request provoked it. Many a model is called
`my-tools-7b`."""


def complaint(status: int, body: bytes) -> Complaint:
    """Return what this refusal of a request that we changed is about. Status 200 means an error in
    a reply's place."""
    status = status if status != 200 else error_status(body) or 400
    if is_overflow(status, body):
        return Verdict.OVERFLOW
    if status not in _REFUSING and status < 500:
        return Verdict.FINAL
    said = error_text(body).quoted
    if _generation.search(said):
        return Verdict.GENERATION
    if _usage.search(said):
        return Addition.USAGE
    if status in _REFUSING and _final.search(said):
        return Verdict.FINAL
    if _strict.search(said):
        return Addition.LOOSE
    return Addition.ANY if status in _REFUSING or _ours.search(said) else Verdict.FINAL


def is_error(body: bytes) -> bool:
    """Whether this is an error in the place of a reply."""
    return error_status(body) > 0


def error_status(body: bytes) -> int:
    """Return the status that an error stands for if it came with status 200; 0 if this is not an
    error.

    OpenRouter and vLLM have it in `code`, Groq in `status_code`.
    """
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    # Gemini puts it into a list
    reply = parsed[0] if isinstance(parsed, list) and parsed else parsed
    error = _error_in(reply) if isinstance(reply, dict) else None
    if not error:
        return 0
    for name in ("code", "status_code", "status") if isinstance(error, dict) else ():
        if re.fullmatch("[45][0-9][0-9]", str(error.get(name))):
            return int(str(error[name]))
    passing = re.search(
        "server|internal|overload|timeout|unavailable", error_text(body).quoted, re.IGNORECASE
    )
    return 500 if passing else 400


def _error_in(reply: Mapping[str, Any]) -> Any:
    """Return the error in the place of a reply, in any vendor's shape; something false if there is
    none."""
    if reply.get("error"):
        return reply["error"]
    # Anthropic, OpenAI's Responses; vLLM and FastChat
    if "error" in (reply.get("type"), reply.get("object")):
        return reply
    choices = reply.get("choices")
    base = reply.get("base_resp")
    if choices and isinstance(choices, list) and isinstance(choices[0], dict):
        return choices[0].get("error")  # OpenRouter
    if isinstance(base, dict) and base.get("status_code"):  # MiniMax
        return base
    if "choices" in reply or "output" in reply:
        return None
    said = (reply.get(name) for name in ("message", "msg", "detail", "errors"))
    return reply if any(value and isinstance(value, str | list) for value in said) else None
