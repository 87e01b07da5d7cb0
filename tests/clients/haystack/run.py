"""An agent of Haystack over chat completions, streamed."""

import json
import sys
from pathlib import Path
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def read_log(path: Annotated[str, "of the file"]) -> str:
    """The text of a log file."""
    return Path(path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    generator = OpenAIChatGenerator(model=model, streaming_callback=lambda chunk: None)
    agent, messages = Agent(chat_generator=generator, tools=[read_log]), []
    for prompt in prompts:
        messages = agent.run(messages=[*messages, ChatMessage.from_user(prompt)])["messages"]
    return messages[-1].text


print(
    json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()})
)
