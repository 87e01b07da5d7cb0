"""The operations' description is made from what reads their parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.operations import description
from proxy.operations.schema import ALIASES

DOCUMENT: dict[str, Any] = json.loads(description())
SCHEMAS = DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_older_names_have_the_schema_of_the_name(alias: str, name: str) -> None:
    [schema] = [schema for kind in ("Offload", "ReadFile") if name in (schema := SCHEMAS[kind])["properties"]]
    older = schema["properties"][alias]
    kept = {"type", "anyOf", "enum", "default", "minLength", "maxLength", "minimum"}
    assert {key: older[key] for key in older if key in kept} == {
        key: value for key, value in schema["properties"][name].items() if key in kept
    }
    assert older["deprecated"]


def test_either_name_of_a_required_parameter_is_enough() -> None:
    assert SCHEMAS["Offload"]["required"] == ["messages"]
    assert SCHEMAS["Offload"]["anyOf"] == [{"required": ["store_dir"]}, {"required": ["storage_path"]}]
    assert SCHEMAS["Find"]["required"] == ["pattern", "file_path"], "a name of its own there"


def test_operations_with_a_fixed_mode_have_no_mode_parameter() -> None:
    assert not {"context_manage_mode", "working_summary_mode"} & set(SCHEMAS["Compact"]["properties"])
