"""The Node SDKs make the same of our streams as of the plain replies, for every shape of the
contract suite."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.contract.apis import APIS, Api, Block
from tests.dialects.contract.test_replies import CASES, SHAPES, replies
from tests.dialects.turning import run

HERE = Path(__file__).parent
SDKS = {"chat": "openai_node", "responses": "openai_node", "messages": "anthropic_node"}

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", SDKS)
def test_a_stream_is_put_together_as_the_plain_reply(name: str) -> None:
    folder, api, shapes, plain = HERE / SDKS[name], APIS[name], list[str](), list[Any]()
    if not (folder / "node_modules" / ".package-lock.json").exists():
        pytest.skip(f"{folder.name} is not installed: make test-clients")
    streams: list[tuple[str, str]] = []
    for case in CASES:
        owner, shape, json_mode = case.values
        if owner != name:
            continue
        said = replies(api, SHAPES[str(shape)])
        members = api.json_mode if json_mode else {}
        whole, _ = run(api.turn(stream=False, **members), *map(api.whole, said))
        for way in sorted(api.encodings):
            out, _ = run(api.turn(**members), *map(api.encodings[way], said))
            streams.append((name, out.decode()))
            plain.append(json.loads(whole))
            shapes.append(f"{case.id} {way}")
    command = ["node", folder / "streams.mjs"]
    made = subprocess.run(command, input=json.dumps(streams).encode(), capture_output=True)
    assert made.returncode == 0, made.stderr.decode()
    for shape, one, other in zip(shapes, json.loads(made.stdout), plain, strict=True):
        assert [_read(api, one), api.usage(one)] == [_read(api, other), api.usage(other)], shape


def _read(api: Api, reply: Any) -> list[Block]:
    """The reply's blocks. Of chat's reasoning, which is not OpenAI's own, the SDK keeps the last
    piece."""
    return [block for block in api.blocks(reply) if api.ordered or block.kind != "think"]
