"""/openapi.json describes the operations, and what the proxy answers is what it describes: schemathesis asks."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.specs.openapi.checks import ignored_auth

from proxy.operations import PATHS
from tests.acceptance.operations import World

OPERATIONS = {path.decode() for path in PATHS}
EXAMPLES = settings(
    max_examples=settings.default.max_examples // 6, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def document(world: World) -> Any:
    response = httpx.get(f"{world.proxy.root}/openapi.json", trust_env=False)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    return response.json()


def test_the_openapi_document_describes_every_operation(document: Any) -> None:
    assert document["openapi"].startswith("3.")
    assert {path for path, item in document["paths"].items() if "post" in item} == OPERATIONS


def test_the_openapi_document_is_valid(document: Any) -> None:
    schemathesis.openapi.from_dict(document).validate()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize("path", sorted(OPERATIONS))
def test_replies_match_the_openapi_document(world: World, document: Any, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=world.proxy.root)
    key = {"authorization": f"Bearer {uuid.uuid4().hex}"}

    @EXAMPLES
    @given(schema[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        # What a schema cannot say is refused too: paths that climb, patterns that are none, numbers like 2.0. And under
        # default.yaml every key is somebody's, also those that are made up to see whether keys are looked at.
        case.call_and_validate(headers=key, excluded_checks=[positive_data_acceptance, ignored_auth])

    ask()
