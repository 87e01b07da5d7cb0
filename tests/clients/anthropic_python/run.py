"""A minimal agent loop over anthropic-python, streamed or plain, with adaptive thinking."""

import json
import sys
from pathlib import Path

import anthropic

READ_LOG = {
    "name": "read_log",
    "description": "The text of a log file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
client = anthropic.Anthropic()


def ask(model: str, messages: list, streamed: bool):
    options = {"model": model, "messages": messages, "tools": [READ_LOG], "max_tokens": 2000}
    options["thinking"] = {"type": "adaptive"}
    if not streamed:
        return client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        return stream.get_final_message()


def talk(model: str, prompts: list[str], streamed: bool) -> str:
    messages: list = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        while True:
            reply = ask(model, messages, streamed)
            messages.append({"role": "assistant", "content": reply.content})
            if reply.stop_reason != "tool_use":
                break
            calls = [block for block in reply.content if block.type == "tool_use"]
            messages.append({"role": "user", "content": [result(call) for call in calls]})
    return "".join(block.text for block in reply.content if block.type == "text")


def result(call) -> dict:
    return {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": Path(call.input["path"]).read_text(),
    }


streamed = sys.argv[1] == "streamed"
print(
    json.dumps(
        {
            model: talk(model, prompts, streamed)
            for model, prompts in json.loads(sys.argv[2]).items()
        }
    )
)
