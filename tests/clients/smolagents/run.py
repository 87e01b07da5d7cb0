"""The agents of smolagents: calls by tool, by code, and by code in JSON. Results come back as user
messages."""

import json
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

AGENTS = {
    "tool": lambda **options: ToolCallingAgent(**options, stream_outputs=True),
    "code": lambda **options: CodeAgent(**options, stream_outputs=True),
    "json": lambda **options: CodeAgent(**options, use_structured_outputs_internally=True),
}


@tool
def read_log(path: str) -> str:
    """The text of a log file.

    Args:
        path: The file.
    """
    return Path(path).read_text()


def talk(kind: str, model: str, prompts: list[str]) -> str:
    agent = AGENTS[kind](
        model=OpenAIModel(model_id=model), tools=[read_log], max_steps=20, verbosity_level=0
    )
    answer = ""
    for prompt in prompts:
        answer = agent.run(prompt, reset=False)
    return str(answer)


print(
    "\n"
    + json.dumps(
        {
            model: talk(sys.argv[1], model, prompts)
            for model, prompts in json.loads(sys.argv[2]).items()
        }
    )
)
