"""The wordings are those that vendors' servers and gateways are known to send; each row says where
it was seen."""

# ruff: noqa: E501  (errors are quoted as they come)

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from proxy.dialects import refusals
from proxy.dialects.refusals import WORDINGS, is_overflow, window

OPENAI = "Please reduce the length of the messages."


def said(message: str, **members: Any) -> dict[str, Any]:
    return {"error": {"message": message, **members}}


OVERFLOWS: list[tuple[str, str, int, Any, int | None]] = [
    # whose, where it was seen (on github.com unless it is an address), status, body, window
    ("OpenAI", "baserow/baserow/issues/3011", 400, said(f"This model's maximum context length is 128000 tokens. However, your messages resulted in 179011 tokens. {OPENAI}", type="invalid_request_error", param="messages", code="context_length_exceeded"), 128_000),
    ("OpenAI, newer", "the-open-agent/openagent/issues/2344", 400, said("Your input exceeds the context window of this model. Please adjust your input and try again.", param="input", code="context_length_exceeded"), None),
    ("OpenAI, newer, by its text", "onyx-dot-app/onyx/issues/6051", 400, said("Your input exceeds the context window of this model. Please adjust your input and try again."), None),
    ("vLLM", "vllm-project/vllm/issues/20409", 400, {"object": "error", "message": f"This model's maximum context length is 4096 tokens. However, you requested 5000 tokens in the messages, {OPENAI}", "type": "BadRequestError", "param": None, "code": 400}, 4096),
    ("vLLM, newer", "AIDotNet/OpenCowork/issues/82", 400, said("This model's maximum context length is 262144 tokens. However, you requested 128000 output tokens and your prompt contains at least 134145 input tokens, for a total of at least 262145 tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=134145)"), 262_144),
    ("vLLM, with quotation marks", "canfieldjuan/finetunelab.ai: docs/MAX_TOKENS_CONTEXT_OVERFLOW_FIX.md", 400, said("'max_tokens' or 'max_completion_tokens' is too large: 2000. This model's maximum context length is 4096 tokens and your request has 2104 input tokens (2000 > 4096 - 2104)."), 4096),
    ("vLLM, older", "thu-coai/Glyph/issues/9", 400, said("The decoder prompt (length 163840) is longer than the maximum model length of 131072. Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens. For image inputs, the number of image tokens depends on the number of images, and possibly their aspect ratios as well.", type="BadRequestError", code=400), 131_072),
    ("vLLM behind Xinference", "langchain-ai/deepagents/issues/468", 500, {"detail": "[address=0.0.0.0:43769, pid=1065] The decoder prompt (length 66501) is longer than the maximum model length of 65536. Make sure that `max_model_len` is no smaller than the number of text tokens."}, 65_536),
    ("vLLM, without room for a reply", "vllm-project/vllm/issues/4667", 400, {"object": "error", "message": "max_tokens must be at least 1, got -186.", "type": "BadRequestError", "param": None, "code": 400}, None),
    ("SGLang", "QwenLM/Qwen3/issues/1321", 400, {"object": "error", "message": "The input (61709 tokens) is longer than the model's context length (40960 tokens).", "type": "BadRequestError", "param": None, "code": 400}, 40_960),
    ("SGLang, with the reply", "anomalyco/opencode/pull/20105", 400, {"object": "error", "message": "Requested token count exceeds the model's maximum context length of 131072 tokens. You requested a total of 140000 tokens: 130000 tokens from the input messages and 10000 tokens for the completion.", "code": 400}, 131_072),
    ("SGLang, for want of memory", "sgl-project/sglang/issues/4048", 400, {"object": "error", "message": "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens). Use a shorter input or enable --allow-auto-truncate.", "code": 400}, 59_862),
    ("llama.cpp", "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/server-context.cpp", 400, said("the request exceeds the available context size. try increasing the context size or enable context shift", code=400, type="exceed_context_size_error", n_prompt_tokens=5000, n_ctx=2048), 2048),
    ("llama.cpp, newer", "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/server-context.cpp", 400, said("request (5000 tokens) exceeds the available context size (2048 tokens), try increasing it", code=400, type="exceed_context_size_error"), 2048),
    ("llama.cpp, at its end", "ggml-org/llama.cpp (seen with slots: HTTP 500)", 500, said("Context size has been exceeded.", code=500, type="server_error"), None),
    ("llama-cpp-python", "abetlen/llama-cpp-python/issues/416", 400, said("Requested tokens (9000) exceed context window of 8192", type="invalid_request_error"), 8192),
    ("LM Studio", "Gitlawb/openclaude/issues/353", 400, {"error": "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 13055>= n_ctx: 4096). Try to load the model with a larger context length, or provide a shorter input."}, 4096),
    ("LM Studio, without numbers", "anomalyco/opencode/issues/2259", 400, {"error": "The number of tokens to keep from the initial prompt is greater than the context length. Try to load the model with a larger context length, or provide a shorter input"}, None),
    ("LM Studio, older", "lmstudio-ai/lmstudio-bug-tracker/issues/546", 400, {"error": "Trying to keep the first 111490 tokens when context the overflows. However, the model is loaded with context length of only 32768 tokens, which is not enough. Try to load the model with a larger context length, or provide a shorter input."}, 32_768),
    ("LM Studio, newer", "anomalyco/opencode/issues/11141", 400, {"error": "Cannot truncate prompt with n_keep (15028) >= n_ctx (7424)"}, 7424),
    ("Ollama", "https://docs.ollama.com/api/errors", 400, said("input length exceeds maximum context length", type="api_error"), None),
    ("Ollama, newer", "earendil-works/pi: packages/ai/src/utils/overflow.ts", 400, said("prompt too long; exceeded max context length by 1200 tokens"), None),
    ("OpenRouter", "refly-ai/refly/issues/1177", 400, said('This endpoint\'s maximum context length is 32768 tokens. However, you requested about 42832 tokens (42832 of text input). Please reduce the length of either one, or use the "middle-out" transform to compress your prompt automatically.', code=400, metadata={"provider_name": None}), 32_768),
    ("OpenRouter, with its provider's words", "cline/cline/issues/13194", 400, said("Provider returned error", code=400, metadata={"raw": json.dumps(said(f"This model's maximum context length is 262144 tokens. However, your messages resulted in 262897 tokens. {OPENAI}", type="Bad Request", code=400)), "provider_name": "Nvidia", "is_byok": False}), 262_144),
    ("OpenRouter, Poolside", "anomalyco/opencode/pull/20105", 400, said("Input length 131393 exceeds the maximum allowed input length of 131040 tokens.", code=400), 131_040),
    ("Anthropic", "stackblitz/bolt.new/issues/1748", 400, {"type": "error", **said("prompt is too long: 202128 tokens > 200000 maximum", type="invalid_request_error")}, 200_000),
    ("Anthropic, with the reply", "continuedev/continue/issues/6080", 400, {"type": "error", **said("input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input length or `max_tokens` and try again", type="invalid_request_error")}, 200_000),
    ("Bedrock", "https://repost.aws/knowledge-center/bedrock-validation-exception-errors", 400, {"message": "Input is too long for requested model."}, None),
    ("Gemini, in a list", "google-gemini/gemini-cli/issues/4692", 400, [said("The input token count (2845475) exceeds the maximum number of tokens allowed (1048576).", code=400, status="INVALID_ARGUMENT")], 1_048_576),
    ("xAI", "cline/cline/issues/3120", 400, {"code": "Client specified an invalid argument", "error": "This model's maximum prompt length is 131072 but the request contains 136973 tokens."}, 131_072),
    ("GitHub Copilot", "microsoft/copilot-intellij-feedback/issues/94", 400, said("prompt token count of 138898 exceeds the limit of 64000", code="model_max_prompt_tokens_exceeded"), 64_000),
    ("GitHub Copilot, without a code", "microsoft/vscode-copilot-release/issues/6700", 400, said("prompt token count of 65446 exceeds the limit of 64000", param="", code="", type=""), 64_000),
    ("GitHub Models", "eslint/tsc-meetings/pull/593", 413, said("Request body too large for gpt-4o model. Max size: 8000 tokens.", code="tokens_limit_reached", details="Request body too large for gpt-4o model. Max size: 8000 tokens."), 8000),
    ("Moonshot", "MoonshotAI/kimi-cli/issues/2011", 400, said("Invalid request: Your request exceeded model token limit: 262144 (requested: 269030)", type="invalid_request_error"), 262_144),
    ("Zhipu", "zeroclaw-labs/zeroclaw/issues/4124", 400, said("Prompt exceeds max length", code="1261"), None),
    ("Zhipu, by its code", "https://docs.bigmodel.cn/cn/faq/api-code", 400, said("Prompt 超长", code="1261"), None),
    ("MiniMax, where 2013 is an error's number", "MiniMax-AI/MiniMax-M2/issues/119", 400, {"type": "error", **said("invalid params, context window exceeds limit (2013)", type="invalid_request_error")}, None),
    ("MiniMax, in its own shape", "MiniMax-AI/MiniMax-M2/issues/119", 400, {"base_resp": {"status_code": 2013, "status_msg": "invalid params, context window exceeds limit"}}, None),
    ("DashScope", "agentscope-ai/QwenPaw/issues/6255", 400, {**said("<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 983616]", code="invalid_parameter_error", param=None, type="invalid_request_error"), "request_id": "81a373d6"}, 983_616),
    ("DashScope, in its own shape", "LLM-Red-Team/qwen-free-api/issues/23", 400, {"code": "InvalidParameter", "message": "Range of input length should be [1, 6000]", "request_id": "x"}, 6000),
    ("SiliconFlow", "chatboxai/chatbox/issues/2060", 400, {"code": 20015, "message": "length of prompt_tokens (68957) must be less than max_seq_len (65536).", "data": None}, 65_536),
    ("Cerebras", "cline/cline/issues/5140", 400, {"message": "Please reduce the length of the messages or completion. Current length is 42328 while limit is 40000", "type": "invalid_request_error", "param": "messages", "code": "wrong_api_format"}, 40_000),
    ("Groq", "https://console.groq.com/docs/errors", 400, said("Please reduce the length of the messages or completion.", type="invalid_request_error", param="messages"), None),
    ("Fireworks", "fw-ai/cookbook/issues/134", 400, said("The prompt is too long: 40177, model maximum context length: 32767", object="error", type="invalid_request_error", code="invalid_request_error"), 32_767),
    ("Fireworks behind LiteLLM", "fw-ai/cookbook/issues/134", 400, said('litellm.BadRequestError: Fireworks_aiException - {"error":{"object":"error","type":"invalid_request_error","code":"invalid_request_error","message":"The prompt is too long: 40177, model maximum context length: 32767"}}', code="400"), 32_767),
    ("LiteLLM", "https://docs.litellm.ai/docs/exception_mapping", 400, said("litellm.ContextWindowExceededError: litellm.BadRequestError: the provider's own words", code="400"), None),
    ("Mistral", "earendil-works/pi: packages/ai/src/utils/overflow.ts", 400, {"object": "error", "message": "Prompt contains 300000 tokens and 0 draft tokens, too large for model with 262144 maximum context length", "type": "invalid_request_message_error"}, 262_144),
    ("TGI", "huggingface/llm-vscode/issues/94", 422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3474 `inputs` tokens and 60 `max_new_tokens`", "error_type": "validation"}, 2048),
    ("TGI, the input alone", "huggingface/text-generation-inference: router/src/validation.rs", 422, {"error": "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000", "error_type": "validation"}, 4095),
    ("Together, newer", "earendil-works/pi: packages/ai/src/utils/overflow.ts", 400, said("The input (516368 tokens) is longer than the model's context length (262144 tokens).", type="invalid_request_error"), 262_144),
    ("TensorRT-LLM", "triton-inference-server/tensorrtllm_backend/issues/141", 400, {"error": "Cannot process new request: Prompt length (5056) exceeds maximum sequence length (2048)"}, 2048),
    ("ds4", "antirez/ds4/pull/150", 400, said("Prompt tokens (9000) exceeds context size (8192)", type="context_exceeded", n_prompt_tokens=9000, n_ctx=8192), 8192),
    ("ds4 without its numbers", "antirez/ds4/pull/150", 400, said("Prompt tokens (9000) exceeds context size (8192)"), 8192),
    ("FastAPI", "https://fastapi.tiangolo.com/tutorial/handling-errors", 422, {"detail": [{"type": "value_error", "loc": ["body", "messages"], "msg": "Value error, the prompt exceeds the context length of 8192 tokens", "input": "x"}]}, 8192),
    ("a gateway that adds nothing", "anthropics/claude-code (HTTP 413)", 413, said("Prompt is too long"), None),
    ("plain text", "xtekky/gpt4free/issues/137", 400, "This model's maximum context length is 4097 tokens.", 4097),
]  # fmt: skip

QUOTED = "maximum context length is 300"
"""What a client writes anywhere into its request, in the hope that upstream repeats it."""

OTHERS: list[tuple[str, int, Any]] = [
    ("a rate limit", 429, said("Rate limit reached: too many tokens per minute")),
    ("a rate limit of Groq's (ITSpecialist111/ai_automation_suggester/issues/61)", 413, said("Request too large for model `llama-3.3-70b-versatile` in organization `org_01` service tier `on_demand` on tokens per minute (TPM): Limit 6000, Requested 14810, please reduce your message size and try again.", type="tokens", code="rate_limit_exceeded")),
    ("a rate limit of Bedrock's", 400, {"message": "Too many tokens, please wait before trying again."}),
    ("pairing", 400, said("Invalid parameter: messages with role 'tool' must be a response to a preceding message with 'tool_calls'.")),
    ("the reply", 400, said("max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided 100000.", param="max_tokens")),
    ("the reply at TGI (huggingface/transformers/issues/28523)", 422, {"error": "Input validation error: `max_new_tokens` must be <= 192. Given: 1024"}),
    ("the reply at DeepSeek (we0-dev/we0/issues/56)", 400, said("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]")),
    ("authentication", 401, said("maximum context length")),
    ("a fault", 500, "Internal Server Error"),
    ("a number behind a word", 400, said("Unsupported value: temperature > 2000")),
    ("OpenAI repeats a value", 400, said(f"Invalid value: '{QUOTED}'. Supported values are: 'low', 'medium', and 'high'.", param="reasoning_effort", code="invalid_value")),
    ("a value with quotation marks of its own", 400, said(f"Invalid value: 'x' {QUOTED} 'y'. Supported values are: 'low'.", param="reasoning_effort")),
    ("a value in double quotation marks", 400, said(f'Unknown model "{QUOTED}"')),
    ("a value in typographic ones", 400, said(f"Unknown model “{QUOTED}”")),
    ("a value in backticks", 400, said(f"Unknown model `{QUOTED}`")),
    ("a code as a value", 400, said("Invalid value: 'context_length_exceeded'.")),
    ("a value that is JSON", 400, said(f"Invalid value: '{json.dumps(said(QUOTED))}'.")),
    ("Pydantic repeats the input", 422, {"detail": [{"type": "literal_error", "loc": ["body", "reasoning_effort"], "msg": "Input should be 'low', 'medium' or 'high'", "input": QUOTED, "ctx": {"expected": QUOTED}}]}),
    ("Pydantic repeats the prompt", 422, {"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": {"messages": [{"role": "user", "content": QUOTED}]}}]}),
    ("Pydantic as a text, as vLLM sends it", 400, {"object": "error", "message": f"[{{'type': 'extra_forbidden', 'loc': ('body', 'x'), 'msg': 'Extra inputs are not permitted', 'input': '{QUOTED}'}}]", "code": 400}),
    ("the request beside the error", 400, {**said("Bad request"), "request": {"message": QUOTED}, "body": QUOTED, "input": QUOTED}),
    ("the request in an error's details", 400, said("Bad request", param=QUOTED, details=QUOTED, failed_generation=QUOTED, headers={"message": QUOTED})),
    ("a list of texts", 400, {"errors": [QUOTED], "detail": [QUOTED]}),
    ("a quotation that does not end", 400, said("Invalid content: '" + "x" * 30_000 + QUOTED)),
    ("a long quotation", 400, said("Invalid content: '" + QUOTED * 1_000 + "'")),
    ("JSON that is cut off", 400, '{"error":{"message":"Bad","input":"' + QUOTED),
    ("a page", 400, "<html><title>400 Bad Request</title></html>"),
]  # fmt: skip


