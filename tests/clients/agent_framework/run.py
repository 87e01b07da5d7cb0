"""An agent of Microsoft's Agent Framework over chat completions, streamed."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient


def read_log(path: Annotated[str, "of the file"]) -> str:
    """The text of a log file."""
    return Path(path).read_text()


async def talk(model: str, prompts: list[str]) -> str:
    agent = Agent(OpenAIChatCompletionClient(model=model), name="reader", tools=[read_log])
    session, answer = agent.create_session(), ""
    for prompt in prompts:
        answer = ""
        async for update in agent.run(prompt, session=session, stream=True):
            answer += update.text or ""
    return answer


async def main() -> None:
    asked = json.loads(sys.argv[1])
    print(json.dumps({model: await talk(model, prompts) for model, prompts in asked.items()}))


asyncio.run(main())
