"""An agent of openai-agents over chat completions, streamed."""

import asyncio
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


async def run(task: str) -> str:
    model = OpenAIChatCompletionsModel("scripted", AsyncOpenAI())
    running = Runner.run_streamed(
        Agent("reader", tools=[read_log], model=model), task, max_turns=20
    )
    async for _event in running.stream_events():
        pass
    return running.final_output


set_tracing_disabled(True)
print(asyncio.run(run(sys.argv[1])))
