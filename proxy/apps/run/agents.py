"""What leads each agent to the proxy without a file of its own being written: the one table of
agents.

In variables and arguments, `PROXY` stands for the proxy's address, such as
`http://127.0.0.1:41234`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.settings import ANTHROPIC

OPENAI = "https://api.openai.com/v1"
MOONSHOT = "https://api.moonshot.ai/v1"

FOR_ALL = {
    "OPENAI_BASE_URL": "PROXY/v1",
    "OPENAI_API_BASE": "PROXY/v1",
    "ANTHROPIC_BASE_URL": "PROXY",
    "ANTHROPIC_API_BASE": "PROXY",
}
"""What every command gets: the variables of OpenAI's and Anthropic's SDKs, and those that litellm
reads (litellm 1.106.2, `llms/openai` and `llms/anthropic`)."""

POINTED_OPENAI = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
POINTED_ANTHROPIC = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE")
"""Where these pointed before is the upstream."""

RUNNERS = frozenset({"bunx", "npx", "pnpx", "pipx", "uvx"})
"""They start the package that they are told."""


PROXIES = tuple(
    name for plain in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (plain, plain.lower())
)
"""Variables that name a proxy of the network, through which nobody reaches this machine."""


@dataclass(frozen=True)
class KnownAgent:
    """A row of the table. `names` are those of its program and of its package."""

    names: tuple[str, ...]
    source: str
    """The package, with the version that was read, and where in it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Those that begin with `{` are JSON, and are merged into what the user has there."""
    arguments: tuple[str, ...] = ()
    """They come first, unless the user gives one of them."""
    needs: tuple[str, ...] = ()
    """Variables without which only a settings file could lead it."""
    refusal: str = ""
    """Why it is not started, or not without what it `needs`."""
    pointed: str = ""
    """A variable of its own that says what the upstream is."""
    kind: str = ""
    """A variable of its own that says which API it speaks; `anthropic` is Anthropic's."""
    kinds: Mapping[str, str] = field(
        default_factory=lambda: {"": OPENAI, "openai": OPENAI, "anthropic": ANTHROPIC}
    )
    """Its values, and the upstream of each where nothing else says it."""
    login: str = ""
    """The file, below its folder, that it keeps a subscription's login in."""
    folder: tuple[str, str] = ("", "")
    """Its folder in the home directory, and the variable that names another."""
    keys: tuple[str, ...] = ()
    """Variables with a key, which goes before a login."""
    subscription: str = ""
    """The upstream of a login; empty if it is that of a key."""


_OPENCODE = {
    "provider": {
        "openai": {"options": {"baseURL": "PROXY/v1"}},
        "anthropic": {"options": {"baseURL": "PROXY/v1"}},
    }
}
_PI = str(Path(__file__).with_name("pi.js"))

AGENTS = (
    KnownAgent(
        ("claude", "claude-code"),
        "@anthropic-ai/claude-code 2.1.330: its environment; ~/.claude/.credentials.json has a login",
        folder=(".claude", "CLAUDE_CONFIG_DIR"),
        login=".credentials.json",
        keys=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    ),
    KnownAgent(
        ("codex",),
        "@openai/codex 0.169.0: `openai_base_url` of its configuration, for its own provider; ~/.codex/auth.json has "
        "a login, whose upstream is ChatGPT's",
        arguments=("-c", 'openai_base_url="PROXY/v1"'),
        folder=(".codex", "CODEX_HOME"),
        login="auth.json",
        keys=("OPENAI_API_KEY", "CODEX_API_KEY"),
        subscription="https://chatgpt.com/backend-api/codex",
    ),
    KnownAgent(
        ("opencode", "opencode-ai"),
        "opencode-ai 1.18.33: OPENCODE_CONFIG_CONTENT, which comes after its files",
        variables={"OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE)},
    ),
    KnownAgent(
        ("copilot",),
        "@github/copilot 1.0.102: `copilot help providers`",
        variables={
            "COPILOT_PROVIDER_BASE_URL": "PROXY/v1",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "1000000",
        },
        needs=("COPILOT_PROVIDER_API_KEY",),
        refusal="with a login its models come from GitHub alone; set COPILOT_PROVIDER_API_KEY and COPILOT_MODEL",
        pointed="COPILOT_PROVIDER_BASE_URL",
        kind="COPILOT_PROVIDER_TYPE",
    ),
    KnownAgent(
        ("kimi", "kimi-code"),
        "@moonshot-ai/kimi-code 2.1.0: `applyEnvModelConfig`",
        variables={
            "KIMI_MODEL_BASE_URL": "PROXY/v1",
            "KIMI_MODEL_MAX_CONTEXT_SIZE": "1000000",
        },
        needs=("KIMI_MODEL_NAME", "KIMI_MODEL_API_KEY"),
        refusal="only these variables lead it without a change in its files: set KIMI_MODEL_NAME and "
        "KIMI_MODEL_API_KEY",
        pointed="KIMI_MODEL_BASE_URL",
        kind="KIMI_MODEL_PROVIDER_TYPE",
        kinds={"": MOONSHOT, "kimi": MOONSHOT, "openai": OPENAI, "anthropic": ANTHROPIC},
    ),
    KnownAgent(
        ("qwen", "qwen-code"),
        "@qwen-code/qwen-code 0.24.4: `--auth-type openai` reads OPENAI_BASE_URL",
        arguments=("--auth-type", "openai"),
    ),
    KnownAgent(
        ("pi", "pi-coding-agent"),
        "@mariozechner/pi-coding-agent 0.73.1: docs/custom-provider.md, an extension that overrides its providers",
        arguments=("-e", _PI),
    ),
    KnownAgent(("aider", "aider-chat"), "aider-chat 0.86.2: litellm's variables"),
    KnownAgent(("gptme",), "gptme 0.35.1: the variables of the SDKs"),
    KnownAgent(("mini", "mini-swe-agent"), "mini-swe-agent 2.4.6: litellm's variables"),
    KnownAgent(
        ("cline",),
        "cline 3.0.65: `cline auth` writes ~/.cline/data/settings/providers.json, and nothing else names an address",
        refusal="only its settings file names an address, and `run` writes no file of yours; start `offload-proxy "
        "serve`, then `cline auth -b http://127.0.0.1:8787/v1`",
    ),
    KnownAgent(
        ("openclaw",),
        "openclaw 2026.9.6: `models.providers` of ~/.openclaw/openclaw.json",
        refusal="only its settings file names an address, and `run` writes no file of yours; start `offload-proxy "
        "serve`, and name http://127.0.0.1:8787/v1 in openclaw.json",
    ),
)


@dataclass(frozen=True)
class Led:
    """How a command is started, and the upstreams of both APIs."""

    name: str
    program: tuple[str, ...]
    """The command up to the agent's name."""
    arguments: tuple[str, ...]
    """Ours, which come next."""
    rest: tuple[str, ...]
    variables: Mapping[str, str]
    """Ours. Those that are JSON are merged into what the `environment` has there."""
    environment: Mapping[str, str]
    openai: str
    anthropic: str
    login: bool
    """Whether it logs in by subscription."""
    refusal: str = ""

    def at(self, address: str) -> tuple[list[str], dict[str, str]]:
        """Return the command, and the variables that lead it to the proxy at this address. The
        user's words stay as they are."""

        def leading(ours: str) -> str:
            return ours.replace("PROXY", address)

        environment = self.environment
        variables = {
            name: _merged(environment.get(name, ""), leading(value))
            for name, value in self.variables.items()
        }
        if any(environment.get(name) for name in PROXIES):
            variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), _beside(environment))
        return [*self.program, *map(leading, self.arguments), *self.rest], variables


