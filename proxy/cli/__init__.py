"""The commands of `offload-proxy`: serve, check, replay, recall, mcp, store and demo.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 130 interrupted, 141 broken pipe.
Each command imports its modules when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from proxy import __version__
from proxy.errors import ProxyError, UserMistake

if TYPE_CHECKING:
    from typing import TypeAlias

    from proxy.settings import Settings

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAILED, MISTAKE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

_SERVE = (
    ("host", "HOST", "address to listen on [127.0.0.1]"),
    ("port", "PORT", "port to listen on; 0: any free port [8787]"),
    ("policies", "DIR", "directory of policies, one YAML file for each tenant [a built-in policy for everybody]"),
    ("store", "URL", "URL or directory of the store [~/.local/state/offload-proxy]"),
    ("upstream", "URL", "upstream of policies that name none; also OPENAI_BASE_URL [https://api.openai.com/v1]"),
    ("workers", "N", "number of worker processes [1]"),
    ("body-limit", "SIZE", "largest body of a chat request, such as 64MiB [64MiB]"),
    ("buffered-limit", "SIZE", "bodies of all requests in a process; one tenant may have half of it [512MiB]"),
    ("head-timeout", "SECONDS", "longest time for a request's head to arrive [10]"),
    ("body-timeout", "SECONDS", "longest pause in a request's body [30]"),
    ("first-byte-timeout", "SECONDS", "longest time until upstream's first byte [600]"),
    ("drain-timeout", "SECONDS", "longest time for requests under way to finish after SIGTERM [30]"),
    ("max-connections", "N", "connections to upstreams at once, for each process [1000]"),
    ("allowed-hosts", "NAMES", "comma-separated host names that browsers may use, besides loopback's [none]"),
    ("monitor-networks", "NETWORKS", "comma-separated networks that may read /metrics without a token [none]"),
    ("capture", "DIR", "keep whole requests for `replay`, of tenants whose policy has `capture: true` [off]"),
    ("capture-limit", "SIZE", "largest size of all captures; the oldest are deleted [1GiB]"),
    ("dashboard", "FILE", "record requests in this SQLite file, for the pages at /_offload/ [off]"),
    ("dashboard-limit", "SIZE", "largest file of the dashboard; the oldest rows are deleted [512MiB]"),
    ("replica-url", "URL", "where people reach this replica's dashboard, for links on others' [host and port]"),
    ("dashboard-content", "BOOL", "keep texts, of tenants whose policy has `dashboard_content: true` [false]"),
    ("log-format", "FORMAT", "json or text [text on a terminal, else json]"),
)

_ENVIRONMENT = """\
Each flag is also a variable: --body-limit is OFFLOAD_BODY_LIMIT. A flag overrides its variable.
OFFLOAD_ADMIN_TOKEN opens /metrics, /health?deep=1 and /_offload/.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _open_streams()
    made = parser()
    chosen, unknown = made.parse_known_args(arguments)
    if unknown:
        made.error(_did_you_mean(unknown, vars(chosen)))
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and models have characters that not every locale has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = chosen.run(chosen)
        sys.stdout.flush()
    except UserMistake as mistake:
        return _complain(mistake, MISTAKE)
    except ProxyError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:  # such as a full disk below standard output
        _discard_output()
        return _complain(": ".join(filter(None, (error.filename, error.strerror))) or repr(error), FAILED)
    return code


def _did_you_mean(unknown: Sequence[str], flags: Mapping[str, object]) -> str:
    """Say which arguments the command does not have, and which of its flags may be meant."""
    flag = next((one.partition("=")[0] for one in unknown if one.startswith("-")), "")
    meant = get_close_matches(flag, [f"--{name.replace('_', '-')}" for name in flags], 1) if flag else []
    return f"unrecognized arguments: {' '.join(unknown)}" + (f" (did you mean {meant[0]}?)" if meant else "")


