"""A crew of one agent over CrewAI's own OpenAI client. Tasks share no conversation, so one task
says everything."""

import json
import sys
from pathlib import Path

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("read_log")
def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    llm = LLM(model=model, provider="openai", stream=True)
    agent = Agent(
        role="reader",
        goal="Read logs.",
        backstory="You read logs.",
        tools=[read_log],
        llm=llm,
        max_iter=30,
    )
    task = Task(description="\n".join(prompts), expected_output="The answer.", agent=agent)
    return str(Crew(agents=[agent], tasks=[task]).kickoff())


answers = {model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()}
print("\n" + json.dumps(answers))
