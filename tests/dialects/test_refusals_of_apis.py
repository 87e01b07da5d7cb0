"""What Anthropic and OpenAI's Responses say when they refuse a request, and what that is about.

The first column is the source of each wording: an issue on GitHub, or the vendor's page about errors.
"""
# ruff: noqa: E501  (errors are quoted as they come)

from __future__ import annotations

import json

import pytest

from proxy.dialects import Dialect
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.turn import Addition, Complaint, Verdict

OVERFLOW, FINAL, ANY = Verdict.OVERFLOW, Verdict.FINAL, Addition.ANY
INVALID = "invalid_request_error"

# fmt: off
ANTHROPIC: list[tuple[str, int, str, str, Complaint]] = [
    ("stackblitz/bolt.new/issues/1748", 400, INVALID, "prompt is too long: 202128 tokens > 200000 maximum", OVERFLOW),
    ("docker/docker-agent/issues/569", 400, INVALID, "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease input length or `max_tokens` and try again", OVERFLOW),
    ("docs: errors", 413, "request_too_large", "Request exceeds the maximum allowed number of bytes.", FINAL),
    ("docs: errors", 401, "authentication_error", "invalid x-api-key", FINAL),
    ("docs: errors", 403, "permission_error", "Your API key does not have permission to use the specified resource.", FINAL),
    ("docs: errors", 404, "not_found_error", "model: claude-nowhere", FINAL),
    ("docs: errors", 429, "rate_limit_error", "This request would exceed your organization's rate limit of 30,000 input tokens per minute.", FINAL),
    ("docs: errors", 500, "api_error", "Internal server error", FINAL),
    ("docs: errors", 529, "overloaded_error", "Overloaded", FINAL),
    ("docs: errors", 400, INVALID, "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase credits.", FINAL),
    ("anthropics/claude-code/issues/21612", 400, INVALID, "context_management: Extra inputs are not permitted", ANY),
    ("tghamm/Anthropic.SDK/issues/50", 400, INVALID, "A maximum of 4 blocks with cache_control may be provided. Found 5.", ANY),
    ("anthropics/claude-code/issues/10627", 400, INVALID, "messages.1.content.0: Invalid `signature` in `thinking` block", ANY),
    ("anthropics/claude-code/issues/1237", 400, INVALID, "messages.9: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_01. Each `tool_use` block must have a corresponding `tool_result` block in the next message.", ANY),
    ("anthropics/claude-code/issues/13460", 400, INVALID, "messages.4.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_01. Each `tool_result` block must have a corresponding `tool_use` block in the previous message.", ANY),
    ("a server without tools", 400, INVALID, "tools: this model does not support tool use", ANY),
]
OPENAI: list[tuple[str, int, str | None, str, Complaint]] = [
    ("docs: errors", 400, "context_length_exceeded", "Your input exceeds the context window of this model. Please adjust your input and try again.", OVERFLOW),
    ("docs: errors", 401, "invalid_api_key", "Incorrect API key provided: sk-x.", FINAL),
    ("docs: errors", 403, "unsupported_country_region_territory", "Country, region, or territory not supported", FINAL),
    ("docs: errors", 404, "model_not_found", "The model `x` does not exist or you do not have access to it.", FINAL),
    ("docs: errors", 429, "insufficient_quota", "You exceeded your current quota, please check your plan and billing details.", FINAL),
    ("docs: errors", 503, "server_is_overloaded", "Our servers are currently overloaded. Please try again later.", FINAL),
    ("lace-ai/gai/pull/49", 400, None, "No tool output found for function call call_1.", ANY),
    ("james-6-23/codex2api/issues/414", 400, None, "No tool call found for function call output with call_id call_1.", ANY),
    ("continuedev/continue/issues/8933", 400, None, "Item 'rs_1' of type 'reasoning' was provided without its required following item.", ANY),
    ("continuedev/continue/issues/12620", 400, None, "Item 'msg_1' of type 'message' was provided without its required 'reasoning' item: 'rs_1'.", ANY),
    ("openai/codex/issues/8132", 400, "invalid_encrypted_content", "The encrypted content gAAA...Rg== could not be verified.", ANY),
    ("docs: conversation state", 404, None, "Item with id 'rs_1' not found. Items are not persisted when `store` is set to false.", ANY),
    ("a model without tools", 400, "unsupported_parameter", "Unsupported parameter: 'tools' is not supported with this model.", ANY),
]
# fmt: on


def meant(dialect: Dialect, status: int, body: object) -> Complaint:
    return dialect.complaint(status, json.dumps(body).encode())


@pytest.mark.parametrize(("status", "kind", "message", "about"), [case[1:] for case in ANTHROPIC])
def test_what_anthropic_refuses(status: int, kind: str, message: str, about: Complaint) -> None:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    assert meant(MESSAGES, status, body) is about


@pytest.mark.parametrize(("status", "code", "message", "about"), [case[1:] for case in OPENAI])
def test_what_responses_refuse(status: int, code: str | None, message: str, about: Complaint) -> None:
    error = {"message": message, "type": INVALID, "param": None, "code": code}
    assert meant(RESPONSES, status, {"error": error}) is about


@pytest.mark.parametrize(
    "message",
    [
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        "The following tool_call_ids did not have response messages: call_1",
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'.",
    ],
)
def test_a_history_out_of_pairs_says_nothing_about_tools(message: str) -> None:
    assert meant(RESPONSES, 400, {"error": {"message": message, "type": INVALID}}) is ANY
