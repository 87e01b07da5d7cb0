"""The commands of `offload-proxy`: serve, check, replay, recall, mcp, store and demo.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 130 interrupted, 141 broken pipe.
Each command imports its modules when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from proxy import __version__
from proxy.cli.words import harmless
from proxy.errors import ProxyError, UserMistake
from proxy.settings import Settings, flags, read

Argument = tuple[str, str, str]
"""An argument's name, metavar and help."""

OK, FAILED, MISTAKE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it, and writing to it must do no harm
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    made = parser()
    chosen, unknown = made.parse_known_args(arguments)
    if unknown:
        flag = next((one.partition("=")[0] for one in unknown if one.startswith("-")), "")
        meant = get_close_matches(flag, [f"--{name.replace('_', '-')}" for name in vars(chosen)], 1) if flag else []
        cure = f" (did you mean {meant[0]}?)" if meant else ""
        made.error(f"unrecognized arguments: {' '.join(unknown)}{cure}")
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and models have characters that not every locale has
        sys.stdout.reconfigure(errors="backslashreplace")
    return _run(chosen)


def _run(chosen: argparse.Namespace) -> int:
    """Execute the chosen command; returns the exit code."""
    try:
        code: int = chosen.run(chosen)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UserMistake, ProxyError) as error:
        said, code = str(error), MISTAKE if isinstance(error, UserMistake) else FAILED
    except OSError as error:  # such as a full disk below standard output
        # Python will still flush to it at exit, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        said, code = ": ".join(filter(None, (error.filename, error.strerror))) or repr(error), FAILED
    sys.stderr.write(f"offload-proxy: {harmless(said)}\n")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. The chosen command's `run` executes it."""
    parser = argparse.ArgumentParser(
        prog="offload-proxy",
        description="A reverse proxy for OpenAI's and Anthropic's APIs that keeps long-running agents inside their "
        "context window.",
        epilog="exit codes: 0 success, 1 failure, 2 wrong usage or configuration",
    )
    parser.add_argument("--version", action="version", version=f"offload-proxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    served = [(flag, flag.rpartition("-")[2].upper(), meaning) for flag, meaning in flags()]
    _add(commands, "serve", "run the proxy", served).set_defaults(run=_serve)
    for name, (run, about, arguments) in _COMMANDS.items():
        _add(commands, name, about, arguments).set_defaults(run=run)
    about = "list, read, search and clean up the store"
    actions = _add(commands, "store", about, ()).add_subparsers(required=True, metavar="ACTION")
    for name, (about, arguments) in _ACTIONS.items():
        _add(actions, name, about, (*arguments, *_OF_STORE)).set_defaults(run=_store, action=name)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str, arguments: Sequence[Argument]
) -> argparse.ArgumentParser:
    """Add a command. An argument's name ends with `?` where it may be left out, and with `*` where it may be repeated;
    a flag without a metavar has no value."""
    command = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=_EXAMPLES.get(name, ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for named, metavar, help in arguments:
        ending = named[-1] if named[-1] in "?*" else None
        name = named.rstrip("?*")
        if not metavar:
            command.add_argument(name, action="store_true", help=help)
        elif name.startswith("--"):
            command.add_argument(name, metavar=metavar, help=help, action="append" if ending else "store")
        else:
            command.add_argument(name, metavar=metavar, help=help, nargs=ending)
    return command


def _settings(chosen: argparse.Namespace) -> Settings:
    return read({name: text for name, text in vars(chosen).items() if text is None or isinstance(text, str)})


def _serve(chosen: argparse.Namespace) -> int:
    from msgspec.structs import replace

    settings = _settings(chosen)
    from proxy.cli.check import say
    from proxy.server.runner import serve

    terminal = sys.stderr.isatty()
    if terminal and not (chosen.log_format or settings.environment.get("OFFLOAD_LOG_FORMAT")):
        settings = replace(settings, log_format="text")
    say(settings, terminal=terminal)
    return serve(settings)


def _check(chosen: argparse.Namespace) -> int:
    from proxy.cli.check import check
    from proxy.policies import reference, schema

    if chosen.schema or chosen.reference:
        sys.stdout.write(schema().decode() if chosen.schema else reference())
        return OK
    return OK if check(_settings(chosen), chosen.directory, live=chosen.live) else FAILED


def _replay(chosen: argparse.Namespace) -> int:
    from proxy.cli.replay import run

    policies, environment = chosen.policy or (), _settings(chosen).environment
    run(chosen.files, policies, environment, chosen.dialect, chosen.html, as_json=chosen.json, profiles=chosen.profile)
    return OK


def _recall(chosen: argparse.Namespace) -> int:
    from proxy.cli.recall import recall

    if chosen.path and (chosen.session or chosen.grep):
        raise UserMistake("give a PATH, or --session and --grep")
    return recall(_settings(chosen), chosen.url, chosen.path, chosen.session, chosen.grep)


def _mcp(chosen: argparse.Namespace) -> int:
    from proxy.cli.recall import serve_mcp

    serve_mcp(_settings(chosen), chosen.url)
    return OK


def _store(chosen: argparse.Namespace) -> int:
    from asyncio import run

    from proxy.cli import store

    settings = _settings(chosen)
    match chosen.action:
        case "ls":
            return run(store.ls(settings, chosen.namespace))
        case "cat":
            return run(store.cat(settings, chosen.key))
        case "grep":
            return run(store.grep(settings, chosen.pattern, chosen.prefix or ""))
        case "gc":
            return run(store.gc(settings, chosen.older_than, dry_run=chosen.dry_run))
        case "forget":
            return store.forget(settings, chosen.namespace, sure=chosen.yes)
        case _:
            sys.stdout.write(store.namespace_of_key(settings, sys.stdin.buffer.readline().strip()) + "\n")
            return OK


def _demo(chosen: argparse.Namespace) -> int:
    from proxy.demo import run

    return run(serve=chosen.serve)


_URL = ("--url", "URL", "the proxy [http://127.0.0.1, at the port of OFFLOAD_PORT]")

_COMMANDS: Mapping[str, tuple[Callable[[argparse.Namespace], int], str, Sequence[Argument]]] = {
    "check": (
        _check,
        "check a directory of policies and explain it",
        (
            ("directory?", "DIR", "the directory [OFFLOAD_POLICIES, or policies, or what is built in]"),
            ("--upstream", "URL", "as for serve"),
            ("--live", "", "also ask every upstream for its models, with the policy's own key"),
            ("--schema", "", "print the JSON Schema of a policy file instead"),
            ("--reference", "", "print the description of every key instead"),
        ),
    ),
    "replay": (
        _replay,
        "say what policies would have done to recorded requests",
        (
            ("files*", "FILE", "recorded requests, in their order [your sessions]"),
            ("--profile", "", "compare the profiles careful, balanced and frugal"),
            ("--policy*", "FILE", "a policy; repeat it to compare several [the defaults]"),
            ("--dialect", "API", "the API of JSONL: chat, responses or messages [guessed for each line]"),
            ("--json", "", "print JSON instead of a table"),
            ("--html", "REPORT.html", "also write a report, as one file"),
        ),
    ),
    "recall": (
        _recall,
        "look into what your conversations moved out of the context",
        (
            ("path?", "PATH", "a reference, or the file's name in it"),
            ("--session", "ID", "only this session; the beginning of its id is enough"),
            ("--grep", "PATTERN", "the lines that match (RE2, ignoring case)"),
            _URL,
        ),
    ),
    "mcp": (_mcp, "let an MCP client read what your conversations moved, over standard input and output", (_URL,)),
    "demo": (
        _demo,
        "watch an agent go past its context window, without a key or a network",
        (("--serve", "", "then go on serving the dashboard, until Ctrl-C"),),
    ),
}

_OF_STORE: Sequence[Argument] = (
    ("--store", "URL", "URL or directory of the store; also OFFLOAD_STORE"),
    ("--policies", "DIR", "policies of `serve`, which say how long records are kept; also OFFLOAD_POLICIES"),
)

_ACTIONS: Mapping[str, tuple[str, Sequence[Argument]]] = {
    "ls": ("list namespaces, or one namespace's records", (("namespace?", "NAMESPACE", "one caller"),)),
    "namespace": ("say which namespace the caller has whose key is on standard input", ()),
    "cat": ("write one record to standard output, byte for byte", (("key", "KEY", "NAMESPACE/KIND/NAME"),)),
    "grep": (
        "search records (RE2, case-insensitive); exits with 1 if nothing matches",
        (("pattern", "PATTERN", "what to look for"), ("prefix?", "PREFIX", "only keys with this prefix")),
    ),
    "gc": (
        "delete records older than their tenant's retention",
        (
            ("--older-than", "AGE", "delete all records older than this, such as 30d, whatever the policies say"),
            ("--dry-run", "", "only say how many would be deleted"),
        ),
    ),
    "forget": (
        "delete everything that is kept of a namespace: its records of every kind, captures and rows",
        (
            ("namespace", "NAMESPACE", "one caller, as `store ls` lists them"),
            ("--capture", "DIR", "the folder of `serve --capture`; also OFFLOAD_CAPTURE"),
            ("--dashboard", "FILE", "the file of `serve --dashboard`; also OFFLOAD_DASHBOARD"),
            ("--yes", "", "do not ask"),
        ),
    ),
}

_EXAMPLES = {
    "serve": """\
examples:
  offload-proxy serve                                        in front of OpenAI, each caller with its own key
  offload-proxy serve --upstream http://127.0.0.1:8080/v1    in front of a local model

Each flag is also a variable: --body-limit is OFFLOAD_BODY_LIMIT. A flag overrides its variable.
OFFLOAD_ADMIN_TOKEN opens /metrics, /health?deep=1 and /_offload/.
""",
    "replay": """\
FILE is what you have: sessions of Claude Code, Codex or opencode; logs and exports of LiteLLM, Langfuse, LangSmith,
Helicone or OpenTelemetry; request bodies as JSONL or JSON, also gzipped; a HAR; a directory of those, such as a capture
of `serve --capture`; or - for standard input. Nothing is sent or stored, and credentials are not looked at.
""",
    "recall": "The key with which the conversations were held is in OFFLOAD_API_KEY, or on standard input.",
    "mcp": "The key is in OFFLOAD_API_KEY. It needs a running proxy at --url.",
    "store": """\
examples:
  offload-proxy store ls                    what there is, by namespace and kind
  offload-proxy store namespace < key       the namespace of the caller with this key
  offload-proxy store gc --dry-run          show how many records are older than their tenant's retention
""",
}