def _open_streams() -> None:
    """Open those of the three standard streams that the caller has closed, so that writing to them does no harm."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


def _discard_output() -> None:
    """Send to nowhere what Python will still flush to standard output at exit, which would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception | str, code: int) -> int:
    text = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in str(error))
    sys.stderr.write(f"offload-proxy: {text}\n")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. The chosen command's `run` executes it."""
    parser = argparse.ArgumentParser(
        prog="offload-proxy",
        description="An OpenAI-compatible reverse proxy that keeps long-running agents inside their context window.",
        epilog="exit codes: 0 success, 1 failure, 2 wrong usage or configuration",
    )
    parser.add_argument("--version", action="version", version=f"offload-proxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_check(commands)
    _add_replay(commands)
    _add_recall(commands)
    _add_store(commands)
    demo = _add(commands, "demo", "watch an agent go past its context window, without a key or a network")
    demo.add_argument("--serve", action="store_true", help="then go on serving the dashboard, until Ctrl-C")
    demo.set_defaults(run=_demo)
    return parser


def _add(commands: Commands, name: str, about: str, epilog: str = "") -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_serve(commands: Commands) -> None:
    examples = """\
examples:
  offload-proxy serve                                        in front of OpenAI, each caller with its own key
  offload-proxy serve --upstream http://127.0.0.1:8080/v1    in front of a local model
  offload-proxy serve --policies policies --workers 4        with tenants
"""
    command = _add(commands, "serve", "run the proxy", examples + "\n" + _ENVIRONMENT)
    for name, metavar, about in _SERVE:
        command.add_argument(f"--{name}", metavar=metavar, help=about)
    command.set_defaults(run=_serve)


def _add_check(commands: Commands) -> None:
    command = _add(commands, "check", "check a directory of policies and explain it")
    command.add_argument(
        "directory", nargs="?", metavar="DIR", help="the directory [OFFLOAD_POLICIES, or policies, or what is built in]"
    )
    command.add_argument("--upstream", metavar="URL", help="as for serve")
    pages = command.add_mutually_exclusive_group()
    pages.add_argument(
        "--live",
        action="store_true",
        help="also ask every upstream for its models, with the policy's own key",
    )
    pages.add_argument("--schema", action="store_true", help="print the JSON Schema of a policy file instead")
    pages.add_argument("--reference", action="store_true", help="print the description of every key instead")
    command.set_defaults(run=_check)


def _add_replay(commands: Commands) -> None:
    examples = """\
FILE is what you have: sessions of Claude Code, Codex or opencode; logs and exports of LiteLLM, Langfuse, LangSmith,
Helicone or OpenTelemetry; request bodies (chat completions, Responses or Messages) as JSONL or JSON, also gzipped; a
HAR; a directory of those, such as a capture of `serve --capture`; or - for standard input. Without a FILE, the
sessions in your home directory. Nothing is sent or stored, and credentials are not looked at.

examples:
  offload-proxy replay --profile                            your own sessions under the three profiles
  offload-proxy replay session.jsonl                        what the default policy would have done
  offload-proxy replay --policy a.yaml --policy b.yaml *.har
  offload-proxy replay --html report.html captures
  offload-proxy replay --json session.jsonl | jq '.policies[0].cost_after'
"""
    command = _add(commands, "replay", "say what policies would have done to recorded requests", examples)
    command.add_argument("files", nargs="*", metavar="FILE", help="recorded requests, in their order [your sessions]")
    command.add_argument("--profile", action="store_true", help="compare the profiles careful, balanced and frugal")
    command.add_argument(
        "--policy", action="append", metavar="FILE", help="a policy; repeat it to compare several [the defaults]"
    )
    command.add_argument(
        "--dialect",
        metavar="API",
        help="the API of JSONL: chat, responses or messages [guessed for each line]",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.add_argument("--html", metavar="REPORT.html", help="also write a report with charts, as one file")
    command.set_defaults(run=_replay)


def _add_recall(commands: Commands) -> None:
    examples = """\
The key with which the conversations were held is in OFFLOAD_API_KEY, or on standard input.

examples:
  offload-proxy recall                                         your conversations, newest first
  offload-proxy recall --session 3f2a                          what one of them moved
  offload-proxy recall --grep 'E47\\d+'                         search it all
  offload-proxy recall billing.log-2e7dc01b9a01f2d4.txt        read one text
"""
    recall = _add(commands, "recall", "look into what your conversations moved out of the context", examples)
    recall.add_argument("path", nargs="?", metavar="PATH", help="a reference, or the file's name in it")
    recall.add_argument("--session", metavar="ID", help="only this session; the beginning of its id is enough")
    recall.add_argument("--grep", metavar="PATTERN", help="the lines that match (RE2, ignoring case)")
    recall.set_defaults(run=_recall)
    mcp = _add(commands, "mcp", "serve the same to an MCP client over standard input and output")
    mcp.set_defaults(run=_mcp)
    for command in (recall, mcp):
        command.add_argument("--url", metavar="URL", help="the proxy [http://127.0.0.1, at the port of OFFLOAD_PORT]")


def _add_store(commands: Commands) -> None:
    examples = """\
examples:
  offload-proxy store ls                        what there is, by namespace and kind
  offload-proxy store ls default-anonymous      the records of one namespace
  offload-proxy store grep 'E47\\d+' acme-       search every record whose key begins with acme-
  offload-proxy store namespace < key           the namespace of the caller with this key
  offload-proxy store forget acme-anonymous     delete everything that is kept of one caller
  offload-proxy store gc --dry-run              show how many records are older than their tenant's retention
"""
    actions = _add(commands, "store", "list, read, search and clean up the store", examples).add_subparsers(
        required=True, metavar="ACTION"
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--store", metavar="URL", help="URL or directory of the store; also OFFLOAD_STORE")
    shared.add_argument(
        "--policies",
        metavar="DIR",
        help="policies of `serve`, which say how long records are kept; also OFFLOAD_POLICIES",
    )

    ls = actions.add_parser("ls", parents=[shared], help="list namespaces, or one namespace's records")
    ls.add_argument("namespace", nargs="?", metavar="NAMESPACE")
    ls.set_defaults(run=_store, action="ls")

    namespace = actions.add_parser(
        "namespace", parents=[shared], help="say which namespace the caller has whose key is on standard input"
    )
    namespace.set_defaults(run=_namespace)

    cat = actions.add_parser("cat", parents=[shared], help="write one record to standard output, byte for byte")
    cat.add_argument("key", metavar="KEY")
    cat.set_defaults(run=_store, action="cat")

    grep = actions.add_parser(
        "grep", parents=[shared], help="search records (RE2, case-insensitive); exits with 1 if nothing matches"
    )
    grep.add_argument("pattern", metavar="PATTERN")
    grep.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="only keys with this prefix")
    grep.set_defaults(run=_store, action="grep")

    gc = actions.add_parser("gc", parents=[shared], help="delete records older than their tenant's retention")
    gc.add_argument(
        "--older-than", metavar="AGE", help="delete all records older than this, such as 30d, whatever the policies say"
    )
    gc.add_argument("--dry-run", action="store_true", help="only say how many would be deleted")
    gc.set_defaults(run=_store, action="gc")

    forget = actions.add_parser(
        "forget",
        parents=[shared],
        help="delete everything that is kept of a namespace: its records of every kind, captures and rows",
    )
    forget.add_argument("namespace", metavar="NAMESPACE", help="one caller, as `store ls` lists them")
    forget.add_argument("--capture", metavar="DIR", help="the folder of `serve --capture`; also OFFLOAD_CAPTURE")
    forget.add_argument("--dashboard", metavar="FILE", help="the file of `serve --dashboard`; also OFFLOAD_DASHBOARD")
    forget.add_argument("--yes", action="store_true", help="do not ask")
    forget.set_defaults(run=_forget)


def _serve(chosen: argparse.Namespace) -> int:
    from msgspec.structs import replace

    settings = _settings(chosen)
    from proxy.cli.start import say
    from proxy.server.runner import serve

    terminal = sys.stderr.isatty()
    if terminal and not (chosen.log_format or settings.environment.get("OFFLOAD_LOG_FORMAT")):
        settings = replace(settings, log_format="text")
    say(settings, terminal=terminal)
    return serve(settings)


def _check(chosen: argparse.Namespace) -> int:
    from proxy.cli.check import checked
    from proxy.policies import reference, schema

    if chosen.schema:
        sys.stdout.write(schema().decode())
    elif chosen.reference:
        sys.stdout.write(reference())
    else:
        settings = _settings(chosen)
        policies, summary = checked(settings, chosen.directory)
        sys.stdout.write(summary)
        if chosen.live:
            from proxy.cli.live import report

            good, text = report(settings, policies.all())
            sys.stdout.write(text)
            return OK if good else FAILED
    return OK


def _replay(chosen: argparse.Namespace) -> int:
    from proxy.cli.replay import run

    environment = _settings(chosen).environment
    run(
        chosen.files,
        chosen.policy or (),
        environment,
        api=chosen.dialect,
        as_json=chosen.json,
        html=chosen.html,
        profiles=chosen.profile,
    )
    return OK


def _recall(chosen: argparse.Namespace) -> int:
    from proxy.cli.recall import key_of, recall

    if chosen.path and (chosen.session or chosen.grep):
        raise UserMistake("give a PATH, or --session and --grep")
    settings = _settings(chosen)
    url, key = chosen.url or f"http://127.0.0.1:{settings.port}", key_of(settings.environment, ask=True)
    return recall(url, key, chosen.path, chosen.session, chosen.grep)


def _mcp(chosen: argparse.Namespace) -> int:
    from proxy.cli.recall import key_of, serve_mcp

    settings = _settings(chosen)
    serve_mcp(chosen.url or f"http://127.0.0.1:{settings.port}", key_of(settings.environment, ask=False))
    return OK


def _store(chosen: argparse.Namespace) -> int:
    from proxy.cli import store

    settings = _settings(chosen)
    match chosen.action:
        case "ls":
            work = store.ls(chosen.namespace)
        case "cat":
            work = store.cat(chosen.key)
        case "grep":
            work = store.grep(chosen.pattern, chosen.prefix)
        case _:
            work = store.gc(settings, chosen.older_than, dry_run=chosen.dry_run)
    return store.run(settings, work)


def _namespace(chosen: argparse.Namespace) -> int:
    from proxy.cli.store import namespace_of_key

    sys.stdout.write(namespace_of_key(_settings(chosen), sys.stdin.buffer.readline().strip()) + "\n")
    return OK


def _forget(chosen: argparse.Namespace) -> int:
    from proxy.cli.forget import forget

    return forget(_settings(chosen), chosen.namespace, sure=chosen.yes)


def _demo(chosen: argparse.Namespace) -> int:
    from proxy.demo import run

    return run(serve=chosen.serve)


def _settings(chosen: argparse.Namespace) -> Settings:
    from proxy.settings import read

    flags: Mapping[str, object] = vars(chosen)
    return read({name: text for name, text in flags.items() if text is None or isinstance(text, str)})
