"""An agent of pydantic-ai; its event handler makes it stream."""

import sys
from collections.abc import AsyncIterable
from pathlib import Path

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import AgentStreamEvent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("scripted"))


@agent.tool_plain
def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


async def watch(_: RunContext, events: AsyncIterable[AgentStreamEvent]) -> None:
    async for _event in events:
        pass


print(agent.run_sync(sys.argv[1], event_stream_handler=watch).output)
