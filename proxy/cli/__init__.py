"""`offload-proxy` serve · check · store · demo.

Exit codes: 0 well, 1 something failed, 2 a mistake of the user's, 130 interrupted, 141 the output's reader has gone.
What a command needs is imported when it runs: `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
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
    ("port", "PORT", "port to listen on; 0: any free one [8787]"),
    ("policies", "DIR", "directory of policies, one YAML file a tenant [a built-in one for everybody]"),
    ("store", "URL", "URL or directory of the store [~/.local/state/offload-proxy]"),
    ("upstream", "URL", "upstream of policies that name none; also OPENAI_BASE_URL [https://api.openai.com/v1]"),
    ("workers", "N", "processes [1]"),
    ("body-limit", "SIZE", "largest body of a chat request, such as 64MiB [64MiB]"),
    ("buffered-limit", "SIZE", "all requests' bodies of a process, half of it for one tenant [512MiB]"),
    ("head-timeout", "SECONDS", "how long a request's head may take to arrive [10]"),
    ("body-timeout", "SECONDS", "how long nothing may arrive of a request's body [30]"),
    ("first-byte-timeout", "SECONDS", "how long an upstream may think before its first byte [600]"),
    ("drain-timeout", "SECONDS", "how long requests under way may go on after SIGTERM [30]"),
    ("max-connections", "N", "connections to upstreams, for each process [1000]"),
    ("allowed-hosts", "NAMES", "host names besides loopback's that browsers may use, with commas between [none]"),
    ("log-format", "FORMAT", "json or text [json]"),
)

_ENVIRONMENT = """\
Each flag is also a variable: --body-limit is OFFLOAD_BODY_LIMIT. A flag goes before its variable.
OFFLOAD_ADMIN_TOKEN lets callers that are not on this machine see /metrics and /_offload/.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    chosen = parser().parse_args(arguments)
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
        # Python flushes once more at its end, and must find somebody who listens.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _complain(error: Exception, code: int) -> int:
    sys.stderr.write(f"offload-proxy: {error}\n")
    return code


def parser() -> argparse.ArgumentParser:
    """The command line, complete: each command's `run` carries it out."""
    parser = argparse.ArgumentParser(
        prog="offload-proxy",
        description="An OpenAI-compatible reverse proxy that keeps long-running agents inside their context window.",
        epilog="exit codes: 0 success, 1 failure, 2 wrong usage or configuration",
    )
    parser.add_argument("--version", action="version", version=f"offload-proxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_check(commands)
    _add_store(commands)
    _add(commands, "demo", "watch an agent go past its context window, without a key or a network").set_defaults(
        run=_demo
    )
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
    command = _add(commands, "check", "check a directory of policies and say what they mean")
    command.add_argument("directory", nargs="?", metavar="DIR", help="the directory [OFFLOAD_POLICIES, or policies]")
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


def _add_store(commands: Commands) -> None:
    examples = """\
examples:
  offload-proxy store ls                        what there is, by namespace and kind
  offload-proxy store ls default-anonymous      the records of one namespace
  offload-proxy store grep 'E47\\d+' acme-       search every record whose key begins so
  offload-proxy store gc --dry-run              what has outlived its tenant's retention
"""
    actions = _add(commands, "store", "look into the store", examples).add_subparsers(required=True, metavar="ACTION")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--store", metavar="URL", help="URL or directory of the store; also OFFLOAD_STORE")
    shared.add_argument(
        "--policies",
        metavar="DIR",
        help="those of `serve`: how long records are kept, and so how old one in Redis is; also OFFLOAD_POLICIES",
    )

    ls = actions.add_parser("ls", parents=[shared], help="list namespaces, or one namespace's records")
    ls.add_argument("namespace", nargs="?", metavar="NAMESPACE")
    ls.set_defaults(run=_store, action="ls")

    cat = actions.add_parser("cat", parents=[shared], help="write one record to standard output, byte for byte")
    cat.add_argument("key", metavar="KEY")
    cat.set_defaults(run=_store, action="cat")

    grep = actions.add_parser("grep", parents=[shared], help="search records (RE2, case-insensitive); 1: no match")
    grep.add_argument("pattern", metavar="PATTERN")
    grep.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="only keys that begin so")
    grep.set_defaults(run=_store, action="grep")

    gc = actions.add_parser("gc", parents=[shared], help="delete what has outlived its tenant's retention")
    gc.add_argument("--older-than", metavar="AGE", help="such as 30d: this age for all, whatever policies say")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    gc.set_defaults(run=_store, action="gc")


def _serve(chosen: argparse.Namespace) -> int:
    settings = _settings(chosen)
    from proxy.server.runner import serve

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


def _demo(chosen: argparse.Namespace) -> int:
    from proxy.demo import run

    return run()


def _settings(chosen: argparse.Namespace) -> Settings:
    from proxy.settings import read

    flags: Mapping[str, object] = vars(chosen)
    return read({name: text for name, text in flags.items() if text is None or isinstance(text, str)})
