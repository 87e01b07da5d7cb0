"""The commands of `offload-proxy`: run, serve, check, replay, recall, mcp, store and demo.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 130 interrupted, 141 broken pipe.
A command's module is imported when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from textwrap import fill
from typing import NamedTuple

try:
    from proxy.release import version
except ImportError:
    sys.exit(
        "offload-proxy: another package has overwritten ours, such as proxy.py, whose folder is called `proxy` too; "
        "uninstall it, or give each an environment of its own, then install offload-proxy again"
    )
from proxy.errors import ProxyError, UserMistake
from proxy.settings import flags, read
from proxy.terminal import harmless

OK = 0
FAILED = 1
MISTAKE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # the caller has closed it, and writing to it must do no harm
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    made = parser()
    given = sys.argv[1:] if arguments is None else arguments
    if given and not given[0].startswith("-") and given[0] not in (*_COMMANDS, "store"):
        meant = get_close_matches(given[0], (*_COMMANDS, "store"), 1)
        if meant:
            made.error(f"there is no command {given[0]!r}: did you mean {meant[0]}?")
    chosen, unknown = made.parse_known_args(arguments)
    if unknown:
        # their values may be secret
        named = [one.partition("=")[0] for one in unknown if one.startswith("-")]
        meant = get_close_matches(named[0], chosen.flags, 1) if named else []
        cure = f" (did you mean {meant[0]}?)" if meant else ""
        made.error(f"unrecognized arguments: {' '.join(named or unknown)}{cure}")
    # names of files and models have characters that not every locale has
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return _run(chosen)


def _run(chosen: argparse.Namespace) -> int:
    """Execute the chosen command; returns the exit code."""
    try:
        settings = read(vars(chosen))
        module, _, function = chosen.run.partition(":")
        code: int = getattr(import_module(module), function)(settings, chosen)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UserMistake, ProxyError) as error:
        said = str(error)
        code = MISTAKE if isinstance(error, UserMistake) else FAILED
    except OSError as error:  # such as a full disk below standard output
        # Python will still flush to it at exit, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        said = ": ".join(filter(None, (error.filename, error.strerror))) or repr(error)
        code = FAILED
    sys.stderr.write(f"offload-proxy: {harmless(said)}\n")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. The chosen command's `run` executes it; it has
    these `flags`."""
    parser = argparse.ArgumentParser(
        prog="offload-proxy",
        description="A reverse proxy for OpenAI's and Anthropic's APIs that keeps long-running agents inside their "
        "context window.",
        epilog="exit codes: 0 success, 1 failure, 2 wrong usage or configuration",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and its commit, and exit"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        _add(commands, name, command)
    about = Command("", "list and clean up the store")
    actions = _add(commands, "store", about).add_subparsers(required=True, metavar="ACTION")
    for name, command in _ACTIONS.items():
        _add(actions, name, command._replace(arguments=(*command.arguments, *_OF_STORE)))
    return parser


class _Version(argparse.Action):
    """Asks for the commit only if somebody wants to see it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"offload-proxy {version()}")  # noqa: T201
        parser.exit()


Argument = tuple[str, str, str]
"""Its name, metavar and help. The name ends with `?` where it may be left out, with `*` where it
may be repeated, and with `…` where it is all the rest; a flag without a metavar has no value."""


class Command(NamedTuple):
    run: str
    """MODULE:FUNCTION, which gets the settings and the arguments, and returns the exit code."""
    about: str
    arguments: Sequence[Argument] = ()


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: Command
) -> argparse.ArgumentParser:
    about = command.about
    added = commands.add_parser(
        name,
        help=about,
        description=_wrapped(about[0].upper() + about[1:] + "."),
        epilog=_wrapped(_EXAMPLES.get(name, "")),
        formatter_class=_Help,
    )
    groups = (
        {title: added.add_argument_group(title) for title in _GROUPS} if name == "serve" else {}
    )
    placed = {flag: groups[title] for title, flags in _GROUPS.items() for flag in flags if groups}
    flags = list[str]()
    added.set_defaults(run=command.run, flags=flags)
    for named, metavar, help in command.arguments:
        ending = {"?": "?", "*": "*", "…": argparse.REMAINDER}.get(named[-1])
        name = named.rstrip("?*…")
        if name.startswith("--"):
            flags.append(name)
        if not metavar:
            added.add_argument(name, action="store_true", help=help)
        elif name.startswith("--"):
            place = placed.get(name, added)
            place.add_argument(
                name, metavar=metavar, help=help, action="append" if ending else "store"
            )
        else:
            added.add_argument(name, metavar=metavar, help=help, nargs=ending)
    return added


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help for terminals of 80 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80)


def _wrapped(text: str) -> str:
    """Return text for 80 columns."""
    lines = list[str]()
    for line in text.split("\n"):
        indent = "      " if line.startswith(" ") else ""
        lines.append(fill(line, 80, subsequent_indent=indent) if len(line) > 80 else line)
    return "\n".join(lines)


_GROUPS: Mapping[str, Sequence[str]] = {
    "what is served": (
        "--host", "--port", "--upstream", "--policies", "--profile", "--store", "--workers",
    ),
    "limits": (
        "--body-limit", "--buffered-limit", "--head-timeout", "--body-timeout", "--first-byte-timeout",
        "--drain-timeout", "--max-connections",
    ),
    "who may look": ("--allowed-hosts", "--monitor-networks"),
    "what is written down": (
        "--log-format", "--dashboard", "--dashboard-limit", "--dashboard-content", "--replica-url", "--capture",
    ),
}  # fmt: skip
"""The flags of `serve`, by their subject."""

_URL = ("--url", "URL", "the proxy [http://127.0.0.1, at the port of OFFLOAD_PORT]")

_OF_STORE: Sequence[Argument] = (
    ("--store", "URL", "URL or directory of the store; also OFFLOAD_STORE"),
    (
        "--policies",
        "DIR",
        "policies of `serve`, which say how long records are kept; also OFFLOAD_POLICIES",
    ),
)

_COMMANDS: Mapping[str, Command] = {
    "run": Command(
        "proxy.apps.run:run",
        "run an agent behind a proxy of its own, which ends with it",
        (
            (
                "--upstream",
                "URL",
                "as for serve [where the environment points, else each API's own address]",
            ),
            ("--policies", "DIR", "as for serve"),
            ("--profile", "PROFILE", "as for serve"),
            ("--store", "URL", "as for serve"),
            ("--port", "PORT", "the proxy's port [any free one]"),
            (
                "command…",
                "-- COMMAND",
                "the agent with its arguments, such as claude, codex or aider",
            ),
        ),
    ),
    "serve": Command(
        "proxy.cli.check:serve",
        "run the proxy",
        [(flag, flag.rpartition("-")[2].upper(), meaning) for flag, meaning in flags()],
    ),
    "check": Command(
        "proxy.cli.check:check",
        "check a directory of policies and explain it",
        (
            (
                "directory?",
                "DIR",
                "the directory [$OFFLOAD_POLICIES, else policies, else the built-in policy]",
            ),
            ("--upstream", "URL", "as for serve"),
            ("--full", "", "explain each policy, also where there are many"),
            ("--live", "", "also ask every upstream for its models, with the policy's own key"),
            ("--schema", "", "print the JSON Schema of a policy file instead"),
            ("--reference", "", "print the description of every key instead"),
        ),
    ),
    "replay": Command(
        "proxy.apps.replay:replay",
        "say what policies would have done to recorded requests",
        (
            ("files*", "FILE", "recorded requests, in their order [your sessions]"),
            ("--profile", "", "compare the profiles careful, balanced and frugal"),
            ("--policy*", "FILE", "a policy; repeat it to compare several [the defaults]"),
            ("--json", "", "print JSON instead of a table"),
            ("--html", "REPORT.html", "also write a report, as one file"),
            (
                "--store",
                "URL",
                "instead of files, what `serve --capture` has captured in this store",
            ),
            ("--namespace", "NAMESPACE", "with --store: only this caller's"),
            ("--verify", "", "ask the model captured requests again, and compare: costs money"),
            ("--budget", "USD", "with --verify: what that may cost at most"),
        ),
    ),
    "recall": Command(
        "proxy.apps.recall:recall",
        "look into what your conversations moved out of the context",
        (
            ("path?", "PATH", "a reference, or the file's name in it"),
            ("--session", "ID", "only this session; the beginning of its id is enough"),
            ("--grep", "PATTERN", "the lines that match (RE2, ignoring case)"),
            _URL,
            (
                "--namespace",
                "NAMESPACE",
                "without a proxy and a key: this caller's, out of the store itself",
            ),
            *_OF_STORE,
        ),
    ),
    "mcp": Command(
        "proxy.apps.recall:mcp",
        "let an MCP client read what your conversations moved, over standard input and output",
        (_URL,),
    ),
    "demo": Command(
        "proxy.apps.demo:demo",
        "watch an agent go past its context window, without a key or a network",
        (("--serve", "", "then go on serving the dashboard, until Ctrl-C"),),
    ),
}

_ACTIONS: Mapping[str, Command] = {
    "ls": Command(
        "proxy.cli.store:ls",
        "list namespaces, or one namespace's records",
        (("namespace?", "NAMESPACE", "one caller"),),
    ),
    "namespace": Command(
        "proxy.cli.store:namespace",
        "say which namespace the caller has whose key is on standard input",
        (
            (
                "--identity",
                "VALUE",
                "the value of the `identity` by which the key's policy knows the caller",
            ),
        ),
    ),
    "gc": Command(
        "proxy.cli.store:gc",
        "delete records older than their tenant's retention",
        (
            (
                "--older-than",
                "AGE",
                "delete all records older than this, such as 30d, whatever the policies say",
            ),
            ("--dry-run", "", "only say how many would be deleted"),
        ),
    ),
    "forget": Command(
        "proxy.cli.store:forget",
        "delete everything that is kept of a namespace: its records of every kind, and rows",
        (
            ("namespace", "NAMESPACE", "one caller, as `store ls` lists them"),
            (
                "--dashboard",
                "FILE",
                "the file of `serve --dashboard`; also OFFLOAD_DASHBOARD [those of your proxies]",
            ),
            ("--yes", "", "do not ask"),
        ),
    ),
}

_EXAMPLES = {
    "run": """\
examples:
  offload-proxy run -- claude
  offload-proxy run --profile frugal -- codex exec "fix the tests"
  offload-proxy run --upstream http://127.0.0.1:8080/v1 -- aider --model openai/local

No file of yours or of the agent is written. What moves, the log and the
dashboard are kept in ~/.local/state/offload-proxy. The exit status is the
command's.
""",
    "serve": """\
examples:
  offload-proxy serve
      in front of OpenAI and Anthropic, each caller with its key
  offload-proxy serve --upstream http://127.0.0.1:8080/v1
      in front of a local model

Each flag is also a variable: --body-limit is OFFLOAD_BODY_LIMIT. A flag overrides its variable.
OFFLOAD_ADMIN_TOKEN opens /metrics, /health?deep=1 and /_offload/.
""",
    "replay": """\
FILE is what you have: sessions of Claude Code, Codex or opencode; logs and
exports of LiteLLM, Langfuse, LangSmith, Helicone or OpenTelemetry; request
bodies as JSONL or JSON, also gzipped; a HAR; a directory of those; or - for
standard input. Nothing is sent or stored, and credentials are not looked at.

With --verify, captured requests go to the policy's upstream, with its key or
yours (OPENAI_API_KEY, ANTHROPIC_API_KEY): twice as they were sent, and once as
planned. Before anything is sent, it says what that costs at most.
""",
    "recall": """\
The key with which the conversations were held is in OFFLOAD_API_KEY, or on standard input. Without a key, it shows what
your runs of `offload-proxy run` moved. Who can open the store needs neither a key nor a proxy: `--namespace`, as
`store ls` or `store namespace` names it, with --store.
""",
    "mcp": "The key is in OFFLOAD_API_KEY. It needs a running proxy at --url.",
    "store": """\
examples:
  offload-proxy store ls
      what there is, by namespace and kind
  offload-proxy store namespace < key
      the namespace of the caller with this key
  offload-proxy store gc --dry-run
      show how many records are older than their tenant's retention
""",
}
