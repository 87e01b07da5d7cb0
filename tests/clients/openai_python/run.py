"""A minimal agent loop over openai-python's streaming helper, which accumulates and checks every
chunk."""

import json
import sys
from pathlib import Path

import openai

READ_LOG = {
    "type": "function",
    "function": {
        "name": "read_log",
        "description": "The text of a log file.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}


def run(task: str) -> str:
    client = openai.OpenAI()
    messages: list = [{"role": "user", "content": task}]
    while True:
        with client.chat.completions.stream(
            model="scripted", messages=messages, tools=[READ_LOG]
        ) as stream:
            reply = stream.get_final_completion().choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages += [assistant(reply), *(result(call) for call in reply.tool_calls)]


def assistant(reply) -> dict:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in reply.tool_calls
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}


def result(call) -> dict:
    path = json.loads(call.function.arguments)["path"]
    return {"role": "tool", "tool_call_id": call.id, "content": Path(path).read_text()}


print(run(sys.argv[1]))
