"""The operations' OpenAPI 3.1 document, made from the structs that parse their parameters, so the two always agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from proxy.operations.parameters import ALIASES, Find, OffloadParameters, ReadFile, Search

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"

_ENVELOPE: Json = {
    "type": "object",
    "required": ["success", "answer", "messages", "metadata"],
    "properties": {
        "success": {"type": "boolean"},
        "answer": {"type": "string", "description": "the result, or the reason of a failure"},
        "messages": {
            "type": "array",
            "description": "offload operations only: the messages to continue with; after a failure the caller's own, "
            "except for a caller who was refused before the body was read (401, 403, 503)",
        },
        "metadata": {"type": "object"},
    },
}

_HEALTH: Json = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}

_FAULTS = {
    "400": "The request is not valid; `answer` says where and why",
    "401": "No key, or an unknown one",
    "404": "No file or directory of this name",
    "405": "Not a POST",
    "413": "The body is too large",
    "500": "A bug of this server",
    "502": "The model that writes summaries failed",
    "503": "The store failed, or there are too many requests",
    "504": "The model that writes summaries did not answer in time",
}


def _schemas(types: Sequence[type]) -> dict[str, Any]:
    """Return the schemas of these types and of the types that they refer to, by their public names."""
    _, found = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas: dict[str, Any] = msgspec.json.decode(_public(msgspec.json.encode(found).decode()))
    return schemas


def _public(text: str) -> str:
    """Replace class names by the document's names: `OffloadParameters` becomes `Offload`."""
    return re.sub(r"(?<=[a-z])Parameters?\b", "", text)


@cache
def description() -> bytes:
    """Return the document as JSON."""
    types = (OffloadParameters, Search, Find, ReadFile)
    schemas = _schemas(types)
    for kind in types:
        _add_aliases(schemas[_public(kind.__name__)])
    schemas["Compact"] = schemas["Compress"] = _without_mode(schemas["Offload"])
    schemas["Envelope"] = _ENVELOPE
    paths = {
        "/health": _health(),
        "/context_offload": _post("Move old content out of a conversation", "Offload"),
        "/context_compact": _post("The same in compact mode", "Compact"),
        "/context_compress": _post("The same in compress mode; keeps 5 messages by default", "Compress"),
        "/grep": _post("Search files: a regular expression below a directory, or a text in one file", "Find", "Search"),
        "/read_file": _post("Read a file, or some of its lines", "ReadFile"),
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Offload Proxy: operations", "version": "1"},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}],
        }
    )


def _post(summary: str, *names: str) -> Json:
    references = [{"$ref": _REFERENCE.format(name=name)} for name in names]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    envelope = {"$ref": _REFERENCE.format(name="Envelope")}
    replies = {"200": "Done", **_FAULTS}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {status: _reply(text, envelope) for status, text in replies.items()},
        }
    }


def _reply(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _health() -> Json:
    return {
        "get": {
            "summary": "Whether this server works; with `deep=1` also whether its store and its upstreams do",
            "security": [],
            "parameters": [{"name": "deep", "in": "query", "schema": {"enum": ["0", "1"]}}],
            "responses": {
                "200": _reply("It does", _HEALTH),
                "403": {"description": "`deep=1` is for this server's operators"},
                "503": _reply("The store or an upstream does not", _HEALTH),
            },
        }
    }


def _add_aliases(schema: Json) -> None:
    """Add the older names of parameters. Either name satisfies a required parameter."""
    properties, required = schema["properties"], schema["required"]
    choices = []
    for alias, name in ALIASES.items():
        if name in properties and alias not in properties:
            properties[alias] = properties[name] | {"deprecated": True, "description": f"older name of `{name}`"}
            if name in required:
                required.remove(name)
                choices.append({"anyOf": [{"required": [name]}, {"required": [alias]}]})
    if choices:
        schema["allOf"] = choices


def _without_mode(schema: Json) -> Json:
    modes = {"context_manage_mode", "working_summary_mode"}
    return schema | {"properties": {key: value for key, value in schema["properties"].items() if key not in modes}}
