"""A minimal agent loop over openai-python's Responses, streamed or plain, that sends every item
back itself."""

import json
import sys
from pathlib import Path

import openai

READ_LOG = {
    "type": "function",
    "name": "read_log",
    "description": "The text of a log file.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


def ask(model: str, items: list, streamed: bool):
    options = {"model": model, "input": items, "tools": [READ_LOG], "store": False}
    options["include"] = ["reasoning.encrypted_content"]
    if not streamed:
        return openai.responses.create(**options)
    with openai.responses.stream(**options) as stream:
        return stream.get_final_response()


def talk(model: str, prompts: list[str], streamed: bool) -> str:
    items: list = []
    for prompt in prompts:
        items.append({"role": "user", "content": prompt})
        calls = [True]
        while calls:
            response = ask(model, items, streamed)
            items += [
                item.model_dump(exclude={"parsed_arguments"}, exclude_none=True)
                for item in response.output
            ]
            calls = [item for item in response.output if item.type == "function_call"]
            items += [result(call) for call in calls]
    return response.output_text


def result(call) -> dict:
    path = json.loads(call.arguments)["path"]
    return {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": Path(path).read_text(),
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
