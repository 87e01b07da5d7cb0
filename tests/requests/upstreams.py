"""Upstreams as they are: what each refuses, in its own words, on top of what the strict upstream
checks.

Each has the source of its wording. `refuse` gets a request and returns status and body of its
refusal, or None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.strict import Json, Refused, Rules, check

Refusal = tuple[int, Any] | None
Refuse = Callable[[Json], Refusal]


@dataclass(frozen=True)
class Upstream:
    name: str
    refuse: Refuse = lambda request: None
    native: bool = True
    """Whether the client calls tools. If not, its history has texts of user and assistant only."""
    system: bool = True
    """Whether the client sends a system message."""
    members: Json = field(default_factory=dict)
    """Other members of the client's requests."""
    in_stream: bool = False
    """Whether a stream begins before the refusal, which comes with status 200."""

    def answer(self, body: bytes) -> Refusal:
        """Return the refusal of a request, or None."""
        request = json.loads(body)
        try:
            check(request, Rules())
        except Refused as refused:
            return refused.status, refused.body()
        return self.refuse(request)


def error(message: str, status: int = 400, **more: Any) -> tuple[int, Json]:
    return status, {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": None,
            **more,
        }
    }


def vllm(message: str) -> tuple[int, Json]:
    return 400, {
        "object": "error",
        "message": message,
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }


def _where(condition: Callable[[Json], object], refusal: tuple[int, Any]) -> Refuse:
    return lambda request: refusal if condition(request) else None


def _first(*rules: Refuse) -> Refuse:
    return lambda request: next((said for rule in rules if (said := rule(request))), None)


def _tools(request: Json) -> bool:
    return "tools" in request


def _usage(request: Json) -> bool:
    return "stream_options" in request


def _json_mode(request: Json) -> bool:
    return _tools(request) and "response_format" in request


def _roles(request: Json) -> list[str]:
    """The roles that templates compare: those of users, and of assistants who call nothing."""
    spoken = [
        message for message in request["messages"] if message["role"] in ("user", "assistant")
    ]
    return [message["role"] for message in spoken if not message.get("tool_calls")]


def _repeats(request: Json) -> bool:
    roles = _roles(request)
    return any(one == other for one, other in pairwise(roles))


def _system(request: Json) -> bool:
    return any(message["role"] in ("system", "developer") for message in request["messages"])


def _user_after_tool(request: Json) -> bool:
    roles = [message["role"] for message in request["messages"]]
    return ("tool", "user") in pairwise(roles)


def _empty(request: Json) -> bool:
    return any(
        message["role"] == "assistant"
        and not message.get("content")
        and not message.get("tool_calls")
        for message in request["messages"]
    )


class _Flaky:
    """Refuses every third request with tools, because the model's call could not be parsed."""

    def __init__(self, refusal: tuple[int, Any]) -> None:
        self._refusal = refusal
        self._asked = 0

    def __call__(self, request: Json) -> Refusal:
        self._asked += _tools(request)
        return self._refusal if _tools(request) and self._asked % 3 == 0 else None


ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
MISTRAL_FIELD = {
    "type": "extra_forbidden",
    "loc": ["body", "stream_options"],
    "msg": "Extra inputs are not permitted",
}
MISTRAL_ORDER = {
    "object": "error",
    "message": "Unexpected role 'user' after role 'tool'",
    "code": "3230",
}


def upstreams() -> list[Upstream]:
    """Return all of them anew, because some count."""
    return [
        # The strict upstream itself: platform.openai.com/docs/api-reference/chat
        Upstream("OpenAI"),
        # github.com/sgl-project/sglang/pull/10184
        Upstream(
            "SGLang without a tool parser",
            _where(
                _tools,
                (
                    500,
                    {
                        "object": "error",
                        "message": "Internal server error: Unsupported tool_call_parser: None",
                    },
                ),
            ),
            native=False,
        ),
        # github.com/vllm-project/vllm/issues/6862
        Upstream(
            "vLLM with Mistral's template",
            _where(
                _repeats,
                vllm(f"After the optional system message, {ALTERNATE[0].lower()}{ALTERNATE[1:]}"),
            ),
        ),
        # github.com/sgl-project/sglang/issues/892, where Gemma's template makes it a 500 without
        # words
        Upstream(
            "SGLang with Gemma's template",
            _where(
                _system,
                (500, {"object": "error", "message": "System role not supported", "code": 500}),
            ),
            native=False,
            system=False,
        ),
        # The server's template engine reports the template's own words.
        Upstream(
            "llama.cpp with jinja",
            _where(
                _repeats,
                (500, {"error": {"code": 500, "message": ALTERNATE, "type": "server_error"}}),
            ),
        ),
        # github.com/huggingface/smolagents/issues/1119
        Upstream(
            "Groq, failed generations",
            _Flaky(
                error(
                    "Failed to call a function. Please adjust your prompt. See 'failed_generation' for more details.",
                    code="tool_use_failed",
                    failed_generation="<function=grep>",
                )
            ),
            native=False,
        ),
        # github.com/agno-agi/agno/issues/1065
        Upstream(
            "Groq, JSON mode",
            _where(
                _json_mode,
                error(
                    "'response_format` json_object cannot be combined with tool/function calling"
                ),
            ),
            native=False,
            members={"response_format": {"type": "json_object"}},
        ),
        # github.com/avante-corp/avante.nvim/issues/2347 and
        # github.com/datapizza-labs/datapizza-ai/issues/98
        Upstream(
            "Mistral",
            _first(
                _where(
                    _usage,
                    (
                        422,
                        {
                            "object": "error",
                            "message": {"detail": [{**MISTRAL_FIELD, "input": {}}]},
                        },
                    ),
                ),
                _where(_user_after_tool, (400, MISTRAL_ORDER)),
            ),
        ),
        # openrouter.ai/docs/api-reference/errors: after the stream has begun, an error is an event
        Upstream(
            "OpenRouter, in the stream",
            _where(
                _tools,
                (200, {"error": {"message": "This model does not support tools", "code": 400}}),
            ),
            native=False,
            in_stream=True,
        ),
        # github.com/xerrors/Yuxi/issues/126
        Upstream(
            "DeepSeek",
            _first(
                _where(_tools, error("deepseek-reasoner does not support Function Calling")),
                _where(
                    _repeats,
                    error(
                        "deepseek-reasoner does not support successive user or assistant messages (messages[0] …"
                    ),
                ),
            ),
            native=False,
        ),
        # github.com/labring/FastGPT/issues/3575
        Upstream(
            "Moonshot",
            _where(
                _empty,
                error(
                    "Invalid request: the message at position 4 with role 'assistant' must not be empty"
                ),
            ),
        ),
        # github.com/cline/cline/issues/2764 and github.com/google/adk-python/issues/952
        Upstream(
            "xAI",
            _first(
                _where(
                    _usage,
                    (400, {"code": "400", "error": "Argument not supported: stream_options"}),
                ),
                _where(
                    _tools,
                    (
                        400,
                        {
                            "code": "Client specified an invalid argument",
                            "error": "Invalid request content: The model does not support tool use or function calling "
                            "but tools or tool_choice have been specified on the request.",
                        },
                    ),
                ),
            ),
            native=False,
        ),
    ]
