"""What upstreams' refusals are about: their real wordings, each with its source, and what may look like them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.dialects.refusals import MOST, complaint, error_status, told
from proxy.plan.turn import Addition, Complaint, Verdict
from tests.doubling import assert_linear

FINAL, GENERATION = Verdict.FINAL, Verdict.GENERATION
TOOLS, USAGE, PLACE, ANY = Addition.TOOLS, Addition.USAGE, Addition.PLACE, Addition.ANY

EXTRA = {"type": "extra_forbidden", "msg": "Extra inputs are not permitted"}


def said(message: str, **more: Any) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


def vllm(message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


WORDINGS: list[tuple[Complaint, int, Any]] = [
    # Ollama: github.com/FoundationAgents/OpenManus/issues/220
    (TOOLS, 400, said("registry.ollama.ai/library/qwen:4b does not support tools", type="api_error")),
    # Ollama's own API: github.com/ollama/ollama/issues/14795
    (TOOLS, 400, {"error": "registry.ollama.ai/library/Qwen3.5:0.8b does not support tools"}),
    # OpenRouter: github.com/evalstate/fast-agent/issues/122
    (
        TOOLS,
        404,
        {
            "error": {
                "message": "No endpoints found that support tool use. To learn more about provider routing, visit: "
                "https://openrouter.ai/docs/provider-routing",
                "code": 404,
            }
        },
    ),
    # OpenRouter: github.com/zed-industries/zed/issues/36094
    (
        TOOLS,
        404,
        {"error": {"message": "No endpoints found that support the provided 'tool_choice' value.", "code": 404}},
    ),
    # llama.cpp without --jinja: github.com/containers/ramalama/issues/988
    (TOOLS, 500, {"error": {"code": 500, "message": "tools param requires --jinja flag", "type": "server_error"}}),
    # llama.cpp before 2025: github.com/ggml-org/llama.cpp/issues/10920
    (TOOLS, 500, {"code": 500, "message": "Unsupported param: tools", "type": "server_error"}),
    # vLLM: github.com/FoundationAgents/OpenManus/issues/331
    (TOOLS, 400, vllm('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')),
    # Gemini: github.com/Simpleyyt/ai-manus/issues/101
    (
        TOOLS,
        400,
        [
            {
                "error": {
                    "code": 400,
                    "message": "Function calling with a response mime type: 'application/json' is unsupported",
                    "status": "INVALID_ARGUMENT",
                }
            }
        ],
    ),
    # Groq: github.com/agno-agi/agno/issues/1065
    (TOOLS, 400, said("'response_format` json_object cannot be combined with tool/function calling")),
    # Groq: github.com/vercel/ai/pull/16540
    (TOOLS, 400, said("json mode cannot be combined with tool/function calling")),
    # DeepSeek: github.com/spring-projects/spring-ai/pull/2643
    (TOOLS, 400, said("deepseek-reasoner does not support Function Calling", code="invalid_request_error")),
    # OpenAI: github.com/pipecat-ai/pipecat/issues/4043
    (
        TOOLS,
        400,
        said(
            "Function tools with reasoning_effort are not supported for gpt-5.4 in /v1/chat/completions. Please use "
            "/v1/responses instead.",
            param="reasoning_effort",
        ),
    ),
    # OpenAI: github.com/sbintuitions/flexeval/pull/242
    (TOOLS, 400, said("tools is not supported in this model. For a list of supported models, refer to https://…")),
    # xAI: github.com/google/adk-python/issues/952
    (
        TOOLS,
        400,
        {
            "code": "Client specified an invalid argument",
            "error": "Invalid request content: The model does not support tool use or function calling but tools or "
            "tool_choice have been specified on the request.",
        },
    ),
    # Mistral: github.com/partITech/php-mistral/issues/76
    (
        TOOLS,
        422,
        {
            "object": "Error",
            "detail": [{**EXTRA, "loc": ["body", "tools"], "input": []}],
            "message": [{**EXTRA, "loc": ["body", "tools"], "input": []}],
            "type": "invalid_request_error",
            "code": 3001,
        },
    ),
    # Mistral: github.com/avante-corp/avante.nvim/issues/2347
    (
        USAGE,
        422,
        {
            "object": "error",
            "message": {"detail": [{**EXTRA, "loc": ["body", "stream_options", "include_usage"], "input": True}]},
            "type": "invalid_request_error",
        },
    ),
    # Mistral in 2024, an error within an error: github.com/mistralai/platform-docs-public/issues/7
    (
        USAGE,
        422,
        {
            "object": "error",
            "message": json.dumps({"detail": [{**EXTRA, "loc": ["body", "stream_options"], "input": {}}]}),
            "type": "internal_error_proxy",
            "code": "1000",
        },
    ),
    # Azure: github.com/jamesrochabrun/SwiftOpenAI/issues/67
    (USAGE, 400, said("Unknown parameter: 'stream_options'.", param="stream_options", code="unknown_parameter")),
    # xAI: github.com/cline/cline/issues/2764
    (USAGE, 400, {"code": "Client specified an invalid argument", "error": "Argument not supported: stream_options"}),
    # Groq in 2024: github.com/vercel/ai/pull/1578
    (USAGE, 400, said("property 'stream_options' is unsupported, did you mean 'stream'?")),
    # LiteLLM around Azure: github.com/BigPizzaV3/CodexPlusPlus/issues/234
    (
        USAGE,
        400,
        said(
            "litellm.BadRequestError: AzureException BadRequestError - "
            + json.dumps(said("Unknown parameter: 'stream_options.include_usage'."))
            + ". Received Model Group=gpt-5.4"
        ),
    ),
    # vLLM with Mistral's template: github.com/weaviate/Verba/issues/150
    (PLACE, 400, vllm("Conversation roles must alternate user/assistant/user/assistant/...")),
    # vLLM with a newer one: github.com/vllm-project/vllm/issues/6862
    (
        PLACE,
        400,
        vllm("After the optional system message, conversation roles must alternate user/assistant/user/assistant/..."),
    ),
    # TGI: github.com/huggingface/text-generation-inference/issues/3198
    (
        PLACE,
        422,
        {
            "error": "Template error: syntax error: Conversation roles must alternate user/assistant/...",
            "error_type": "template_error",
        },
    ),
    # DeepSeek: github.com/xerrors/Yuxi/issues/126
    (
        PLACE,
        400,
        said(
            "deepseek-reasoner does not support successive user or assistant messages (messages[0] and messages[1] in "
            "your input). You should interleave the user/assistant messages in the message sequence."
        ),
    ),
    # vLLM with Gemma's template: github.com/vllm-project/vllm/pull/2964
    (PLACE, 400, vllm("System role not supported")),
    # Mistral: github.com/datapizza-labs/datapizza-ai/issues/98
    (
        PLACE,
        400,
        {
            "object": "error",
            "message": "Unexpected role 'user' after role 'tool'",
            "type": "invalid_request_message_order",
            "param": None,
            "code": "3230",
        },
    ),
    # The same through OpenRouter: github.com/charmbracelet/crush/issues/279
    (
        PLACE,
        400,
        {
            "message": "Provider returned error",
            "code": 400,
            "metadata": {
                "raw": json.dumps({"object": "error", "message": "Unexpected role 'tool' after role 'user'"}),
                "provider_name": "Mistral",
            },
        },
    ),
    # LM Studio, with the template's own words: github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1586
    (PLACE, 400, {"error": 'Error rendering prompt with jinja template: "No user query found in messages.".'}),
    # LM Studio: github.com/zed-industries/zed/issues/45379
    (ANY, 400, {"error": 'Error rendering prompt with jinja template: "Unknown test: sequence".'}),
    # xAI: github.com/nocmt/LLMSearchPlus/issues/2
    (
        ANY,
        400,
        {
            "code": "Client specified an invalid argument",
            "error": "The model expects a single `text` element per message.",
        },
    ),
    # Moonshot: github.com/labring/FastGPT/issues/3575
    (ANY, 400, said("Invalid request: the message at position 4 with role 'assistant' must not be empty")),
    # lmdeploy-like servers: github.com/InternLM/lmdeploy/issues/2973
    (ANY, 500, {"error": {"message": "chat template failed: KeyError: 'tool'", "type": "server_error"}}),
    # Groq: github.com/huggingface/smolagents/issues/1119
    (
        GENERATION,
        400,
        said(
            "Failed to call a function. Please adjust your prompt. See 'failed_generation' for more details.",
            code="tool_use_failed",
            failed_generation="web_search{query: this model does not support tools}",
        ),
    ),
    # Azure: github.com/compl-ai/compl-ai/issues/20
    (
        FINAL,
        400,
        said(
            "The response was filtered due to the prompt triggering Azure OpenAI's content management policy. Please "
            "modify your prompt and retry.",
            type=None,
            param="prompt",
            code="content_filter",
        ),
    ),
    # OpenAI: platform.openai.com/docs/guides/error-codes
    (FINAL, 404, said("The model `gpt-9` does not exist or you do not have access to it.", code="model_not_found")),
    (FINAL, 401, said("Incorrect API key provided: sk-…", code="invalid_api_key")),
    (FINAL, 429, said("You exceeded your current quota, please check your plan.", code="insufficient_quota")),
    # Gemini has a status of its own for keys: ai.google.dev/gemini-api/docs/troubleshooting
    (FINAL, 400, [{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}]),
    # DeepSeek: api-docs.deepseek.com/quick_start/error_codes
    (FINAL, 402, said("Insufficient Balance")),
    (FINAL, 400, said("Model Not Exist")),
    (FINAL, 400, said("Content Exists Risk")),
    # OpenRouter: openrouter.ai/docs/api-reference/errors
    (FINAL, 400, {"error": {"message": "x/y is not a valid model ID", "code": 400}}),
    (FINAL, 404, {"error": {"message": "No endpoints found for x/y.", "code": 404}}),
    (FINAL, 503, said("The server is overloaded. Please try again later.", type="server_error")),
]


@pytest.mark.parametrize(("about", "status", "body"), WORDINGS)
def test_what_a_refusal_is_about(about: Complaint, status: int, body: Any) -> None:
    assert complaint(status, json.dumps(body).encode()) is about


@pytest.mark.parametrize(
    ("status", "body", "about"),
    [
        (400, b"", ANY),
        (400, b"<html>Bad Request</html>", ANY),
        (422, b"Unsupported param: tools", TOOLS),
        (400, b"\xff\xfe", ANY),
        (400, b"[" * 100_000, ANY),
        (500, b"", FINAL),
        (500, b"function timed out", FINAL),
        (413, b"too large", FINAL),
        (409, b'{"error": {"message": "tools are not supported"}}', FINAL),
    ],
)
def test_bodies_of_any_kind(status: int, body: bytes, about: Complaint) -> None:
    assert complaint(status, body) is about


@pytest.mark.parametrize(
    "body",
    [
        said("Invalid value: 'this model does not support tools'. Supported values are: 'low' and 'high'."),
        {"detail": [{"type": "literal_error", "loc": ["body", "effort"], "msg": "Bad", "input": "no tools supported"}]},
        {"detail": [{"msg": "Input should be 'low' [input_value='does not support tools', input_type=str]"}]},
        said("invalid prompt template", failed="tools are not supported", request={"message": "no tools here"}),
    ],
    ids=["quoted", "FastAPI's input", "Pydantic's text", "other members"],
)
def test_quotations_of_the_request_say_nothing(body: Any) -> None:
    assert complaint(400, json.dumps(body).encode()) is ANY


@pytest.mark.parametrize("name", ["my-tool-7b", "hhao/coder-tools", "r1-tool-calling:14b", "fire-function-v2", "tools"])
@pytest.mark.parametrize("mark", ["`", "'", '"'])
def test_the_name_of_a_model_says_nothing(name: str, mark: str) -> None:
    for wording in (
        "model {} not found, try pulling it first",
        "The model {} does not exist or you have no access to it.",
    ):
        assert meant(400, wording.format(f"{mark}{name}{mark}")) is FINAL
    assert meant(400, f"Model {mark}{name}{mark} is not supported.") is ANY
    if name != "tools":
        assert meant(400, f"Model {name} is not supported here.") is ANY
        assert meant(500, f"Model {name} has crashed.") is FINAL


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_without_a_parser_for_calls_refuses_tools(status: int) -> None:
    assert meant(status, "Internal server error: Unsupported tool_call_parser: None") is TOOLS
    assert (
        meant(status, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set') is TOOLS
    )


def meant(status: int, message: str) -> Complaint:
    return complaint(status, json.dumps(said(message)).encode())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        # OpenRouter: openrouter.ai/docs/api-reference/errors
        ({"error": {"code": 429, "message": "Rate limited"}, "choices": []}, 429),
        ({"error": {"code": "400", "message": "no"}}, 400),
        # Groq: github.com/anomalyco/opencode/issues/1018
        ({"error": {"message": "Failed to call a function.", "code": "tool_use_failed", "status_code": 400}}, 400),
        ({"error": {"message": "boom", "type": "internal_server_error"}}, 500),
        ({"error": {"message": "bad", "type": "invalid_request_error"}}, 400),
        ({"error": "bad"}, 400),
        ({"error": None, "choices": []}, 0),
        ({"choices": []}, 0),
        ([], 0),
        # OpenRouter, in the choice; Gemini's list; MiniMax; vLLM's and FastChat's own object
        ({"choices": [{"delta": {}, "error": {"code": 502, "message": "no"}}]}, 502),
        ([{"error": {"code": 400, "message": "no"}}], 400),
        ({"base_resp": {"status_code": 2013, "status_msg": "invalid params"}, "choices": None}, 400),
        ({"base_resp": {"status_code": 0, "status_msg": ""}, "choices": []}, 0),
        ({"object": "error", "message": "no", "code": 404}, 404),
        ({"detail": "no tools"}, 400),
        ({"message": {"role": "assistant", "content": "hi"}}, 0),
        ({"choices": [], "message": "hi"}, 0),
        ({"error": {}, "choices": [{"delta": {}}]}, 0),
    ],
)
def test_status_of_an_error_that_came_with_200(body: Any, status: int) -> None:
    assert error_status(json.dumps(body).encode()) == status


def test_reading_takes_linear_time() -> None:
    for make in (
        lambda size: b'{"message": "' + b"'tools " * size + b'"}',
        lambda size: b'{"error": ' * size,
        lambda size: b"a model " * size,
        lambda size: json.dumps({"detail": [{"msg": "no tools"}] * size}).encode(),
        lambda size: json.dumps({"detail": [{"msg": "tools " * 300}] * (size // 100)}).encode(),
    ):
        assert_linear(lambda body: complaint(400, body), make(2_000), make(4_000))


def test_an_error_of_many_texts_is_searched_in_part() -> None:
    texts = [{"msg": "tools " * 300}] * 50
    assert len(told(json.dumps({"detail": texts}).encode())) <= MOST
    assert complaint(400, json.dumps({"detail": [{"msg": "no tools"}, *texts]}).encode()) is TOOLS


def test_the_shape_of_a_request_is_its_members() -> None:
    shapes = [
        CHAT.parse(json.dumps({"model": model, "messages": [], **more}).encode()).shape
        for model, more in (("a", {}), ("b", {}), ("a", {"response_format": 3}), ("a", {"x" * 9_999: 1}))
    ]
    assert shapes[0] == shapes[1] and len(set(shapes)) == 3 and max(map(len, shapes)) == 16
