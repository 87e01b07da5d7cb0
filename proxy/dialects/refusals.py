"""Recognises what a refusal is about, in any vendor's wording: one of our additions, the model's output, or neither.

Many errors quote the request, which its author chose. So we read only the members in which upstream speaks for itself
(`message`, `code`, `type`; for FastAPI `msg` and `loc`), and in them no quotation of several words. `error_text` leaves
out single words too, as numbers are single words; but here they name fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import error_text, overflow
from proxy.plan.turn import Addition, Complaint, Verdict

RawHeaders = Sequence[tuple[bytes, bytes]]

MOST = 4 * error_text.KEPT
"""The most characters of all its texts in which we look for wordings: some 20 ms of work, on the event loop."""

_REFUSING = (400, 404, 405, 422)
"""The statuses of a request that upstream could not accept. OpenRouter uses 404 if no provider takes its fields, and
DeepInfra 405 for tools."""

_CODES = ("code", "type", "error_type", "status", "reason", "param")
"""Members of an error that hold a name for it, or that of the field at fault."""

_model_name = re.compile(r"""\b(models?:? )(?:'[^\s']+'|`[^\s`]+`|"[^\s"]+")""", re.IGNORECASE)
"""A model's name, which may be any word."""

_quotation = re.compile(r"(?<!\w)(['`])([^'`]*)\1(?!\w)")
_input = re.compile(r"""['"]input['"]\s*:.*|\binput_value=.*""", re.DOTALL)
"""What follows Pydantic's names for the value that it quotes."""

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

_place = re.compile(
    r"""
      roles?\ must\ alternate | must\ alternate | alternating                 # Llama, Gemma and Mistral templates
    | (successive|consecutive|multiple|two)\ ['"`]?(user|assistant|system)    # DeepSeek, Anthropic, MiniMax
    | unexpected\ role | (expected|invalid)\ last\ role | message_order       # Mistral
    | invalid\ message\ role:\ (system|developer)                            # MiniMax
    | (system|developer)['"`]?\ (role|prompt|message|instruction)s?\b.{0,60}  # Gemma, Gemini, o1, Qwen
      (\bnot\b|n't|unsupported|\bonly\b|\bmust\b|\bfirst\b|beginning|start)
    | (not|n't|no|only)\b.{0,60}\b(system|developer)['"`]?\ (role|prompt|message|instruction)
    | does\ not\ support\ ['"`]?(system|developer)                            # o1
    | after\ (the\ )?(optional\ )?system
    | no\ user\ query                                                         # Qwen's template
    """,
    re.IGNORECASE | re.VERBOSE,
)

_TOOL = r"""(?<![\w-])(?:tools?(?!\ results?\b)|tool_choice|functions?|(?:tool|function)[_\ -]?call(?:s|ing)?)
    (?![\w-]|:\w)"""
"""No part of a longer name: many a model is called `my-tools-7b`."""

_NOT = r"""(?:\bnot\b|n't|\bno\b|\bcannot\b|un(?:support|known|recogni|expected|available)\w*|forbidden|disabled
    |incompatible|\brequires?\b|value_error\.extra)"""
_tools = re.compile(
    rf"""
      {_TOOL}.{{0,120}}?{_NOT} | {_NOT}.{{0,80}}?{_TOOL}
    | tool[_-]call[_-]parser                                                # SGLang, vLLM
    | built-in\ tools\ with\ function                                       # Gemini
    """,
    re.IGNORECASE | re.VERBOSE,
)

