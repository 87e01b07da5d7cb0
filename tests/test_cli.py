"""The command line, as people run it: what it prints, where, and its exit codes."""

import asyncio
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from proxy import __version__, cli
from proxy.apps.operations.call import key_part
from proxy.cli import main
from proxy.policies import load, schema
from proxy.policies.tenants import identified, identify
from proxy.settings import flags
from proxy.stores import open_store
from proxy.upstream.headers import Headers
from tests import serving
from tests.clock import PATIENCE
from tests.stores.engines import redis_server

ROOT = Path(__file__).parents[1]
DAY = 86_400


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m proxy` in a process of its own, with nothing of our environment but what Python
    needs."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = serving.started(
            arguments, {"PATH": os.environ["PATH"], **environment}, out, errors
        )
        code = process.wait(PATIENCE)
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(
            arguments, code, out.read().decode(), errors.read().decode()
        )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with records of two callers and of a tenant that no policy names, some of them
    old."""
    records = {
        "default-0123456789abcdef/original/a.txt": (b"first line\nan Error here\nlast", 40 * DAY),
        "default-0123456789abcdef/round/r1": (
            b'{"text":"' + b"x" * 2000 + b"error" + b"y" * 2000 + b'"}',
            DAY,
        ),
        "default-anonymous/original/b.txt": (b"nothing\x1b[31m error \xff\n", 2 * 3600),
        "gone-0123456789abcdef/original/c.txt": (b"quiet", 400 * DAY),
    }
    asyncio.run(_fill(tmp_path, {key: value for key, (value, _) in records.items()}))
    for key, (_, age) in records.items():
        os.utime(tmp_path / key, (time.time() - age,) * 2)
    return tmp_path


async def _fill(path: Path, records: dict[str, bytes]) -> None:
    store = open_store(str(path))
    for key, value in records.items():
        assert await store.put(key, value)
    await store.close()


def columns(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["--help"], "exit codes: 0 success, 1 failure, 2"),
        (["serve", "--help"], "offload-proxy serve --upstream http://127.0.0.1:8080/v1"),
        (["check", "--help"], "[$OFFLOAD_POLICIES, else policies,"),
        (["store", "--help"], "offload-proxy store gc --dry-run"),
        (["store", "gc", "--help"], "--older-than AGE"),
        (["demo", "--help"], "\nWatch an agent"),
        (["--version"], f"offload-proxy {__version__}"),
    ],
)
def test_help(arguments: list[str], piece: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert piece in done.stdout


def test_the_version_names_the_commit_that_the_build_wrote_down(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "proxy", tmp_path / "proxy", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "proxy/commit").write_text("c56b526dfd8d688c16c5986d5b06712251ebd437\n")
    command = [sys.executable, "-m", "proxy", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"offload-proxy {__version__} (c56b526dfd8d)\n"


def test_a_package_that_has_overwritten_ours_is_named(tmp_path: Path) -> None:
    """proxy.py installs a folder of the same name: its `__init__` stands beside our modules
    then."""
    shutil.copytree(
        ROOT / "proxy", tmp_path / "proxy", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "proxy/__init__.py").write_text("from .proxy import Proxy\n")
    (tmp_path / "proxy/proxy.py").write_text("class Proxy: ...\n")
    script = "import sys; from proxy.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "offload-proxy: another package has overwritten ours, such as proxy.py"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "",
        "run",
        "serve",
        "check",
        "replay",
        "recall",
        "mcp",
        "demo",
        "store",
        "store gc",
        "store forget",
    ],
)
def test_help_is_80_columns_wide(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "82")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_the_flags_of_serve_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    groups = capsys.readouterr().out.partition("\nwhat is served:\n")
    assert [line for line in groups[0].splitlines() if line.startswith("  -")] == [
        "  -h, --help            show this help message and exit"
    ]
    assert "\nlimits:\n" in groups[2] and "\nwhat is written down:\n" in groups[2]


def test_the_groups_of_serve_name_only_its_flags() -> None:
    grouped = [flag for group in cli._GROUPS.values() for flag in group]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= {flag for flag, _ in flags()}


def test_help_loads_nothing_that_it_does_not_need() -> None:
    code = "import sys; from proxy.cli import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "proxy.cli" in loaded
    assert not loaded & {"yaml", "re2", "aiohttp", "httpx", "starlette", "uvicorn", "tiktoken"}


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frob"], "invalid choice: 'frob'"),
        (["serv"], "there is no command 'serv': did you mean serve?"),
        (
            ["serve", "--upstream", "127.0.0.1:8080/v1"],
            "--upstream: 127.0.0.1:8080/v1 has no http:// before it; expected",
        ),
        (
            ["serve", "--upstream", "http://h/v1/chat/completions"],
            "--upstream: leave out /chat/completions; expected",
        ),
        (["store"], "the following arguments are required: ACTION"),
        (["serve", "--port", "http"], "offload-proxy: --port: expected a port from 1 to 65535"),
        (
            ["serve", "--upstream", "openai"],
            "offload-proxy: --upstream: expected an address such as",
        ),
        (["serve", "--upstream", "http://localhost:8787/v1"], "is this proxy itself"),
        (
            ["serve", "--policies", "nowhere"],
            "offload-proxy: nowhere: expected a directory of policies",
        ),
        (["serve", "--store", "ftp://x"], "offload-proxy: no store is known for ftp://"),
        (
            ["check", "nowhere"],
            "offload-proxy: nowhere: expected a directory of policies: No such file or directory",
        ),
        (["check", "tests/policies"], "tests/policies: expected at least one policy"),
        (["store", "ls", "../x"], "offload-proxy: '../x': expected a namespace"),
        (["store", "ls", "--store", "ftp://x"], "offload-proxy: no store is known for ftp://"),
        (["store", "gc", "--older-than", "soon"], "offload-proxy: expected a duration such as 30d"),
        (
            ["store", "gc", "--policies", "nowhere"],
            "offload-proxy: nowhere: expected a directory of policies",
        ),
        (
            ["store", "forget", "a/b"],
            "offload-proxy: 'a/b': expected a namespace, as `store ls` lists them",
        ),
    ],
)
def test_a_users_mistake_is_a_sentence_and_exit_code_2(arguments: list[str], piece: str) -> None:
    done = run(*arguments)
    assert piece in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("command", "module"), [("mcp", "proxy.apps.operations.mcp"), ("demo", "openai")]
)
def test_a_missing_extra_is_named(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main([command]) == 2
    assert capsys.readouterr().err.endswith(f": pip install '.[{command}]'\n")


def test_ctrl_c_ends_a_command_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("proxy.cli.check.check", interrupted)
    assert main(["check"]) == 128 + signal.SIGINT


def test_a_reader_that_leaves_is_no_error_of_ours() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", "check", "--schema"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (141, b"")


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_no_error_of_ours(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, closed, None)
    code = main(["check", "policies" if closed != "stderr" else "nowhere"])
    getattr(sys, closed).close()
    assert code == (0 if closed != "stderr" else 2)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no device that is always full"
)
def test_a_full_disk_below_the_output_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["check", "--schema"]) == 1
    assert capsys.readouterr().err == "offload-proxy: No space left on device\n"


def test_check_says_what_policies_mean() -> None:
    done = run("check", "policies/examples", ACME_CLIENT_KEY="sk-a", ACME_OPENAI_KEY="sk-b", AZURE_RESOURCE="contoso",
               AZURE_OPENAI_API_KEY="sk-c", LOCAL_CLIENT_KEY="sk-d")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("policies/examples: 3 policies, all good\n")
    acme = done.stdout.partition("\nacme\n")[2].partition("\n\n")[0]
    assert acme.splitlines() == [
        "  callers    2 keys",
        "  upstream   https://api.openai.com/v1 with the policy's key",
        "  offload    auto, balanced, ceiling 30,000 tokens of history; moves results above 500; grep and read_file "
        "for agents from the start",
        "  prices     plain input 1, cached 0.1, written to the cache 1.25 (gpt-5.6 and newer: "
        "https://developers.openai.com/api/docs/pricing, 2026-11)",
        "  results    of 300 tokens: it first acts at request 84, where 30,080 tokens become 2,060 (history above its "
        "ceiling)",
        "  results    of 1,000 tokens: it first acts at request 8, where 7,620 tokens become 2,970 (results that "
        "cost more to keep than to move)",
        "  results    of 4,000 tokens: it first acts at request 7, where 24,560 tokens become 8,840 (results that "
        "cost more to keep than to move)",
        "  offload    gpt-4.1*: auto, balanced, ceiling 100,000 tokens of history; moves results above 500; grep and "
        "read_file for agents from the start",
        "  prices     plain input 1, cached 0.25, written to the cache 1 (gpt-4.1 o3: "
        "https://developers.openai.com/api/docs/pricing, 2026-11)",
        "  results    of 300 tokens: it first acts at request 279, where 100,280 tokens become 2,060 (history above "
        "its ceiling)",
        "  results    of 1,000 tokens: it first acts at request 5, where 4,440 tokens become 2,580 (results that "
        "cost more to keep than to move)",
        "  results    of 4,000 tokens: it first acts at request 4, where 12,380 tokens become 8,450 (results that "
        "cost more to keep than to move)",
        "  offload    *-mini: compact, balanced, ceiling 30,000 tokens of history; moves results above 500; grep and "
        "read_file for agents from the start",
        *acme.splitlines()[13:17],
        "  records    kept for 7d, one namespace per key",
        "  identity   a client is its key; with another key, it is another client",
        "  relay      also /audio/*",
    ]
    assert "Callers with other keys, or none, get 401" in done.stdout
    assert "sk-" not in done.stdout


def test_check_says_when_each_policy_first_acts_and_at_which_prices(tmp_path: Path) -> None:
    tight = "offload: {mode: compact, max_total_tokens: 3000, max_tool_message_tokens: 400, keep_views: 2}\n"
    (tmp_path / "default.yaml").write_text(
        tight + "upstream: {base_url: 'http://127.0.0.1:9/v1'}\n"
    )
    done = run("check", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}: 1 policy, 1 warning below\n")
    told = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in told if line.startswith(("prices", "results", "warning"))] == [
        "prices     plain input 1, cached 0, written to the cache 1 (this machine: no price list, as its cache "
        "is read at once)",
        "results    of 300 tokens: it does not act within 300 requests; waiting: the history is 107,840 tokens, above "
        "its ceiling of 3,000, but nothing in it can move now; no result above 400 tokens is left to move",
        "results    of 1,000 tokens: it first acts at request 4, where 3,380 tokens become 1,520 (history above its "
        "ceiling)",
        "results    of 4,000 tokens: it first acts at request 3, where 8,320 tokens become 4,390 (history above its "
        "ceiling)",
        f"warning: {tmp_path}/default.yaml:1: offload.keep_views: `keep_views` (2) has no effect where cached input is "
        "free: history moves above `max_total_tokens` (3,000)",
    ]


def test_check_says_it_of_each_api_and_of_what_is_only_observed(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text(
        "upstreams:\n  chat: {idle_timeout: 9}\n  messages: {base_url: 'http://127.0.0.1:9'}\n"
        "offload: {mode: observe, exclude_tools: ['*']}\nrules: [{model: m, offload: {exclude_tools: []}}]\n"
    )
    told = run("check", str(tmp_path)).stdout
    assert [line.split()[1:3] for line in told.splitlines() if line.startswith("  offload")] == [
        ["observe,", "balanced,"], ["messages:", "observe,"], ["m:", "observe,"], ["m:", "messages:"],
    ]  # fmt: skip
    assert told.count("where 32,680 tokens become 5,760") == 2, "what may not move is cut"
    assert told.count("it would first act at request") == 12
    assert told.count("; would move results above 500; ") == 4


def test_check_names_the_request_whose_new_result_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text("upstream: {context_window: 8192}")
    told = run("check", str(tmp_path)).stdout
    said = "it first acts at request 2, where 4,260 tokens become 820 (new results, too large to be sent even once)"
    assert f"of 4,000 tokens: {said}" in told


def test_check_says_of_each_rule_what_it_does_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "default.yaml").write_text(
        "offload: {mode: off}\nrules:\n- {model: 'gpt-[45]*', offload: {mode: compact, max_total_tokens: 7000}}\n"
        "- {model: 'gpt-*', offload: {mode: compress}}\n- {model: 'gpt-4.1*', offload: {mode: auto}}\n"
        "- {model: '*', offload: {mode: off}}\n"
    )
    assert main(["check", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert [line.split()[1:3] for line in told.splitlines() if line.startswith("  offload")] == [
        ["off"], ["gpt-[45]*:", "compact,"], ["gpt-*:", "compress,"], ["*:", "off"],
    ]  # fmt: skip
    assert "`gpt-4.1*` is for no model: `gpt-*` comes first" in told


def test_check_has_one_line_for_each_of_many_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(50):
        key = hashlib.sha256(str(number).encode()).hexdigest()
        (tmp_path / f"tenant-{number:02}.yaml").write_text(
            f"api_keys: [{{sha256: {key}}}]\noffload: {{mode: 'off'}}\n"
        )
    assert main(["check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "--full explains each." in said
    assert [line for line in said.splitlines() if line.startswith("tenant-07")] == [
        "tenant-07  1 key, https://api.openai.com/v1, off"
    ]
    assert said.count("tenant-") == 50
    assert main(["check", "--full", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("  identity   ") == 50


def test_check_takes_its_directory_from_argument_or_variable_or_place(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text(
        "tenant: public\noffload: {mode: off}\nretention: forever"
    )
    variable = run("check", OFFLOAD_POLICIES=str(tmp_path))
    assert variable.stdout.splitlines()[2:] == [
        "public",
        "  callers    everybody whom no other file names",
        "  upstream   https://api.openai.com/v1 with the caller's key",
        "  offload    off",
        "  records    kept for ever, one namespace per key",
        "  identity   a client is its key; with another key, it is another client",
    ]
    assert run("check", str(tmp_path)).stdout == variable.stdout
    assert "http://x/v1" in run("check", "--upstream", "http://x/v1").stdout


def test_check_explains_what_is_built_in_where_there_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 0
    assert capsys.readouterr().out.startswith("built in: 1 policy, all good\n")


def test_check_names_every_bad_file(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text("offload:\n  mode: atuo")
    (tmp_path / "acme.yaml").write_text("api_keys: [{env: ACME}]")
    done = run("check", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"offload-proxy: {tmp_path}/acme.yaml:1: api_keys[0].env: the environment variable ACME is not set",
        f"{tmp_path}/default.yaml:2: offload.mode: expected one of auto, compact, compress, observe, off",
    ]


def test_check_prints_the_schema() -> None:
    done = run("check", "--schema")
    assert (done.returncode, done.stdout.encode()) == (0, schema())


# --- store ----------------------------------------------------------------------------------------


def test_ls_counts_by_namespace_and_kind(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls", "--store", str(store)]) == 0
    assert columns(capsys.readouterr().out) == [
        ["NAMESPACE", "KIND", "RECORDS", "SIZE", "LAST", "USED"],
        ["default-0123456789abcdef", "original", "1", "29", "B", "40d"],
        ["default-0123456789abcdef", "round", "1", "4", "KiB", "1d"],
        ["default-anonymous", "original", "1", "21", "B", "2h"],
        ["gone-0123456789abcdef", "original", "1", "5", "B", "400d"],
    ]


def test_ls_lists_one_namespace_the_newest_last(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "ls", "--store", str(store), "default-0123456789abcdef"]) == 0
    assert columns(capsys.readouterr().out) == [
        ["KIND", "SIZE", "LAST", "USED", "KEY", "PATH"],
        ["original", "29", "B", "40d", "default-0123456789abcdef/original/a.txt"],
        ["round", "4", "KiB", "1d", "default-0123456789abcdef/round/r1"],
    ]


def test_ls_names_files_as_their_owner_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"acme/files/{key_part('workspace/é ~.txt')}"
    (tmp_path / "acme" / "files").mkdir(parents=True)
    (tmp_path / key).write_bytes(b"1")
    assert main(["store", "ls", "--store", str(tmp_path), "acme"]) == 0
    assert columns(capsys.readouterr().out)[1] == [
        "files",
        "1",
        "B",
        "0s",
        key,
        "workspace/é",
        "~.txt",
    ]


@pytest.mark.parametrize("action", [["ls"], ["forget", "acme"]])
@pytest.mark.parametrize("url", ["{}", "file://{}"])
def test_a_folder_that_is_not_there_is_named_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str], url: str
) -> None:
    folder = tmp_path / "typo"
    assert main(["store", *action, "--store", url.format(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and str(folder) in said.err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "said", "left"),
    [
        ([], "deleted 1 of 4 records, 29 B\n", 3),
        (["--dry-run"], "would delete 1 of 4 records, 29 B\n", 4),
        (["--older-than", "90d"], "deleted 1 of 4 records, 5 B\n", 3),
        (["--older-than", "1h"], "deleted 4 of 4 records, 4 KiB\n", 0),
        (["--older-than", "forever"], "deleted 0 of 4 records, 0 B\n", 4),
    ],
)
def test_gc(
    store: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, left: int
) -> None:
    assert main(["store", "gc", "--store", str(store), *arguments]) == 0
    assert capsys.readouterr().out == said
    assert len([path for path in store.glob("*/*/*") if path.is_file()]) == left


def test_gc_keeps_to_the_policies(store: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    policies = tmp_path_factory.mktemp("policies")
    (policies / "default.yaml").write_text("retention: forever")
    (policies / "gone.yaml").write_text("api_keys: [{env: GONE}]\nretention: 1d")
    agents = "http://127.0.0.1:8787/v1"  # as an agent in the same shell has it
    done = run(
        "store",
        "gc",
        "--policies",
        str(policies),
        GONE="sk",
        OFFLOAD_STORE=str(store),
        OPENAI_BASE_URL=agents,
    )
    assert (done.returncode, done.stdout) == (0, "deleted 1 of 4 records, 5 B\n")
    assert not (store / "gone-0123456789abcdef/original/c.txt").exists()


def test_gc_in_redis_reckons_ages_by_the_policies(tmp_path: Path) -> None:
    policies = tmp_path / "policies"
    policies.mkdir()
    (policies / "default.yaml").write_text("retention: 30d")
    with redis_server(tmp_path) as redis:
        url = f"redis://127.0.0.1:{redis.port}/0"
        asyncio.run(
            _put(
                url,
                {
                    "default-anonymous": 30.0 * DAY,
                    f"default-{'0' * 16}": 10.0 * DAY,
                    "stranger-1": None,
                },
            )
        )
        listed = run("store", "ls", "--store", url, "--policies", str(policies)).stdout.splitlines()
        assert [line.split()[-1].strip("0123456789") for line in listed[1:]] == ["d", "s", "s"], (
            listed
        )
        done = run(
            "store", "gc", "--older-than", "7d", "--store", url, OFFLOAD_POLICIES=str(policies)
        )
        assert (done.returncode, done.stdout) == (0, "deleted 1 of 3 records, 1 B\n"), done.stderr


async def _put(url: str, left: dict[str, float | None]) -> None:
    """A record in each namespace, with so many seconds yet to live."""
    opened = open_store(url, left.get)
    for namespace in left:
        await opened.put(f"{namespace}/original/k", b"1")
    await opened.close()


def test_a_store_that_fails_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["store", "ls", "--store", str(tmp_path / "file")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offload-proxy: the store's folder failed: ")


# --- serve ----------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-m", "proxy", *arguments], serving.clean_environment()
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), "--store", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"offload-proxy: cannot listen on 127.0.0.1:{port}: Address already in use"
    )


def test_a_proxy_that_was_told_to_stop_ended_well(tmp_path: Path) -> None:
    """Here by Ctrl-C; tests/server/test_runner.py sends SIGTERM."""
    with start("serve", "--port", "0", "--store", str(tmp_path)) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert (process.wait(PATIENCE), process.stderr.read()) == (0, "")
        assert said.startswith("offload-proxy listening on http://127.0.0.1:")


def test_a_key_leads_to_its_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one under which `serve` keeps this caller's records, without the key in it."""
    (tmp_path / "acme.yaml").write_text(
        f"tenant: acme\napi_keys: [{{sha256: {hashlib.sha256(b'k-acme').hexdigest()}}}]\n"
    )
    for key, begins in ((b"k-acme\n", "acme-"), (b"k-acme", "acme-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(key)))
        assert main(["store", "namespace", "--policies", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert re.fullmatch(rf"{begins}[0-9a-f]{{16}}\n", said) and "k-acme" not in said
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"unknown")))
    assert main(["store", "namespace", "--policies", str(tmp_path)]) == 1
    assert "belongs to no tenant" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["store", "namespace"]) == 0
    assert capsys.readouterr().out == "default-anonymous\n"


def test_an_identity_leads_to_its_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "acme.yaml"
    listed = f"tenant: acme\napi_keys: [{{sha256: {hashlib.sha256(b'k-acme').hexdigest()}}}]\n"
    for identity, code in (("", 2), ("identity: {header: x-user}\n", 0)):
        policy.write_text(listed + identity)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"k-acme")))
        assert (
            main(["store", "namespace", "--identity", "josé", "--policies", str(tmp_path)]) == code
        )
    said, known = capsys.readouterr(), load(tmp_path, {})
    assert "by this value: a client is its key" in said.err
    sent = Headers([(b"authorization", b"Bearer k-acme"), (b"x-user", "josé".encode())])
    found = identified(identify(sent, known), sent)
    assert found is not None and said.out == f"{found.namespace}\n"


@pytest.mark.parametrize(
    ("tenant", "by", "value", "said"),
    [
        ("acme", "header: x-user", "", "nobody is known to acme by this value"),
        ("acme", "header: x-user", " ", "nobody is known to acme by this value"),
        ("acme", "jwt: sub", "", "nobody is known to acme by this value"),
        ("default", "header: x-user", "a" * 31, "of at least 32 characters; without it, its key"),
        ("default", "body: user", "alice", "of at least 32 characters; without it, its key"),
        ("acme", "header: x-user", " a ", ""),
        ("default", "header: x-user", "a" * 32, ""),
        ("default", "jwt: sub", "a", ""),
    ],
)
def test_an_identity_that_serve_does_not_go_by_has_no_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tenant: str, by: str, value: str, said: str,
) -> None:  # fmt: skip
    """Else `store forget` would delete the records of somebody else."""
    keys = (
        f"api_keys: [{{sha256: {hashlib.sha256(b'k-acme').hexdigest()}}}]\n"
        if tenant == "acme"
        else ""
    )
    (tmp_path / f"{tenant}.yaml").write_text(f"{keys}identity: {{{by}}}\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"k-acme")))
    code = main(["store", "namespace", "--identity", value, "--policies", str(tmp_path)])
    out, err = capsys.readouterr()
    if said:
        assert (code, out) == (2, "") and said in err
    else:
        assert (code, err) == (0, "") and re.fullmatch(rf"{tenant}-[0-9a-f]{{16}}\n", out)
