"""An agent of openai-agents with its default model, which speaks Responses, streamed."""

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


async def talk(model: str, prompts: list[str]) -> str:
    agent, items = Agent("reader", tools=[read_log], model=model), []
    for prompt in prompts:
        running = Runner.run_streamed(
            agent, [*items, {"role": "user", "content": prompt}], max_turns=20
        )
        async for _event in running.stream_events():
            pass
        items = running.to_input_list()
    return running.final_output


async def main() -> None:
    answers = {
        model: await talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()
    }
    print(json.dumps(answers))


set_tracing_disabled(True)
asyncio.run(main())
