"""An agent of Langroid with the API's own tool calls, over chat completions."""

import json
import sys
from pathlib import Path

import langroid as lr
from langroid.agent.tool_message import ToolMessage
from langroid.language_models.openai_gpt import OpenAIGPTConfig


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


print(json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()}))
