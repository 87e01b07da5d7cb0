"""An agent of Google's ADK over LiteLLM and chat completions, streamed."""

import asyncio
import json
import sys
from pathlib import Path

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


async def talk(model: str, prompts: list[str]) -> str:
    agent = Agent(name="reader", model=LiteLlm(model=f"openai/{model}"), tools=[read_log])
    runner, answer = InMemoryRunner(agent, app_name="logs"), ""
    session = await runner.session_service.create_session(app_name="logs", user_id="user")
    for prompt in prompts:
        said = types.Content(role="user", parts=[types.Part(text=prompt)])
        config = RunConfig(streaming_mode=StreamingMode.SSE)
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=said, run_config=config
        ):
            if event.is_final_response() and event.content and event.content.parts:
                answer = "".join(part.text or "" for part in event.content.parts)
    return answer


async def main() -> None:
    asked = json.loads(sys.argv[1])
    print(json.dumps({model: await talk(model, prompts) for model, prompts in asked.items()}))


asyncio.run(main())
