"""What upstreams say when they refuse a request, and what may look like a refusal of ours and is
none.

Where the context is too long, the wordings are in `test_overflow`.
"""
# ruff: noqa: E501  (errors are quoted as they come)

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.dialects.refusals import MOST, complaint, error_status, error_text
from proxy.plan.turn import Addition, Complaint, Verdict
from tests.doubling import assert_linear

GENERATION, FINAL = Verdict.GENERATION, Verdict.FINAL
USAGE, ANY, LOOSE = Addition.USAGE, Addition.ANY, Addition.LOOSE


def said(message: str, **more: Any) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": None,
            **more,
        }
    }


def vllm(message: str, code: int = 400) -> dict[str, Any]:
    return {
        "object": "error",
        "message": message,
        "type": "BadRequestError",
        "param": None,
        "code": code,
    }


def google(message: str, code: int = 400) -> list[dict[str, Any]]:
    return [{"error": {"code": code, "message": message, "status": "INVALID_ARGUMENT"}}]


def anthropic(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def extra(*path: str, **more: Any) -> dict[str, Any]:
    """Mistral's error about a field that it does not know."""
    mistake = {
        "type": "extra_forbidden",
        "loc": ["body", *path],
        "msg": "Extra inputs are not permitted",
        **more,
    }
    return {"object": "error", "message": {"detail": [mistake]}, "type": "invalid_request_error"}


# -- as users reported it --------------------------------------------------------------------------

# The columns: where it was seen (an issue or pull request on GitHub), status, body, what it is
# about.
# fmt: off
WORDINGS: list[tuple[str, int, Any, Complaint]] = [
    # our tools
    ("sgl-project/sglang/pull/10184", 500, vllm("Internal server error: Unsupported tool_call_parser: None", 500), ANY),
    ("vllm-project/vllm/issues/6631, newer", 400, vllm("[{'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, Currently only named tools are supported.'}]"), ANY),
    ("aaif-goose/goose/issues/6690", 400, {"error": "model does not support tools"}, ANY),
    ("withceleste/celeste-python/issues/197", 400, google("Tool use with function calling is unsupported by the model."), ANY),
    ("BerriAI/litellm/issues/14704", 400, said("UnsupportedParamsError: azure does not support parameters: ['tool_choice'], for model=gpt-5-chat-2025-08-07. To drop these, set `drop_params=True`"), ANY),
    ("writer/writer-framework/pull/1013", 400, {"tpe": "fail.input.generic", "errors": [{"description": "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified.", "key": "fail.input.generic"}]}, ANY),
    ("truefoundry/models/pull/944", 405, {"status": "failure", "message": "deepinfra error: Tool calling is not supported for model: mistralai/Mistral-Small-24B-Instruct-2501"}, ANY),
    ("MicrosoftDocs/azure-docs/issues/121504", 400, {"error": {"code": 400, "message": "Functions are not supported for this API version or this model version. To learn how to user use function calling with Azure OpenAI Service. Please refer to this wiki  https://learn.microsoft.com/en-us/azure/ai-services/openai/how-to/function-calling?tabs=python"}}, ANY),
    # the usage of a stream
    ("QuantumNous/new-api/issues/418", 400, said("Unknown parameter: 'stream_options'. (request id: 20240806214436917505976hvsFC5y2)", param="stream_options", code="unknown_parameter"), USAGE),
    ("CherryHQ/cherry-studio/issues/9214", 400, {"detail": "Extra parameters ['stream_options'] are not allowed when extra-parameters is not set or set to be 'error'. Set extra-parameters to 'pass-through' to pass to the model."}, USAGE),
    ("FlowiseAI/Flowise/issues/2866", 400, said("Extra inputs are not permitted, field: 'stream_options'"), USAGE),
    ("BerriAI/litellm/issues/5803", 400, said("litellm.BadRequestError: OpenAIException - Error code: 400 - {'error': {'message': \"The 'stream_options' parameter is only allowed when 'stream' is enabled.\", 'type': 'invalid_request_error', 'param': 'stream_options', 'code': None}}\nReceived Model Group=o1-mini\nAvailable Model Group Fallbacks=None"), USAGE),
    # our tools are not strict, and the client's are
    ("RooCodeInc/Roo-Code/issues/10334", 422, {"message": "Tools with mixed values for 'strict' are not allowed. Please set all tools to 'strict: true' or 'strict: false'", "type": "invalid_request_error", "param": "tools", "code": "wrong_api_format"}, LOOSE),
    ("mpfaffenberger/code_puppy/pull/368", 400, said("Tools with mixed values for 'strict' are not allowed. Please set all tools to 'strict: true' or 'strict: false'", param="tools", code="wrong_api_format"), LOOSE),
    ("Kilo-Org/kilocode/pull/5204", 400, said("All tools must have the same value for the 'strict' parameter."), LOOSE),
    # our place
    ("BigPizzaV3/CodexPlusPlus/issues/267", 400, {"type": "error", "error": {"type": "bad_request_error", "message": "invalid params, chat content has invalid message role: system (2013)", "http_code": "400"}}, ANY),
    # Qwen's template at llama.cpp, whose words stand behind those of its parser
    ("tailcallhq/forgecode/issues/2586", 400, {"error": {"code": 400, "message": "Unable to generate parser for this template. Automatic parser generation failed: \n------------\nWhile executing CallExpression at line 85, column 32 in source:\n...first %}↵            {{- raise_exception('System message must be at the beginnin...\n                                           ^\nError: Jinja Exception: System message must be at the beginning.", "type": "invalid_request_error"}}, ANY),
    ("cortexkit/magic-context/issues/5", 500, {"error": {"code": 500, "message": "\n------------\nWhile executing CallExpression at line 85, column 32 in source:\n...first %}↵            {{- raise_exception('System message must be at the beginnin...\n                                           ^\nError: Jinja Exception: System message must be at the beginning.", "type": "server_error"}}, ANY),
    # something else in the request
    ("editor-code-assistant/eca/issues/231", 422, extra("max_completion_tokens", input=32000), ANY),
    ("yym68686/uni-api/issues/105", 400, {"code": "Client specified an invalid argument", "error": "Argument not supported on this model: presencePenalty"}, ANY),
    ("anthropics/claude-code/issues/12894", 400, anthropic("messages.209.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` is enabled, a final `assistant` message must start with a thinking block (preceeding the lastmost set of `tool_use` and `tool_result` blocks). We recommend you include thinking blocks from previous turns. To avoid this requirement, disable `thinking`."), ANY),
    # the limit of the reply
    ("diffbot/code-gpt-docs/issues/284", 400, said("max_tokens is too large: 6000. This model supports at most 4096 completion tokens, whereas you provided 6000."), ANY),
    ("databricks/databricks-sdk-go/issues/1183", 400, "Bad request: rpc error: code = InvalidArgument desc = max_tokens (10000) cannot exceed 8192. Please reduce the length of max output tokens generated.", ANY),
    ("vercel/ai/issues/2772", 400, {"message": "The maximum tokens you requested exceeds the model limit of 4096. Try again with a maximum tokens value that is lower than 4096."}, ANY),
    ("RooCodeInc/Roo-Code/issues/5729", 400, said("max_tokens must be less than or equal to 16384, the maximum value for max_tokens is less than the context_window for this model"), ANY),
    # images
    ("zai-org/feedback/issues/570", 400, {"error": {"code": "InvalidParameter", "message": "Model do not support image input. Request id: 021788846573420402c3547e09b7409e300241a04980e228ce7ce", "type": "BadRequest"}}, ANY),
    # what the model wrote
    ("HunorLaczko/ha-groq-cloud-api/issues/20", 400, said("tool call validation failed: parameters for tool HassTurnOff did not match schema: errors: [`/domain`: expected array, but got string]", code="tool_use_failed"), GENERATION),
    ("aaif-goose/goose/issues/1161", 400, {"error_code": "BAD_REQUEST", "message": "Error: Model response did not respect the required format. Please consider retrying or using a more straightforward prompt."}, GENERATION),
    # nothing that any form of the request would change
    ("vllm-project/vllm/issues/3486", 404, vllm("The model `Qwen1.5-14B-Chat-GPTQ-Int8` does not exist.", 404), FINAL),
    ("microsoft/vscode/issues/282890", 400, {"message": "The requested model is not supported.", "code": "model_not_supported", "param": "model", "type": "invalid_request_error"}, FINAL),
    ("egoist/chatwise-releases/issues/1273", 400, {"error": {"message": 'model "gpt-5.3-codex" is not accessible via the /chat/completions endpoint', "code": "unsupported_api_for_model"}}, FINAL),
    ("enricoros/big-AGI/issues/898", 400, {"error": {"message": "Unknown model: claude-opus-4-5"}}, FINAL),
    ("vyancharuk/nodejs-api-boilerplate/issues/16", 404, {"error": {"message": "No endpoints found for nousresearch/hermes-3-llama-3.1-405b:free.", "code": 404}}, FINAL),
    ("NousResearch/hermes-agent/pull/14943", 404, {"error": {"message": "No endpoints available matching your guardrail restrictions and data policy. Configure: https://openrouter.ai/settings/privacy", "code": 404}}, FINAL),
    ("truefoundry/models/pull/950", 400, {"status": "failure", "message": "together-ai error: Unable to access non-serverless model togethercomputer/EssentialAI-RNJ-1-Instruct. Please visit https://api.together.ai/models/togethercomputer/EssentialAI-RNJ-1-Instruct to create and start a new dedicated endpoint for the model."}, FINAL),
    ("compl-ai/compl-ai/issues/20", 400, said("The response was filtered due to the prompt triggering Azure OpenAI's content management policy. Please modify your prompt and retry. To learn more about our content filtering policies please read our documentation: https://go.microsoft.com/fwlink/?linkid=2198766", type=None, param="prompt", code="content_filter"), FINAL),
    ("BerriAI/litellm/pull/16231", 400, said("litellm.BadRequestError: litellm.ContentPolicyViolationError: AzureException - The response was filtered due to the prompt triggering Azure OpenAI's content management policy. Please modify your prompt and retry.", type=None, code="400"), FINAL),
    ("langflow-ai/langflow/issues/11120", 400, said("The model canopylabs/orpheus-arabic-saudi requires terms acceptance. Please have the org admin accept the terms at https://console.groq.com/playground?model=canopylabs%2Forpheus-arabic-saudi", code="model_terms_required"), FINAL),
    ("cline/cline/issues/4971", 413, said("Request too large for model `moonshotai/kimi-k2-instruct` in organization `org_01` service tier `on_demand` on tokens per minute (TPM): Limit 10000, Requested 15088, please reduce your message size and try again.", type="tokens", code="rate_limit_exceeded"), FINAL),
    ("popjane/free_chatgpt_api/issues/76", 403, said("user quota is not enough (request id: 2025020911093417487821572799492)", type="v_api_error", code="insufficient_user_quota"), FINAL),
    ("router-for-me/CLIProxyAPI/pull/3859", 400, anthropic("Your credit balance is too low to access the Anthropic API."), FINAL),
    # as the APIs document them, and what their users saw
    ("Anthropic, docs: errors", 413, anthropic("Request exceeds the maximum allowed number of bytes.", "request_too_large"), FINAL),
    ("Anthropic, docs: errors", 404, anthropic("model: claude-nowhere", "not_found_error"), FINAL),
    ("Anthropic, docs: errors", 400, anthropic("Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase credits."), FINAL),
    ("Anthropic, anthropics/claude-code/issues/21612", 400, anthropic("context_management: Extra inputs are not permitted"), ANY),
    ("Anthropic, anthropics/claude-code/issues/10627", 400, anthropic("messages.1.content.0: Invalid `signature` in `thinking` block"), ANY),
    ("Anthropic, anthropics/claude-code/issues/1237", 400, anthropic("messages.9: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_01. Each `tool_use` block must have a corresponding `tool_result` block in the next message."), ANY),
    ("OpenAI, docs: errors", 404, said("The model `x` does not exist or you do not have access to it.", code="model_not_found"), FINAL),
    ("OpenAI, lace-ai/gai/pull/49", 400, said("No tool output found for function call call_1."), ANY),
    ("OpenAI, openai/codex/issues/8132", 400, said("The encrypted content gAAA...Rg== could not be verified.", code="invalid_encrypted_content"), ANY),
    ("OpenAI, docs: conversation state", 404, said("Item with id 'rs_1' not found. Items are not persisted when `store` is set to false."), ANY),
]
# fmt: on


def sent(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


@pytest.mark.parametrize(
    ("status", "body", "about"),
    [row[1:] for row in WORDINGS],
    ids=[f"{row[0]}-{row[3]}" for row in WORDINGS],
)
def test_what_upstreams_say(status: int, body: Any, about: Complaint) -> None:
    assert complaint(status, sent(body)) is about


# -- bodies of any kind ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "about"),
    [
        (400, b"", ANY),
        (400, b"<html>Bad Request</html>", ANY),
        (422, b"Unsupported param: tools", ANY),
        (400, b"\xff\xfe", ANY),
        (400, b"[" * 100_000, ANY),
        (500, b"", FINAL),
        (500, b"function timed out", FINAL),
        (413, b"too large", FINAL),
        (401, b'{"error": {"message": "tools are not supported"}}', FINAL),
        (429, b'{"error": {"message": "tools are not supported"}}', FINAL),
        (409, b'{"error": {"message": "tools are not supported"}}', FINAL),
    ],
)
def test_bodies_of_any_kind(status: int, body: bytes, about: Complaint) -> None:
    assert complaint(status, body) is about


@pytest.mark.parametrize(
    "body",
    [
        said(
            "Invalid value: 'this model does not support tools'. Supported values are: 'low' and 'high'."
        ),
        {
            "detail": [
                {
                    "type": "literal_error",
                    "loc": ["body", "effort"],
                    "msg": "Bad",
                    "input": "no tools supported",
                }
            ]
        },
        {
            "detail": [
                {
                    "msg": "Input should be 'low' [input_value='does not support tools', input_type=str]"
                }
            ]
        },
        said(
            "invalid prompt template",
            failed="tools are not supported",
            request={"message": "no tools here"},
        ),
    ],
    ids=["quoted", "FastAPI's input", "Pydantic's text", "other members"],
)
def test_quotations_of_the_request_say_nothing(body: Any) -> None:
    assert complaint(400, json.dumps(body).encode()) is ANY


@pytest.mark.parametrize(
    "name", ["my-tool-7b", "hhao/coder-tools", "r1-tool-calling:14b", "fire-function-v2"]
)
@pytest.mark.parametrize("mark", ["`", "'", '"'])
def test_the_name_of_a_model_says_nothing(name: str, mark: str) -> None:
    for wording in (
        "model {} not found, try pulling it first",
        "The model {} does not exist or you have no access to it.",
    ):
        assert meant(400, wording.format(f"{mark}{name}{mark}")) is FINAL
    assert meant(400, f"Model {mark}{name}{mark} is not supported.") is ANY
    assert meant(400, f"Model {name} is not supported here.") is ANY
    assert meant(500, f"Model {name} has crashed.") is FINAL


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_without_a_parser_for_calls_refuses_tools(status: int) -> None:
    assert meant(status, "Internal server error: Unsupported tool_call_parser: None") is ANY
    assert (
        meant(
            status,
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        )
        is ANY
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
        (
            {
                "error": {
                    "message": "Failed to call a function.",
                    "code": "tool_use_failed",
                    "status_code": 400,
                }
            },
            400,
        ),
        ({"error": {"message": "boom", "type": "internal_server_error"}}, 500),
        ({"error": {"message": "bad", "type": "invalid_request_error"}}, 400),
        ({"error": "bad"}, 400),
        ({"error": None, "choices": []}, 0),
        ({"choices": []}, 0),
        ([], 0),
        # OpenRouter, in the choice; Gemini's list; MiniMax; vLLM's and FastChat's own object
        ({"choices": [{"delta": {}, "error": {"code": 502, "message": "no"}}]}, 502),
        ([{"error": {"code": 400, "message": "no"}}], 400),
        (
            {"base_resp": {"status_code": 2013, "status_msg": "invalid params"}, "choices": None},
            400,
        ),
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
    assert len(error_text(json.dumps({"detail": texts}).encode()).quoted) <= MOST
    assert complaint(400, json.dumps({"detail": [{"msg": "no tools"}, *texts]}).encode()) is ANY


def test_the_shape_of_a_request_is_its_members() -> None:
    shapes = [
        CHAT.parse(json.dumps({"model": model, "messages": [], **more}).encode()).shape
        for model, more in (
            ("a", {}),
            ("b", {}),
            ("a", {"response_format": 3}),
            ("a", {"x" * 9_999: 1}),
        )
    ]
    assert shapes[0] == shapes[1] and len(set(shapes)) == 3 and max(map(len, shapes)) == 16
