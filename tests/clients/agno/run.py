"""An agent of Agno over chat completions, streamed, with its history in memory."""

import json
import sys
from pathlib import Path

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat


def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    agent = Agent(
        model=OpenAIChat(id=model),
        tools=[read_log],
        db=InMemoryDb(),
        session_id=model,
        add_history_to_context=True,
        num_history_runs=9,
        telemetry=False,
    )
    answer = ""
    for prompt in prompts:
        events = agent.run(prompt, stream=True)
        answer = "".join(event.content or "" for event in events if event.event == "RunContent")
    return answer


print(
    json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()})
)
