"""`offload-proxy run`: a command behind a proxy of its own, and what is left when it has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clock import PATIENCE, wait_until
from tests.fake_upstream import Recorded, Reply, StrictUpstream, text, whole
from tests.ports import free_port
from tests.serving import clean_environment

ROOT = Path(__file__).parents[3]
AGENT = Path(__file__).with_name("agent.py")
OURS = ".local/state/offload-proxy"
IDLE = "offload-proxy: no request came: the command asked no model, or its settings name another address\n"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="the agent of this test looks into /proc"
)


@pytest.fixture
def upstream() -> Iterator[StrictUpstream]:
    """Both APIs at one address."""

    def respond(request: Recorded) -> Reply:
        if request.is_chat:
            return text("hello")
        usage = {"input_tokens": 1, "output_tokens": 1}
        said = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": "hello"}],
        }
        return whole(
            {**said, "model": "claude-opus-5-5", "stop_reason": "end_turn", "usage": usage}
        )

    with StrictUpstream() as made:
        made.respond(respond)
        yield made


def environment(home: Path | None, upstream: str = "", **more: str) -> dict[str, str]:
    known = {
        name: value
        for name, value in clean_environment().items()
        if not name.startswith(("ANTHROPIC_", "XDG_"))
    }
    for name in ("HOME", "OFFLOAD_DASHBOARD"):
        known.pop(name, None)
    known |= {"PYTHONPATH": str(ROOT), **({"HOME": str(home)} if home else {})}
    if upstream:
        known |= {"OPENAI_BASE_URL": upstream, "ANTHROPIC_BASE_URL": upstream.removesuffix("/v1")}
    return {**known, **more}


def command(*words: str, options: tuple[str, ...] = ()) -> list[str]:
    return [
        sys.executable,
        "-m",
        "proxy",
        "run",
        *options,
        "--",
        sys.executable,
        str(AGENT),
        *words,
    ]


def ran(
    *words: str, home: Path | None, upstream: str = "", options: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    given, folder = environment(home, upstream, **more), home if home and home.is_dir() else ROOT
    made = command(*words, options=options)
    return subprocess.run(
        made, cwd=folder, env=given, capture_output=True, text=True, timeout=PATIENCE
    )


def tree(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*")}


def test_both_apis_at_once_and_nothing_is_left_but_our_folder(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = ran("chat", "messages", "exit=7", home=tmp_path, upstream=upstream.url)
    assert (done.returncode, done.stdout) == (7, "chat 200\nmessages 200\n"), done.stderr
    assert {request.path for request in upstream.requests if request.method == "POST"} == {
        "/v1/chat/completions",
        "/v1/messages",
    }
    assert done.stderr.count("\n") == 1
    assert (
        done.stderr.startswith("offload-proxy: ")
        and "nothing moved: waiting: the history is" in done.stderr
    )
    made = tree(tmp_path) - {"notes.txt", ".local", ".local/state", OURS}
    assert made and all(one.startswith(f"{OURS}/") for one in made)
    assert '"message":"request"' in (tmp_path / OURS / "run.log").read_text()


def test_what_moved_is_said_and_kept_for_this_user_whatever_the_key(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    for key in ("one", "two"):
        done = ran("chat=8", home=tmp_path, upstream=upstream.url, KEY=key)
        assert done.returncode == 0
        assert " tokens came, " in done.stderr and "results moved, 0 read back" in done.stderr, (
            done.stderr
        )
    assert [
        path.name for path in (tmp_path / OURS / "store").iterdir() if not path.name.startswith(".")
    ] == ["run"]


def test_recall_shows_what_runs_moved_without_a_key(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    def recalled(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "proxy", "recall", *words], env=environment(tmp_path), cwd=tmp_path,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip

    early = recalled()
    assert (
        early.returncode == 2
        and "nothing has been run with `offload-proxy run` yet" in early.stderr
    )
    ran("chat=8", home=tmp_path, upstream=upstream.url)
    sessions = recalled()
    assert sessions.returncode == 0 and "Read the logs." in sessions.stdout, sessions.stderr
    assert "0:0007 moved 371 crates" in recalled("--grep", "0:0007").stdout


def test_a_variable_need_not_be_utf_8(tmp_path: Path, upstream: StrictUpstream) -> None:
    done = ran("chat", home=tmp_path, upstream=upstream.url, OLDPWD=os.fsdecode(b"/caf\xe9"))
    assert (done.returncode, done.stdout) == (0, "chat 200\n"), done.stderr


def test_what_is_wrong_in_a_folder_that_is_not_utf_8_is_said(tmp_path: Path) -> None:
    policies = tmp_path / os.fsdecode(b"caf\xe9")
    policies.mkdir()
    (policies / "default.yaml").write_text("upstrem: {}")
    done = ran("chat", home=tmp_path, options=("--policies", str(policies)))
    assert done.returncode == 2 and "upstrem" in done.stderr, done.stderr


def test_the_profile_and_the_upstream_of_the_command_line(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    options = (
        "--upstream",
        upstream.url,
        "--profile",
        "careful",
        "--store",
        str(tmp_path / "kept"),
    )
    done = ran("chat=16", "messages", home=tmp_path, options=options)
    assert done.stdout.endswith("messages 200\n"), done.stderr
    assert "results moved" in done.stderr and "recall" not in done.stderr, done.stderr
    assert (tmp_path / "kept").is_dir() and not (tmp_path / OURS / "store").exists()


def test_policies_of_a_directory(tmp_path: Path, upstream: StrictUpstream) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "default.yaml").write_text("offload: {mode: 'off'}")
    done = ran(
        "chat=8", home=tmp_path, upstream=upstream.url, options=("--policies", str(tmp_path / "p"))
    )
    assert done.returncode == 0 and "recall" not in done.stderr
    assert "nothing moved: " in done.stderr
    both = ("--policies", str(tmp_path / "p"), "--profile", "frugal")
    refused = ran("exit=0", home=tmp_path, options=both)
    assert refused.returncode == 2 and "--profile is for the built-in policy" in refused.stderr


def test_runs_side_by_side_share_the_store(tmp_path: Path, upstream: StrictUpstream) -> None:
    runs = [
        subprocess.Popen(
            command("chat=8", f"exit={number}"), cwd=tmp_path, env=environment(tmp_path, upstream.url, KEY=str(number)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    ends = [(*one.communicate(timeout=PATIENCE), one.returncode) for one in runs]
    assert [code for _, _, code in ends] == [0, 1, 2]
    assert all(out == "chat 200\n" and "results moved" in errors for out, errors, _ in ends), ends


def test_runs_in_front_of_other_upstreams_have_other_sums_and_no_link_is_named_that_nobody_saw(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    for address in (upstream.url, f"{upstream.url}/", upstream.url):
        done = ran("chat", "login", home=tmp_path, upstream=address)
        assert done.stdout == "chat 200\nlogin No link is left\n", done.stderr
    assert len([*(tmp_path / OURS).glob("dashboard-*.db")]) == 2
    done = ran("login", home=tmp_path, OFFLOAD_DASHBOARD="off")
    assert done.stdout == "login The dashboard is off\n", done.stderr


def test_who_finds_the_port_is_refused(tmp_path: Path, upstream: StrictUpstream) -> None:
    done = ran("stranger", "chat", home=tmp_path, upstream=upstream.url)
    *refusals, answers, chat = done.stdout.splitlines()
    assert answers == f"stranger {[403] * 9}" and chat == "chat 200"
    said = "This proxy serves only the command that started it"
    assert len(refusals) == 9 and all(said in one for one in refusals)
    assert len([one for one in upstream.requests if one.method == "POST"]) == 1


def test_the_address_is_served_as_it_is_and_no_log_has_it(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    done = ran("address", home=tmp_path, upstream=upstream.url)
    _, address, whole, slip = done.stdout.splitlines()[-1].split()
    assert (whole, slip) == ("200", "403")
    assert [one.target for one in upstream.requests if one.method == "POST"] == ["/"]
    secret = address.rpartition("/")[2].encode()
    kept = [path for path in (tmp_path / OURS).rglob("*") if path.is_file()]
    assert any(path.name == "run.log" and b'"path":"//*"' in path.read_bytes() for path in kept)
    assert not [path for path in kept if secret in path.read_bytes()]


def test_an_agent_follows_redirects_through_the_proxy(
    tmp_path: Path, upstream: StrictUpstream
) -> None:
    moved = whole(b"", 307, {"location": "/v1/models/"})
    listed = whole({"object": "list", "data": []})
    upstream.respond(lambda request: listed if request.path.endswith("/") else moved)
    done = ran("models", home=tmp_path, upstream=upstream.url)
    assert done.stdout == "models 200\n", done.stderr


# -- ends --


@pytest.mark.parametrize(
    ("words", "code"), [(("exit=0",), 0), (("exit=255",), 255)], ids=["success", "failure"]
)
def test_the_exit_status_is_the_commands(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    done = ran(*words, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", IDLE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGABRT])
def test_a_command_that_a_signal_ended(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "proxy", "run", "--", "sh", "-c", f"kill -{number.value} $$"]
    done = subprocess.run(
        words, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE
    )
    same = number in (signal.SIGTERM, signal.SIGINT)
    assert (done.returncode, done.stderr) == (-number if same else 128 + number, IDLE)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    for name, code, said in (
        ("frob", 127, "there is no command frob"),
        (str(tmp_path), 126, "cannot be run"),
    ):
        words = [sys.executable, "-m", "proxy", "run", "--", name]
        done = subprocess.run(
            words, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == code and said in done.stderr
    assert tree(tmp_path) == set(), "no proxy was started"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "offload-proxy: expected a command, as in: offload-proxy run -- claude"),
        (
            ["--", "cline"],
            "offload-proxy: cline is not started: only its settings file names an address",
        ),
        (["--prot", "1", "--", "true"], "unrecognized arguments: --prot (did you mean --port?)"),
        (
            ["--port", "http", "--", "true"],
            "offload-proxy: --port: expected a port from 1 to 65535",
        ),
        (
            ["--upstream", "openai", "--", "true"],
            "offload-proxy: --upstream: expected an address such as",
        ),
    ],
)
def test_a_users_mistake_starts_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "run", *words],
        env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
    assert tree(tmp_path) == set()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ran("exit=0", home=tmp_path, options=("--port", str(port)))
    assert done.returncode == 2
    assert (
        done.stderr == f"offload-proxy: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "--port takes another\n"
    )


def test_an_upstream_that_does_not_answer(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}/v1"
    done = ran("chat", "exit=3", home=tmp_path, upstream=dead)
    assert done.returncode == 3 and done.stdout.endswith("chat 502\n")
    assert done.stderr.startswith(
        "offload-proxy: upstream did not answer: connection refused at 127.0.0.1:"
    )


def test_the_proxy_is_killed(tmp_path: Path, upstream: StrictUpstream) -> None:
    done = ran("chat", "kill-proxy", "chat", "exit=4", home=tmp_path, upstream=upstream.url)
    assert done.returncode == 4
    assert done.stdout == "chat 200\nchat 0\n"
    assert "the proxy was killed before python" in done.stderr and "works as before" in done.stderr


def test_we_are_killed_and_the_proxy_ends_as_well(tmp_path: Path) -> None:
    done = ran("say", "kill-run", home=tmp_path)
    assert done.returncode == -signal.SIGKILL
    proxy = int(done.stdout.split()[1])
    wait_until(lambda: not Path(f"/proc/{proxy}").exists())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 41), (signal.SIGINT, 42)])
def test_a_signal_to_all_or_to_us_alone(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """SIGINT goes to the group, as from a terminal."""
    with subprocess.Popen(
        command("wait"), env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (code, IDLE)


# -- homes --


def test_no_home(upstream: StrictUpstream, tmp_path: Path) -> None:
    done = ran("chat=8", "exit=5", home=None, upstream=upstream.url, TMPDIR=str(tmp_path))
    assert done.returncode == 5 and "results moved, 0 read back\n" in done.stderr, done.stderr
    assert tree(tmp_path) == set(), "it is gone, and so `recall` is not named"


def test_a_home_that_cannot_be_written_to(upstream: StrictUpstream, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, because root may write to any folder")
    (tmp_path / "tmp").mkdir()
    done = ran("chat", home=tmp_path / "home", upstream=upstream.url, TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stdout) == (0, "chat 200\n")
    assert tree(tmp_path) == {"home", "tmp"}
