"""An agent of Strands over chat completions, streamed."""

import json
import sys
from pathlib import Path

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.openai import OpenAIModel


@tool
def read_log(path: str) -> str:
    """The text of a log file.

    Args:
        path: of the file
    """
    return Path(path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    agent = Agent(
        model=OpenAIModel(model_id=model),
        tools=[read_log],
        callback_handler=None,
        conversation_manager=NullConversationManager(),
    )
    return [str(agent(prompt)).strip() for prompt in prompts][-1]


print(
    json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()})
)