def sent(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


@pytest.mark.parametrize(
    ("status", "body", "tokens"),
    [row[2:] for row in OVERFLOWS],
    ids=[f"{row[0]} ({row[1]})" for row in OVERFLOWS],
)
def test_overflow(status: int, body: Any, tokens: int | None) -> None:
    assert is_overflow(status, sent(body))
    assert window(sent(body)) == tokens


@pytest.mark.parametrize(
    ("status", "body"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS]
)
def test_other_errors_are_others(status: int, body: Any) -> None:
    assert not is_overflow(status, sent(body))
    assert status != 400 or window(sent(body)) is None


def test_every_wording_was_seen() -> None:
    texts = [refusals.error_text(sent(row[3])).text for row in OVERFLOWS]
    seen = [
        any(re.search(wording, text, re.IGNORECASE) for text in texts)
        for wording in WORDINGS.values()
    ]
    assert [vendor for vendor, found in zip(WORDINGS, seen, strict=True) if not found] == []


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b"", b"null", b"1", b"[" * 9_999, b'{"error":' * 9_999, b'"\xff"']
)
def test_what_is_no_error_says_nothing(body: bytes) -> None:
    assert not is_overflow(400, body) and window(body) is None


@pytest.mark.parametrize("digits", [20, 5_000])
def test_a_number_without_end_is_no_window(digits: int) -> None:
    assert window(sent(said("maximum context length is " + "9" * digits))) is None


@pytest.mark.parametrize("counted", ["", " 1234567", " (1234567)"])
@pytest.mark.parametrize("allowed", ["1048576", "(1048576)"])
def test_gemini_writes_numbers_with_and_without_parentheses(counted: str, allowed: str) -> None:
    told = f"The input token count{counted} exceeds the maximum number of tokens allowed {allowed}."
    assert window(sent(said(told))) == 1_048_576


def test_a_gateway_adds_words_before_and_behind_the_error() -> None:
    told = f"AnthropicException - {json.dumps(said('prompt is too long: 5000 tokens > 4096 maximum'))}. Group=x"
    assert window(sent(said(told))) == 4096


@pytest.mark.parametrize(
    ("number", "tokens"), [("255", None), ("256", 256), ("200,000", 200_000), ("8192, and", 8192)]
)
def test_numbers_as_vendors_write_them(number: str, tokens: int | None) -> None:
    assert window(sent(said(f"maximum context length is {number}"))) == tokens


def test_only_the_first_of_many_mistakes_are_read() -> None:
    mistakes = [{"msg": "Field required"}] * 1_000 + [{"msg": QUOTED}]
    assert not is_overflow(422, sent({"detail": mistakes}))
