"""What the README shows works: its policy loads, its flags exist, its files are there, its examples run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy import policies
from tests.serving import Proxy
from tests.upstream import StrictUpstream, text

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_policy_loads(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(tenant: .*?)```", README, re.DOTALL)
    (tmp_path / "acme.yaml").write_text(example, encoding="utf-8")
    environment = {"ACME_CLIENT_KEY": "client-key", "ACME_OPENAI_KEY": "upstream-key"}
    [policy] = policies.load(tmp_path, environment).all()
    assert policy.tenant == "acme"
    assert policy.for_model("gpt-4.1-mini").offload.max_total_tokens == 100_000


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_flags_and_headers_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "proxy").rglob("*.py"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in {*re.findall(r"x-offload-[a-z-]*[a-z]", README), *re.findall(r"offload_\w+_total", README)}:
        assert name.removeprefix("offload_").removesuffix("_total") in sources
    benchmarks = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/bench").glob("*.py"))
    for flag in re.findall(r"(?<=`--)[a-z-]+", README):
        assert flag in sources or flag.replace("-", "_") in sources or f'"--{flag}"' in benchmarks, flag
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert f"{target}:" in makefile


def test_its_charts_are_there() -> None:
    assert all((ROOT / path).is_file() for path in re.findall(r"\]\((docs/[^)]+)\)", README))


def test_its_commands_are_modules() -> None:
    for module in re.findall(r"`python -m (tests\.bench\.\w+)", README):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


RESULT = "\n".join(f"line {number}: nothing" for number in range(3_000)) + "\nthe last one: a time-out\n"
CALL = {"id": "call_1", "type": "function", "function": {"name": "fetch", "arguments": "{}"}}
CONVERSATION: dict[str, Any] = {
    "store_dir": "/context_store",
    "messages": [
        {"role": "user", "content": "Why does it hang?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        {"role": "user", "content": "And now?"},
    ],
}


@pytest.fixture
def example(up: StrictUpstream, serve: Callable[..., Proxy], tmp_path: Path) -> Callable[..., str]:
    """Runs an example of the README against a proxy, beside its `conversation.json`: its output."""
    up.respond(lambda _: text("<state_snapshot><overall_goal>find out why</overall_goal></state_snapshot>"))
    proxy = serve({"default": {"upstream": {"base_url": up.url}}})
    (tmp_path / "conversation.json").write_text(json.dumps(CONVERSATION), encoding="utf-8")

    def run(code: str, *command: str) -> str:
        code = code.replace("http://127.0.0.1:8787", proxy.root)
        environment = {**os.environ, "OPENAI_API_KEY": "k", "NO_PROXY": "*", "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(
            [*command, code], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_its_python_example_of_the_operations_runs(example: Callable[..., str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shown = example(f"{code}\nprint(json.dumps([messages, first_page]))", sys.executable, "-c")
    messages, first_page = json.loads(shown)
    assert "(detailed result is stored in /context_store/" in messages[2]["content"]
    assert first_page == "".join(RESULT.splitlines(keepends=True)[:100])


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_its_curl_examples_run(example: Callable[..., str]) -> None:
    [code] = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    auth, offload, grep, read = code.splitlines()
    [path] = json.loads(example(f"{auth}\n{offload}", "sh", "-ec"))["metadata"]["write_file_dict"]
    name = path.removeprefix("/context_store/")
    found = json.loads(example(f"{auth}\n{grep}", "sh", "-ec"))
    assert f"\nFile: {name}\nL3001: the last one: a time-out\n" in found["answer"]
    page = json.loads(example(f"{auth}\n{read.replace('NAME.txt', name)}", "sh", "-ec"))
    assert page["answer"] == "".join(RESULT.splitlines(keepends=True)[:100])
