"""The table of agents: what leads each to the proxy, and what its upstream is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.apps.run.agents import AGENTS, lead

AT = "http://127.0.0.1:41234"
OPENAI, ANTHROPIC = "https://api.openai.com/v1", "https://api.anthropic.com"
KIMI = {"KIMI_MODEL_NAME": "k", "KIMI_MODEL_API_KEY": "sk"}


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.names[0])
def test_each_row_leads_to_the_proxy_or_says_why_not(agent) -> None:  # type: ignore[no-untyped-def]
    assert agent.source
    led = lead([agent.names[0]], dict.fromkeys(agent.needs, "x"), None)
    command, variables = led.at(AT)
    assert led.refusal or {AT, f"{AT}/v1"} <= set(variables.values())
    assert "PROXY" not in f"{command}{variables}"
    assert bool(led.refusal) == (bool(agent.refusal) and not agent.needs)


@pytest.mark.parametrize(
    ("command", "started"),
    [
        (["claude", "-p", "hi"], ["claude", "-p", "hi"]),
        (["codex", "exec", "hi"], ["codex", "-c", f'openai_base_url="{AT}/v1"', "exec", "hi"]),
        (["/opt/bin/codex.exe"], ["/opt/bin/codex.exe", "-c", f'openai_base_url="{AT}/v1"']),
        (["npx", "-y", "@openai/codex@latest", "exec"], 
         ["npx", "-y", "@openai/codex@latest", "-c", f'openai_base_url="{AT}/v1"', "exec"]),
        (["qwen", "-p", "hi"], ["qwen", "--auth-type", "openai", "-p", "hi"]),
        (["qwen", "--auth-type=openai"], ["qwen", "--auth-type=openai"]),
        (["npx"], ["npx"]),
        (["python", "agent.py"], ["python", "agent.py"]),
    ],
)  # fmt: skip
def test_arguments_come_first(command: list[str], started: list[str]) -> None:
    assert lead(command, {}, None).at(AT)[0] == started


def test_any_other_command_gets_the_variables_of_the_sdks() -> None:
    _, variables = lead(["python", "agent.py"], {}, None).at(AT)
    assert variables == {
        "OPENAI_BASE_URL": f"{AT}/v1",
        "OPENAI_API_BASE": f"{AT}/v1",
        "ANTHROPIC_BASE_URL": AT,
        "ANTHROPIC_API_BASE": AT,
    }


@pytest.mark.parametrize(
    ("name", "environment", "openai", "anthropic"),
    [
        ("x", {}, OPENAI, ANTHROPIC),
        ("x", {"OPENAI_BASE_URL": "http://a/v1"}, "http://a/v1", ANTHROPIC),
        ("x", {"OPENAI_API_BASE": "http://a/v1", "ANTHROPIC_BASE_URL": "http://b"}, "http://a/v1", "http://b"),
        ("copilot", {"COPILOT_PROVIDER_BASE_URL": "http://c", "OPENAI_BASE_URL": "http://a"}, "http://c", ANTHROPIC),
        ("copilot", {"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": "http://c"}, OPENAI, "http://c"),
        ("kimi", KIMI, "https://api.moonshot.ai/v1", ANTHROPIC),
        ("kimi", {**KIMI, "KIMI_MODEL_PROVIDER_TYPE": "openai"}, OPENAI, ANTHROPIC),
        ("kimi", {**KIMI, "KIMI_MODEL_PROVIDER_TYPE": "anthropic"}, OPENAI, ANTHROPIC),
    ],
)  # fmt: skip
def test_the_upstream_is_where_the_environment_pointed(
    name: str, environment: dict[str, str], openai: str, anthropic: str
) -> None:
    led = lead([name], environment, None)
    assert (led.openai, led.anthropic) == (openai, anthropic)


def test_what_speaks_anthropics_api_gets_an_address_without_v1() -> None:
    environment = {"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_API_KEY": "sk"}
    assert lead(["copilot"], environment, None).at(AT)[1]["COPILOT_PROVIDER_BASE_URL"] == AT


@pytest.mark.parametrize(
    ("name", "environment", "why"),
    [
        ("cline", {}, "only its settings file names an address"),
        ("openclaw", {}, "only its settings file names an address"),
        ("copilot", {}, "set COPILOT_PROVIDER_API_KEY and COPILOT_MODEL"),
        (
            "copilot",
            {"COPILOT_PROVIDER_API_KEY": "k", "COPILOT_PROVIDER_TYPE": "azure"},
            "PROVIDER_TYPE is azure",
        ),
        ("kimi", {"KIMI_MODEL_NAME": "k"}, "set KIMI_MODEL_NAME and KIMI_MODEL_API_KEY"),
    ],
)
def test_an_agent_that_only_a_file_could_lead_is_not_started(
    name: str, environment: dict[str, str], why: str
) -> None:
    assert why in lead([name], environment, None).refusal


def test_configuration_in_memory_is_merged() -> None:
    mine = {"model": "anthropic/x", "provider": {"openai": {"options": {"timeout": 9}}}}
    _, variables = lead(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(mine)}, None).at(AT)
    merged = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert merged["model"] == "anthropic/x"
    assert merged["provider"]["openai"]["options"] == {"timeout": 9, "baseURL": f"{AT}/v1"}
    _, variables = lead(["opencode"], {"OPENCODE_CONFIG_CONTENT": "not JSON"}, None).at(AT)
    assert json.loads(variables["OPENCODE_CONFIG_CONTENT"])["provider"]["anthropic"]


def test_a_proxy_of_the_network_is_not_asked_for_this_machine() -> None:
    assert "NO_PROXY" not in lead(["claude"], {}, None).at(AT)[1]
    environment = {"https_proxy": "http://corporate:3128", "NO_PROXY": ".corp"}
    _, variables = lead(["claude"], environment, None).at(AT)
    assert variables["NO_PROXY"] == variables["no_proxy"] == ".corp,127.0.0.1"


def test_what_the_user_wrote_stays_as_it_is() -> None:
    mine = {"mcp": {"x": {"environment": {"HTTP_PROXY": "http://corporate:3128"}}}}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(mine)}
    command = ["opencode", "run", "Explain HTTP_PROXY."]
    started, variables = lead(command, environment, None).at(AT)
    assert started == command
    assert json.loads(variables["OPENCODE_CONFIG_CONTENT"])["mcp"] == mine["mcp"]


@pytest.mark.parametrize(
    ("name", "file", "kept", "environment", "login", "openai"),
    [
        ("codex", ".codex/auth.json", {"tokens": {"access_token": "t"}}, {}, True,
         "https://chatgpt.com/backend-api/codex"),
        ("codex", ".codex/auth.json", {"OPENAI_API_KEY": "sk", "tokens": None}, {}, False, OPENAI),
        ("codex", ".codex/auth.json", {"tokens": {"access_token": "t"}}, {"OPENAI_API_KEY": "sk"}, False, OPENAI),
        ("claude", ".claude/.credentials.json", {"claudeAiOauth": {"accessToken": "t"}}, {}, True, OPENAI),
        ("claude", ".claude/.credentials.json", [], {}, False, OPENAI),
    ],
)  # fmt: skip
def test_a_login_by_subscription_is_known(
    tmp_path: Path,
    name: str,
    file: str,
    kept: object,
    environment: dict[str, str],
    login: bool,
    openai: str,
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(json.dumps(kept))
    led = lead([name], environment, tmp_path)
    assert (led.login, led.openai) == (login, openai)
    assert not lead([name], environment, tmp_path / "elsewhere").login
