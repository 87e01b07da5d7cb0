"""A scripted Responses API that is as strict as the real one, and in its words where they are
known.

It remembers what it stored, so that it can refuse unknown ids, reasoning that has lost the item
after it, and calls and results that do not pair. `ResponsesApi` answers the requests of a
`StrictUpstream`:

    up.respond(api := ResponsesApi())
    api.script([reasoning("hm"), call("grep", {"pattern": "x"})], [say("Done.")])
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.dialects.scripted import Reply, ScriptedApi, pieces
from tests.fake_upstream import Pieces, Recorded, whole
from tests.strict import Refused, approximate_tokens

Json = dict[str, Any]

PARAMETERS = frozenset(
    """
    background client_metadata conversation context_management include input instructions max_output_tokens
    max_tool_calls metadata
    model parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning
    safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p
    truncation user verbosity
    """.split()  # noqa: SIM905 - a list of 30 strings is 30 lines
)
ITEM_FIELDS = {
    "message": {"type", "id", "role", "content", "status", "phase"},
    "reasoning": {"type", "id", "summary", "content", "encrypted_content", "status"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status", "namespace"},
    "function_call_output": {"type", "id", "call_id", "output", "status"},
    "custom_tool_call": {"type", "id", "call_id", "name", "input", "status"},
    "custom_tool_call_output": {"type", "id", "call_id", "output"},
    "item_reference": {"type", "id"},
    "additional_tools": {"type", "id", "role", "tools"},
    "web_search_call": {"type", "id", "status", "action"},
    "tool_search_call": {"type", "id", "call_id", "execution", "status", "arguments"},
    "tool_search_output": {"type", "id", "call_id", "execution", "status", "tools"},
}
OPENERS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "tool_search_call": "tool_search_output",
}
LEAST_OUTPUT = 16


# -- what a model says -----------------------------------------------------------------------------


def say(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part]}


def call(name: str, arguments: Any = None, **more: Any) -> Json:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"type": "function_call", "name": name, "arguments": text, "status": "completed", **more}


def reasoning(summary: str = "") -> Json:
    parts = [{"type": "summary_text", "text": summary}] if summary else []
    return {"type": "reasoning", "summary": parts}


RESULT_PARTS = {
    "input_text": {"type", "text", "prompt_cache_breakpoint"},
    "input_image": {"type", "image_url", "file_id", "detail", "prompt_cache_breakpoint"},
    "input_file": {
        "type",
        "filename",
        "file_data",
        "file_url",
        "file_id",
        "detail",
        "prompt_cache_breakpoint",
    },
}


def _check_part(where: str, part: Json) -> None:
    """Refuse what cannot be in the result of a function's call."""
    if part["type"] not in RESULT_PARTS:
        raise Refused(f"Invalid value: '{part['type']}'.", f"{where}.type")
    if unknown := set(part) - RESULT_PARTS[part["type"]]:
        raise Refused(f"Unknown parameter: '{where}.{min(unknown)}'.", code="unknown_parameter")
    data = part.get("image_url") or part.get("file_data") or ""
    if data.startswith("data:"):
        try:
            base64.b64decode(data.partition(";base64,")[2], validate=True)
        except ValueError as error:
            raise Refused(
                f"Invalid '{where}': the URL does not contain valid base64.", where
            ) from error


# -- the API ---------------------------------------------------------------------------------------


