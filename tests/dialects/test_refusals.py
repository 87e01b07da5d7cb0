"""What may look like a refusal of ours and is none. The real wordings are in `test_overflow`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.dialects.refusals import MOST, complaint, error_status, error_text
from proxy.plan.turn import Addition, Complaint, Verdict
from tests.doubling import assert_linear

FINAL = Verdict.FINAL
ANY = Addition.ANY


def said(message: str, **more: Any) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


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


@pytest.mark.parametrize("name", ["my-tool-7b", "hhao/coder-tools", "r1-tool-calling:14b", "fire-function-v2"])
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
        meant(status, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set') is ANY
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
    assert len(error_text(json.dumps({"detail": texts}).encode()).told) <= MOST
    assert complaint(400, json.dumps({"detail": [{"msg": "no tools"}, *texts]}).encode()) is ANY


def test_the_shape_of_a_request_is_its_members() -> None:
    shapes = [
        CHAT.parse(json.dumps({"model": model, "messages": [], **more}).encode()).shape
        for model, more in (("a", {}), ("b", {}), ("a", {"response_format": 3}), ("a", {"x" * 9_999: 1}))
    ]
    assert shapes[0] == shapes[1] and len(set(shapes)) == 3 and max(map(len, shapes)) == 16