_pairing = re.compile(
    r"""
      no\ tool\ (output|call)s?\ found\ for                                  # OpenAI's Responses
    | must\ be\ followed\ by\ tool\ messages                                # OpenAI
    | (tool|messages?\ with\ role)\ .{0,40}must\ be\ a\ response\ to          # OpenAI
    | tool\ call\ and\ result\ not\ match | tool\ result's\ tool\ id          # MiniMax
    | \btool_use_id\b | `?tool_use`?\ ids?\b | tool_call_ids?\b              # Anthropic, OpenAI
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Calls and results that do not belong together. Such a history says nothing about tools as such."""

_names_ours = re.compile(
    r"(?<![\w-])(?:tools?|function[ _-]?call\w*)(?![\w-]|:\w)|\broles?\b|template|jinja|system message", re.IGNORECASE
)


def complaint(status: int, body: bytes) -> Complaint:
    """Return what this refusal of a request that we changed is about. Status 200 means an error in a reply's place."""
    status = status if status != 200 else error_status(body) or 400
    if overflow.is_overflow(status, body):
        return Verdict.OVERFLOW
    if status not in _REFUSING and status < 500:
        return Verdict.FINAL
    said = told(body)
    if _generation.search(said):
        return Verdict.GENERATION
    if _usage.search(said):
        return Addition.USAGE
    if status in _REFUSING and _final.search(said) and not _tools.search(said):
        return Verdict.FINAL
    if _place.search(said):
        return Addition.PLACE
    if _tools.search(said) and not _pairing.search(said):
        return Addition.TOOLS
    return Addition.ANY if status in _REFUSING or _names_ours.search(said) else Verdict.FINAL


def is_error(body: bytes) -> bool:
    """Whether this is an error in the place of a reply."""
    return error_status(body) > 0


def error_status(body: bytes) -> int:
    """Return the status that an error stands for if it came with status 200; 0 if this is not an error.

    OpenRouter and vLLM have it in `code`, Groq in `status_code`.
    """
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    reply = parsed[0] if isinstance(parsed, list) and parsed else parsed  # Gemini puts it into a list
    error = _error_in(reply) if isinstance(reply, dict) else None
    if not error:
        return 0
    for name in ("code", "status_code", "status") if isinstance(error, dict) else ():
        if re.fullmatch("[45][0-9][0-9]", str(error.get(name))):
            return int(str(error[name]))
    return 500 if re.search("server|internal|overload|timeout|unavailable", told(body), re.IGNORECASE) else 400


def _error_in(reply: Mapping[str, Any]) -> Any:
    """Return the error in the place of a reply, in any vendor's shape; something false if there is none."""
    if reply.get("error"):
        return reply["error"]
    if "error" in (reply.get("type"), reply.get("object")):  # Anthropic, OpenAI's Responses; vLLM and FastChat
        return reply
    choices, base = reply.get("choices"), reply.get("base_resp")
    if choices and isinstance(choices, list) and isinstance(choices[0], dict):
        return choices[0].get("error")  # OpenRouter
    if isinstance(base, dict) and base.get("status_code"):  # MiniMax
        return base
    if "choices" in reply or "output" in reply:
        return None
    said = (reply.get(name) for name in ("message", "msg", "detail", "errors"))
    return reply if any(value and isinstance(value, str | list) for value in said) else None


def told(body: bytes) -> str:
    """Return what upstream says itself: a line for each of its texts, without what they quote of the request."""
    lines = (_words(part) if isinstance(part, str) else _codes(part) for part in error_text.parts(body))
    return "\n".join(filter(None, lines))[:MOST]


def _words(text: str) -> str:
    beginning = " ".join(_input.sub("", text[: error_text.KEPT]).split())
    return _quotation.sub(_kept, _model_name.sub(r"\1", beginning))


def _kept(quotation: re.Match[str]) -> str:
    """Return a quotation if it is a single word, such as a field's name."""
    return quotation[0] if not re.search(r"\s", quotation[2]) else " "


def _codes(error: Mapping[str, Any]) -> str:
    """Return the error's codes, and the path of the field at fault."""
    codes = [error[name] for name in _CODES if isinstance(error.get(name), str)]
    path = error.get("loc")
    return " ".join(str(part)[:64] for part in [*codes, *(path[:4] if isinstance(path, list) else ())])
