"""aider's coder, driven as its documentation describes. The output of the user's commands becomes
user messages."""

import json
import sys

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model


def talk(model: str, prompts: list[str]) -> str:
    io = InputOutput(yes=True, pretty=False, fancy_input=False)
    coder = Coder.create(
        main_model=Model(f"openai/{model}"),
        edit_format="ask",
        io=io,
        use_git=False,
        map_tokens=0,
        detect_urls=False,
    )
    answer = ""
    for at, prompt in enumerate(prompts):
        if at < 2:
            for number in range(3 * at, 3 * at + 3):
                coder.run(f"/run cat part{number}.log")
        answer = coder.run(prompt)
    return answer


answers = {model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()}
print("\n" + json.dumps(answers))
