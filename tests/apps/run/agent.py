"""An agent for tests of `run`: it asks both APIs by the variables of their SDKs, and does what it
is told then."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

LOGINS = ("Open the link", "No link is left", "The dashboard is off")
TOOL = {
    "name": "read_log",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def post(url: str, body: dict[str, object]) -> int:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    request.add_header("authorization", f"Bearer {os.environ.get('KEY', 'k')}")
    try:
        with urllib.request.urlopen(request) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        print(error.read().decode(), file=sys.stderr if "loud" in sys.argv else sys.stdout)
        return error.code
    except OSError:
        return 0


def chat(results: int) -> int:
    """Ask for a reply to a history with so many results of some 5,000 tokens."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Read the logs."}]
    for number in range(results):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "read_log", "arguments": "{}"},
        }
        text = "".join(
            f"{number}:{line:04} moved {line * 53 % 997} crates\n" for line in range(500)
        )
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
        ]
    body = {
        "model": "gpt-4.1",
        "messages": messages,
        "tools": [{"type": "function", "function": TOOL}],
    }
    return post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)


def messages() -> int:
    asked = [{"role": "user", "content": "hi"}]
    body = {"model": "claude-opus-5-5", "max_tokens": 10, "messages": asked}
    return post(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", body)


def login() -> str:
    """Return what the dashboard's login says to the operator."""
    with urllib.request.urlopen(f"{root()}/_offload/login") as reply:
        page = reply.read().decode()
    return next(said for said in LOGINS if said in page)


def stranger() -> str:
    """Return how a program is answered that has found the proxy's port, and nothing else."""
    paths = ("/v1/chat/completions", "/v1/models", "/health", "/metrics", "/", "/wrong/v1/models")
    doors = ("/grep", "/read_file", "/_offload/mcp")
    return f"{[post(root() + path, {}) for path in (*paths, *doors)]}"


def address() -> str:
    """Return the whole address, asked as it is, and as one that is not quite it."""
    whole = os.environ["ANTHROPIC_BASE_URL"]
    slip = whole.replace(root(), f"{root()}/")
    return f"{whole} {post(whole, {})} {post(slip, {})}"


def models() -> int:
    with urllib.request.urlopen(f"{os.environ['OPENAI_BASE_URL']}/models") as reply:
        return int(reply.status)


def root() -> str:
    """Return the proxy's address without a path."""
    return os.environ["ANTHROPIC_BASE_URL"].rpartition("/")[0]


ASKS = {
    "messages": messages,
    "login": login,
    "stranger": stranger,
    "models": models,
    "address": address,
}
"""What is asked, and printed, for a word."""
EXITS = {signal.SIGTERM: 41, signal.SIGINT: 42}
"""The exit status after a signal that `wait` waited for."""


def main() -> int:
    for word in sys.argv[1:]:
        name, _, number = word.partition("=")
        match name:
            case "chat":
                print("chat", chat(int(number or 0)), flush=True)
            case name if name in ASKS:
                print(name, ASKS[name](), flush=True)
            case "kill-proxy":
                [proxy] = [child for child in children(os.getppid()) if child != os.getpid()]
                os.kill(proxy, signal.SIGKILL)
            case "kill-run":
                os.kill(os.getppid(), signal.SIGKILL)
            case "say":
                print(
                    "proxy",
                    *(child for child in children(os.getppid()) if child != os.getpid()),
                    flush=True,
                )
            case "terminal":
                print(*os.get_terminal_size(), flush=True)
            case "wait":
                signal.pthread_sigmask(signal.SIG_BLOCK, EXITS)
                print("waiting", flush=True)
                return EXITS[signal.sigwait(EXITS)]
            case "exit":
                return int(number)
    return 0


def children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(status.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