def lead(command: Sequence[str], environment: Mapping[str, str], home: Path | None) -> Led:
    """Return what leads a command to a proxy. Reads at most whether an agent has a login, in its
    folder in `home`."""
    place = _program(command)
    name = (
        Path(command[place])
        .name.partition("@")[0]
        .removesuffix(".exe")
        .removesuffix(".cmd")
        .lower()
    )
    agent = next((agent for agent in AGENTS if name in agent.names), KnownAgent((name,), ""))
    kind = environment.get(agent.kind, "").lower() if agent.kind else ""
    variables = {**FOR_ALL, **agent.variables}
    if agent.pointed and kind == "anthropic":
        variables[agent.pointed] = "PROXY"
    login = _logs_in(agent, environment, home)
    otherwise = (login and agent.subscription) or agent.kinds.get(kind, "")
    own = environment.get(agent.pointed, "").strip() if agent.pointed else ""
    by_anthropic = kind == "anthropic"
    openai = ("" if by_anthropic else own) or _first(environment, POINTED_OPENAI)
    anthropic = (own if by_anthropic else "") or _first(environment, POINTED_ANTHROPIC)
    missing = not all(environment.get(needed) for needed in agent.needs)
    unknown = kind not in agent.kinds
    return Led(
        name=name,
        program=tuple(command[: place + 1]),
        arguments=_arguments(agent, command),
        rest=tuple(command[place + 1 :]),
        variables=variables,
        environment=environment,
        openai=openai or (OPENAI if by_anthropic else otherwise or OPENAI),
        anthropic=anthropic or ANTHROPIC,
        login=login,
        refusal=f"{agent.kind} is {kind}, which `run` does not know"
        if unknown
        else agent.refusal
        if missing or not agent.needs
        else "",
    )


def _arguments(agent: KnownAgent, command: Sequence[str]) -> tuple[str, ...]:
    """Return an agent's arguments, unless the user chose otherwise."""
    flag = agent.arguments[0] if agent.arguments else ""
    given = any(part == flag or part.startswith(f"{flag}=") for part in command)
    return () if flag.startswith("--") and given else agent.arguments


def _program(command: Sequence[str]) -> int:
    """Return the place of the program's name: behind a runner of packages, that of the package."""
    if Path(command[0]).name not in RUNNERS:
        return 0
    named = (
        place
        for place, part in enumerate(command)
        if place and part != "run" and not part.startswith("-")
    )
    return next(named, 0)


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return next(
        (environment[name].strip() for name in names if environment.get(name, "").strip()), ""
    )


def _beside(environment: Mapping[str, str]) -> str:
    """Return the names that no proxy of the network is for, with this machine."""
    given = _first(environment, ("NO_PROXY", "no_proxy"))
    return f"{given},127.0.0.1" if given else "127.0.0.1"


def _merged(given: str, ours: str) -> str:
    """Return the user's JSON with ours in it; ours alone if one of them is no object."""
    if not ours.startswith("{"):
        return ours
    try:
        value = json.loads(given)
    except ValueError:
        return ours
    return json.dumps(_overlay(value, json.loads(ours))) if isinstance(value, dict) else ours


def _overlay(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, dict)
        merged[key] = _overlay(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _logs_in(agent: KnownAgent, environment: Mapping[str, str], home: Path | None) -> bool:
    """Whether an agent has a login, and no key that goes before it."""
    name, variable = agent.folder
    if not agent.login or any(environment.get(key) for key in agent.keys):
        return False
    folder = environment.get(variable) or (home / name if home else None)
    if folder is None:
        return False
    try:
        kept = json.loads(Path(folder, agent.login).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(kept, dict) and any(
        kept.get(member) for member in ("tokens", "claudeAiOauth")
    )
