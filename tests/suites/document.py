"""Prints an OpenAPI document of an SDK: python document.py openai /v1 > openapi.json

The SDK's resources name method, path and type of every reply. A mock server that follows this
document gives replies that the SDK's tests accept. Run it with the Python that has the SDK.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

from pydantic import TypeAdapter

METHODS = {
    "_get": "get",
    "_post": "post",
    "_put": "put",
    "_patch": "patch",
    "_delete": "delete",
    "_get_api_list": "get",
}


def document(sdk: str, prefix: str) -> dict[str, Any]:
    """Return the document of all resources of a package. `prefix` begins each path."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    resources = importlib.import_module(f"{sdk}.resources")
    for found in pkgutil.walk_packages(resources.__path__, f"{sdk}.resources."):
        module = importlib.import_module(found.name)
        for call in _calls(module):
            if (path := _path(call)) is not None:
                operation = paths.setdefault(prefix + path, {}).setdefault(_method(call), {})
                _describe(operation, path, _reply(module, call), call, schemas)
    info = {"title": sdk, "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _calls(module: ModuleType) -> Iterator[ast.Call]:
    with open(cast("str", module.__file__), encoding="utf-8") as source:
        tree = ast.parse(source.read())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and node.args
        ):
            yield node


def _method(call: ast.Call) -> str:
    given = [
        word.value.value
        for word in call.keywords
        if word.arg == "method" and isinstance(word.value, ast.Constant)
    ]
    return str(given[0]) if given else METHODS[cast("ast.Attribute", call.func).attr]


def _path(call: ast.Call) -> str | None:
    first = call.args[0]
    if isinstance(first, ast.Call):  # path_template("/x/{id}", id=id)
        first = first.args[0]
    text = first.value if isinstance(first, ast.Constant) else None
    return text.split("?")[0] if isinstance(text, str) else None


def _reply(module: ModuleType, call: ast.Call) -> Any:
    """Return the type of the reply's body."""
    named = {word.arg: word.value for word in call.keywords}
    source = named.get("page") or named.get("cast_to")
    if isinstance(source, ast.Call) and len(source.args) == 2:  # cast(Any, Union)
        source = source.args[1]
    try:
        return eval(ast.unparse(source), vars(module)) if source else None
    except (NameError, TypeError):
        return None


def _describe(
    operation: dict[str, Any], path: str, reply: Any, call: ast.Call, schemas: dict[str, Any]
) -> None:
    content: dict[str, Any] = {}
    if isinstance(reply, type) and "Binary" in reply.__name__:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    elif reply not in (None, type(None)):
        content["application/json"] = {"schema": _schema(reply, schemas)}
    if any(word.arg == "stream_cls" for word in call.keywords):
        content["text/event-stream"] = {"schema": {"type": "object"}}
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in {part.split("}")[0] for part in path.split("{")[1:]}
    ]
    operation["responses"] = {
        "200": {"description": "the reply", **({"content": content} if content else {})}
    }


def _schema(reply: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    reply_number = len(schemas)  # classes of several modules share a name
    made = TypeAdapter(reply).json_schema(
        ref_template=f"#/components/schemas/{reply_number}.{{model}}"
    )
    schemas.update(
        {f"{reply_number}.{name}": schema for name, schema in made.pop("$defs", {}).items()}
    )
    return made


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(sys.argv[1], sys.argv[2])))