class ResponsesApi(ScriptedApi):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.raw: list[bytes] = []
        self._items: dict[str, Json] = {}
        self._before: dict[str, str] = {}  # item → the reasoning directly before it
        self._after: dict[str, str] = {}  # reasoning → the item directly after it
        self._behind: dict[str, Json] = {}  # encrypted reasoning → the item directly after it
        self._histories: dict[str, list[Json]] = {}
        self.kept: dict[str, Json] = {}
        """The replies that are stored, by their ids."""
        self.encrypted: set[str] = set()

    def __call__(self, request: Recorded) -> Pieces:
        if request.method in ("GET", "DELETE"):
            return self._stored(request)
        assert request.method == "POST", request.path
        assert request.path.endswith("/responses"), request.path
        body = request.json
        try:
            history = self.checked(body)
        except Refused as refused:
            self.refused.append(refused.message)
            return whole(refused.body(), refused.status)
        self.raw.append(request.body)
        return self._sent(body, self._respond(body, history, self._next(body)))

    def _stored(self, request: Recorded) -> Pieces:
        """Show or delete a stored reply."""
        id = request.path.partition("?")[0].rpartition("/")[2]
        if id not in self.kept:
            return whole(Refused(f"Response with id '{id}' not found.", status=404).body(), 404)
        if request.method == "GET":
            return whole(self.kept[id])
        del self.kept[id], self._histories[id]
        return whole({"id": id, "object": "response", "deleted": True})

    # -- checks --

    def checked(self, body: Json) -> list[Json]:
        """Return the whole history of a request. Raises Refused."""
        for name in body:
            if name not in PARAMETERS:
                raise Refused(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        if (body.get("max_output_tokens") or LEAST_OUTPUT) < LEAST_OUTPUT:
            raise Refused(
                "Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16"
            )
        self._check_tools(body)
        given = body.get("input") or []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        earlier = body.get("previous_response_id")
        if earlier is not None and earlier not in self._histories:
            raise Refused(
                f"Previous response with id '{earlier}' not found.",
                "previous_response_id",
                status=400,
            )
        history = [*(self._histories[earlier] if earlier else []), *items]
        for index, item in enumerate(items):
            self._check_item(index, item, stored=body.get("store", True))
        self._check_ids(history)
        self._check_pairs(history)
        self._check_reasoning(items)
        return history

    def _check_tools(self, body: Json) -> None:
        names = [tool["name"] for tool in body.get("tools") or [] if tool["type"] == "function"]
        for tool in body.get("tools") or []:
            if tool["type"] == "function" and not isinstance(tool.get("name"), str):
                raise Refused("Missing required parameter: 'tools[0].name'.")
        if len(names) != len(set(names)):
            raise Refused("Tool names must be unique.")
        choice = body.get("tool_choice")
        if (
            isinstance(choice, dict)
            and choice["type"] == "function"
            and choice["name"] not in names
        ):
            raise Refused(
                f"Tool choice '{choice['name']}' not found in 'tools' parameter.", "tool_choice"
            )

    def _check_item(self, index: int, item: Json, *, stored: bool) -> None:
        kind = item.get("type", "message")
        if kind not in ITEM_FIELDS:
            raise Refused(f"Invalid value: '{kind}'.", f"input[{index}].type")
        if unknown := set(item) - ITEM_FIELDS[kind]:
            raise Refused(
                f"Unknown parameter: 'input[{index}].{min(unknown)}'.", code="unknown_parameter"
            )
        if kind == "message" and item.get("role") not in (
            "user",
            "assistant",
            "system",
            "developer",
        ):
            raise Refused(f"Invalid value: '{item.get('role')}'.", f"input[{index}].role")
        if kind == "function_call_output" and not isinstance(item.get("output"), str | list):
            raise Refused(f"Missing required parameter: 'input[{index}].output'.")
        for part in item["output"] if isinstance(item.get("output"), list) else ():
            _check_part(f"input[{index}].output", part)
        encrypted = item.get("encrypted_content")
        if encrypted is not None and encrypted not in self.encrypted:
            raise Refused(
                "The encrypted content could not be verified.", code="invalid_encrypted_content"
            )
        if (
            kind in ("reasoning", "item_reference")
            and encrypted is None
            and item.get("id") not in self._items
        ):
            hint = "" if stored else " Items are not persisted when `store` is set to false."
            raise Refused(f"Item with id '{item.get('id')}' not found.{hint}", "input", status=404)

    def _check_ids(self, history: Iterable[Json]) -> None:
        ids = [item["id"] for item in history if item.get("id")]
        for id in ids:
            if ids.count(id) > 1:
                raise Refused(
                    f"Duplicate item found with id {id}. Remove duplicate items from your input."
                )

    def _check_pairs(self, history: Iterable[Json]) -> None:
        called: dict[str, str] = {}
        for item in map(self._resolved, history):
            kind = item.get("type", "message")
            if kind in OPENERS:
                called[item["call_id"]] = OPENERS[kind]
            elif kind in OPENERS.values() and called.pop(item["call_id"], None) != kind:
                raise Refused(
                    f"No tool call found for function call output with call_id {item['call_id']}.",
                    "input",
                )
        if called:
            raise Refused(f"No tool output found for function call {min(called)}.", "input")

    def _check_reasoning(self, items: Sequence[Json]) -> None:
        encrypted = [item["encrypted_content"] for item in items if item.get("encrypted_content")]
        if len(encrypted) > len({*encrypted}):
            raise Refused(
                "Duplicate item found. Remove duplicate items from your input and try again.",
                "input",
            )
        for place, item in enumerate(items):
            behind = items[place + 1] if place + 1 < len(items) else {}
            following = behind.get("id")
            wanted = self._after.get(item.get("id", ""))
            other = self._behind.get(item.get("encrypted_content") or "")
            kind = behind.get("type", "message" if "role" in behind else None)
            shape = {"type": kind, "call_id": behind.get("call_id")}
            lost = other is not None and any(
                value != other.get(key) for key, value in shape.items()
            )
            if lost or (wanted is not None and following != wanted):
                said = f"Item '{item.get('id')}' of type 'reasoning' was provided without its required following item."
                raise Refused(said, "input")
            preceding = items[place - 1].get("id") if place else None
            needed = self._before.get(item.get("id", ""))
            if needed is not None and preceding != needed:
                kind = item["type"]
                said = f"Item '{item['id']}' of type '{kind}' was provided without its required 'reasoning' item"
                raise Refused(f"{said}: '{needed}'.", "input")

    def _resolved(self, item: Json) -> Json:
        return self._items[item["id"]] if item.get("type") == "item_reference" else item

    # -- replies --

    @staticmethod
    def events_of(reply: Json, split: int) -> Iterator[Json]:
        return events_of(reply, split)

    def _respond(self, body: Json, history: list[Json], reply: Reply) -> Json:
        items = [self._item(body, item) for item in reply]
        cut = [item for item in items if item.get("status") == "incomplete"]
        response = {
            "id": f"resp_{self._made(next(self._numbers))}",
            "object": "response",
            "created_at": 1_700_000_000,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "model": body["model"],
            "output": items,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "usage": self._usage(history, items),
            "metadata": {},
        }
        for one, two in itertools.pairwise(items):
            if one.get("encrypted_content"):
                self._behind[one["encrypted_content"]] = two
        if body.get("store", True):
            self._histories[response["id"]] = [*history, *items]
            self.kept[response["id"]] = response
            for item in items:
                self._items[item["id"]] = item
            for one, two in itertools.pairwise(items):
                if one["type"] == "reasoning":
                    self._after[one["id"]] = two["id"]
                    self._before[two["id"]] = one["id"]
        return response

    def _item(self, body: Json, said: Json) -> Json:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(
            said["type"], "it"
        )
        number = self._made(next(self._numbers))
        item = {"id": f"{prefix}_{number}", **said}
        if said["type"] in OPENERS:
            item = {"call_id": f"call_{number}", **item}
        if said["type"] == "reasoning" and "reasoning.encrypted_content" in (
            body.get("include") or ()
        ):
            item["encrypted_content"] = f"gAAAA-{number}"
            self.encrypted.add(item["encrypted_content"])
        return item

    def _usage(self, history: list[Json], items: list[Json]) -> Json:
        before, after = (
            approximate_tokens(json.dumps(history)),
            approximate_tokens(json.dumps(items)),
        )
        thought = sum(
            approximate_tokens(json.dumps(item)) for item in items if item["type"] == "reasoning"
        )
        return {
            "input_tokens": before,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": after,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": before + after,
        }


# -- streams ---------------------------------------------------------------------------------------


def events_of(response: Json, split: int = 8) -> Iterator[Json]:
    """The events of a streamed response, numbered."""
    for number, event in enumerate(_events(response, split)):
        kind = event.pop("type")
        yield {"type": kind, "sequence_number": number, **event}


def _events(response: Json, split: int) -> Iterator[Json]:
    begun = response | {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        yield from _item_events(index, item, split)
    yield {"type": f"response.{response['status']}", "response": response}


def _item_events(index: int, item: Json, split: int) -> Iterator[Json]:
    about = {"item_id": item["id"], "output_index": index}
    empty = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "reasoning": {"summary": []},
    }
    begun = (
        item | empty.get(item["type"], {}) | ({"status": "in_progress"} if "status" in item else {})
    )
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"], split):
            yield {"type": "response.function_call_arguments.delta", **about, "delta": piece}
        yield {
            "type": "response.function_call_arguments.done",
            **about,
            "arguments": item["arguments"],
        }
    for place, part in enumerate(item.get("summary", [])):
        where = {**about, "summary_index": place}
        yield {
            "type": "response.reasoning_summary_part.added",
            **where,
            "part": part | {"text": ""},
        }
        for piece in pieces(part["text"], split):
            yield {"type": "response.reasoning_summary_text.delta", **where, "delta": piece}
        yield {"type": "response.reasoning_summary_text.done", **where, "text": part["text"]}
        yield {"type": "response.reasoning_summary_part.done", **where, "part": part}
    for place, part in enumerate(item.get("content", [])):
        where = {**about, "content_index": place}
        yield {"type": "response.content_part.added", **where, "part": part | {"text": ""}}
        for piece in pieces(part["text"], split):
            yield {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
        yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
