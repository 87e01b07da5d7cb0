"""The README and the docs are right: links lead somewhere, flags and modules exist, policies load,
examples run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proxy import cli, policies
from tests.fake_upstream import StrictUpstream, text
from tests.serving import Proxy

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
}
README = PAGES["README.md"]
OPERATIONS = PAGES["docs/operations.md"]
ARCHITECTURE = PAGES["docs/architecture.md"]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "proxy").rglob("*.py")
}

SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "proxy").rglob("*.py"))

each_page = pytest.mark.parametrize("name", PAGES)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_readmes_policy_loads(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(tenant: .*?)```", README, re.DOTALL)
    (tmp_path / "acme.yaml").write_text(example, encoding="utf-8")
    environment = {"ACME_CLIENT_KEY": "client-key", "ACME_OPENAI_KEY": "upstream-key"}
    loaded = policies.load(tmp_path, environment)
    assert not loaded.warnings
    [policy] = loaded.all()
    assert policy.tenant == "acme"
    assert policy.for_model("gpt-4.1-mini").offload.max_total_tokens == 100_000


@each_page
def test_links_in_the_docs_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[name]):
        assert ((ROOT / name).parent / target).exists(), target


def test_every_page_of_the_docs_is_linked() -> None:
    linked = {
        target
        for page in PAGES.values()
        for target in re.findall(r"\]\((?:docs/)?([^)#:/]+\.md)", page)
    }
    assert {Path(name).name for name in PAGES if name != "README.md"} <= linked


def test_modules_on_the_architecture_page_exist() -> None:
    named = {
        word.replace("/", ".") for word in re.findall(r"`((?:[a-z_]+/)+[a-z_]+)`", ARCHITECTURE)
    }
    for label in re.findall(r'\["([^"<]+)', ARCHITECTURE):
        first, *others = label.split(", ")
        package = first.rpartition("/")[0]
        named |= {
            name.replace("/", ".") for name in (first, *(f"{package}/{other}" for other in others))
        }
    assert {f"proxy.{name}" for name in named} <= MODULES
    assert set(re.findall(r"`(proxy(?:\.\w+)+)`", ARCHITECTURE)) <= MODULES


@each_page
def test_files_named_in_the_docs_exist(name: str) -> None:
    for path, test in re.findall(
        r"`((?:proxy|tests|docs|policies)/[\w./-]+?)(?:::(\w+))?`", PAGES[name]
    ):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), test


@cache
def tools() -> str:
    """The sources of tests and benchmarks."""
    found = (path for place in ("tests", "bench") for path in (ROOT / place).rglob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in found)


@each_page
def test_flags_headers_and_metrics_in_the_docs_exist(name: str) -> None:
    page = PAGES[name]
    for word in {
        *re.findall(r"x-offload-[a-z-]*[a-z]", page),
        *re.findall(r"offload_\w+_total", page),
    }:
        assert word.removeprefix("offload_").removesuffix("_total") in SOURCES, word
    for flag in re.findall(r"(?<=`--)[a-z-]+", page):
        assert flag in SOURCES or flag.replace("-", "_") in SOURCES or f'"--{flag}"' in tools(), (
            flag
        )


@each_page
def test_make_targets_in_the_docs_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for targets in re.findall(r"(?:`|^    )make ([a-z -]+?)(?:`| +#|$)", PAGES[name], re.MULTILINE):
        assert all(
            re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets.split()
        ), targets


@each_page
def test_modules_run_in_the_docs_exist(name: str) -> None:
    for module in re.findall(r"`python -m ((?:tests|bench)\.\w+(?:\.\w+)?)", PAGES[name]):
        assert any(
            (ROOT / f"{module.replace('.', '/')}{end}").is_file() for end in (".py", "/__main__.py")
        ), module


@each_page
def test_parts_of_benchmarks_in_the_docs_exist(name: str) -> None:
    named = re.findall(r"`python -m bench\.(savings|bounds) ([a-z ]+)[`-]", PAGES[name])
    for program, parts in named:
        about = (ROOT / f"bench/{program}.py").read_text(encoding="utf-8")
        for part in parts.split():
            assert f"\n- *{part}*: " in about, (program, part)


@each_page
def test_commands_in_the_docs_are_accepted(name: str) -> None:
    """The blocks that are meant to be typed: our own command parses each of them."""
    for line in re.findall(r"^    offload-proxy (.*)$", PAGES[name], re.MULTILINE):
        words = shlex.split(line, comments=True)
        assert cli.parser().parse_args(words), line


RESULT = (
    "\n".join(f"line {number}: nothing" for number in range(3_000)) + "\nthe last one: a time-out\n"
)
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
    """Runs an example of the docs against a proxy, beside its `conversation.json`: its output."""
    up.respond(
        lambda _: text("<state_snapshot><overall_goal>find out why</overall_goal></state_snapshot>")
    )
    proxy = serve({"default": {"upstream": {"base_url": up.url}}})
    (tmp_path / "conversation.json").write_text(json.dumps(CONVERSATION), encoding="utf-8")

    def run(code: str, *command: str) -> str:
        code = code.replace("http://127.0.0.1:8787", proxy.root)
        environment = {
            **os.environ,
            "OPENAI_API_KEY": "k",
            "NO_PROXY": "*",
            "PYTHONIOENCODING": "utf-8",
        }
        done = subprocess.run(
            [*command, code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_python_example_of_the_operations_runs(example: Callable[..., str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", OPERATIONS, re.DOTALL)
    shown = example(f"{code}\nprint(json.dumps([messages, first_page]))", sys.executable, "-c")
    messages, first_page = json.loads(shown)
    assert "(detailed result is stored in /context_store/" in messages[2]["content"]
    assert first_page == "".join(RESULT.splitlines(keepends=True)[:100])


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_curl_examples_of_the_operations_run(example: Callable[..., str]) -> None:
    [code] = re.findall(r"```bash\n(.*?)```", OPERATIONS, re.DOTALL)
    auth, offload, grep, read = code.splitlines()
    [path] = json.loads(example(f"{auth}\n{offload}", "sh", "-ec"))["metadata"]["write_file_dict"]
    name = path.removeprefix("/context_store/")
    found = json.loads(example(f"{auth}\n{grep}", "sh", "-ec"))
    assert f"\nFile: {name}\nL3001: the last one: a time-out\n" in found["answer"]
    page = json.loads(example(f"{auth}\n{read.replace('NAME.txt', name)}", "sh", "-ec"))
    assert page["answer"] == "".join(RESULT.splitlines(keepends=True)[:100])


def locked_versions() -> set[str]:
    """The versions of all packages that the tests install, without the platform that some have
    behind them."""
    tests = ROOT / "tests"
    locks = [ROOT / "constraints.txt", *tests.glob("clients/*.txt"), *tests.glob("suites/*.txt")]
    locks.append(tests / "servers.txt")
    found = {
        version
        for path in locks
        for version in re.findall(r"^[\w.-]+==(\S+)", path.read_text(), re.MULTILINE)
    }
    for path in tests.glob("clients/*/package-lock.json"):
        packages = json.loads(path.read_text())["packages"].values()
        found |= {package.get("version", "").partition("-")[0] for package in packages}
    return found


def test_the_clients_page_has_the_versions_that_the_tests_run() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d[\d., ]+) \|", PAGES["docs/clients.md"], re.MULTILINE)
    assert len(rows) > 40
    locked = locked_versions()
    stale = [
        (client, version)
        for client, ones in rows
        for version in ones.split(", ")
        if version not in locked
    ]
    assert not stale
