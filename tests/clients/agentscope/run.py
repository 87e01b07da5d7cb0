"""An agent of AgentScope over chat completions, streamed."""

import asyncio
import json
import os
import sys
from pathlib import Path

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit


def read_log(path: str) -> str:
    """The text of a log file.

    Args:
        path (str): of the file
    """
    return Path(path).read_text()


async def talk(name: str, prompts: list[str]) -> str:
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="Anyone may read.")
    credential = OpenAICredential(
        api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"]
    )
    agent = Agent(
        name="clerk",
        system_prompt="You read logs.",
        model=OpenAIChatModel(credential, name, context_size=1_000_000),
        toolkit=Toolkit(tools=[FunctionTool(read_log, permission=allowed)]),
    )
    said = [await agent.reply(UserMsg("user", prompt)) for prompt in prompts]
    return said[-1].get_text_content()


print(
    json.dumps(
        {
            model: asyncio.run(talk(model, prompts))
            for model, prompts in json.loads(sys.argv[1]).items()
        }
    )
)
