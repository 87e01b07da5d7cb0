"""Every block of code in the documents of the operations, run as it stands: only its address and
its key are replaced.

Where a block leaves something out (`[...]`), it runs a second time with that filled in.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests import documents
from tests.apps.operations.served import MODEL, Caller, operated, page, research, step, user
from tests.documents import Block

Json = dict[str, Any]

pytestmark = documents.needed

ADDRESS = "http://0.0.0.0:8002/"

DIRECTORIES = ("./cache_file/", "/workspace/context_store")
"""Where the documents keep files."""

CURLS = [block for block in documents.blocks("bash") if "curl" in block.code]
LEFT_OUT = re.compile(r"\[\.\.\.\]|^ *\.\.\.$", re.MULTILINE)


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    """A caller who has moved results of tools into these directories."""
    summarising = {"offload": {"compress": {"model": MODEL}}}
    with operated(summarising) as (proxy, _, _), Caller(proxy) as one:
        results = (f"tool {number}: {page('a result', 300)}" for number in range(4))
        history = [
            user(),
            *(
                message
                for number, text in enumerate(results)
                for message in step(f"c-{number}", text)
            ),
        ]
        for store_dir in DIRECTORIES:
            assert len(one.compact([*history, user()], store_dir=store_dir).files) == 4
        yield one


# -- curl ------------------------------------------------------------------------------------------


def curled(caller: Caller, code: str) -> list[Json]:
    """Run a block, and return what its calls print."""
    code = code.replace(ADDRESS, f"{caller.proxy.root}/")
    code = code.replace(
        "curl -X", f'curl -sS --noproxy "*" -H "Authorization: Bearer {caller.key}" -X'
    )
    done = subprocess.run(["bash", "-eu"], input=code, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    replies, rest, decoder = list[Json](), done.stdout.strip(), json.JSONDecoder()
    while rest:
        reply, end = decoder.raw_decode(rest)
        replies.append(reply)
        rest = rest[end:].lstrip()
    return replies


def filled_in(code: str) -> str:
    """Return a body with a history where the document leaves it out."""
    [asks, _] = step("call_123", "")
    code = code.replace('"tool_calls": [...]', f'"tool_calls": {json.dumps(asks["tool_calls"])}')
    code = code.replace('"messages": [...]', f'"messages": {json.dumps(research(22_000))}')
    code = code.replace('"...[8000 tokens of results]..."', json.dumps(page("paper", 8_000)))
    return re.sub(r",\s*\.\.\.\s*\]", "]", code)


@pytest.mark.parametrize("block", CURLS, ids=lambda block: block.name)
def test_a_call_with_curl_is_answered(caller: Caller, block: Block) -> None:
    replies = curled(caller, block.code)
    assert len(replies) == block.code.count("curl")
    if not LEFT_OUT.search(block.code):
        # The documents' own names of files are of nobody's.
        missing = [reply for reply in replies if not reply["success"]]
        assert all("There is no file './cache_file/" in reply["answer"] for reply in missing)
        assert bool(missing) == ("/read_file" in block.code)
        return
    assert all("The body is not a JSON object" in reply["answer"] for reply in replies)
    [reply] = curled(caller, filled_in(block.code))
    assert reply["success"], reply["answer"]
    assert reply["metadata"]["write_file_dict"] or "8000 tokens" in block.code, (
        "it is above the thresholds"
    )


@pytest.mark.parametrize("block", CURLS, ids=lambda block: block.name)
def test_a_call_without_a_key_hears_that_it_needs_one(caller: Caller, block: Block) -> None:
    [path] = set(re.findall(f"{ADDRESS}(\\w+)", block.code))
    replied = httpx.post(
        f"{caller.proxy.root}/{path}", json={}, headers={"host": "0.0.0.0:8002"}, trust_env=False
    )
    assert replied.status_code == 401
    assert (
        "Authorization: Bearer KEY" in replied.json()["answer"]
        and "allowed-hosts" not in replied.text
    )


# -- Python ----------------------------------------------------------------------------------------


class Calls:
    """`requests` for the documents' code: with the key, and with a list of what was asked and
    answered."""

    def __init__(self, key: str) -> None:
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60
        )
        self.made: list[tuple[Json, Json]] = []

    def post(self, url: str, json: Json) -> httpx.Response:
        response = self._client.post(url, json=json)
        self.made.append((json, response.json()))
        return response


def run(code: str, names: Json, root: str) -> None:
    """Run a block among these names, with what it leaves out filled in."""
    code = code.replace(ADDRESS, f"{root}/").replace("import requests\n", "")
    code = code.replace('"tool_calls": [...]', '"tool_calls": tool_calls')
    code = code.replace("[msg1, msg2, msg3, ...]", "history")
    exec(compile(code, "a document", "exec"), names)


def test_python_reads_back_every_file_that_it_finds(
    caller: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their code takes names out of answers, paths out of metadata and matches out of searches."""
    root, calls = caller.proxy.root, Calls(caller.key)
    [asks, _] = step("call_123", "")
    names: Json = {
        "__name__": "__main__",
        "requests": calls,
        "tool_calls": asks["tool_calls"],
        "history": research(30_000),
        "llm_api": SimpleNamespace(call=lambda messages: None),
        "grep": lambda **given: calls.post(f"{root}/grep", given).json(),
        "read_file": lambda **given: calls.post(f"{root}/read_file", given).json(),
    }
    cells = [*documents.blocks("code-cell")]
    others = [*documents.blocks("python")]
    assert len(cells) == 2 and len(others) >= 10
    for block in [*cells, *others]:
        run(block.code, names, root)
    reads = [
        (given["absolute_path"], reply["success"])
        for given, reply in calls.made
        if "absolute_path" in given
    ]
    code = "".join(block.code for block in [*cells, *others])
    missing = {path for path, success in reads if not success}
    assert all(f'"{path}"' in code for path in missing), (
        "only the documents' own names of files are of nobody's"
    )
    opened = {
        path["path"] if isinstance(path, dict) else path for path, success in reads if success
    }
    written = {
        match["path"]
        for match in caller.grep("tool", path=DIRECTORIES[0], glob="*.txt").metadata["matches"]
    }
    assert written <= opened
    assert any(isinstance(path, dict) for path, _ in reads), "a loop over the matches"
    assert len(re.findall(r"Loaded [\w.]+: \d+ chars", capsys.readouterr().out)) >= 2 * len(written)
