"""A ReAct agent of LangGraph over langchain-openai, streamed; its checkpointer keeps the
conversation."""

import json
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


def read_log(path: str) -> str:
    """The text of a log file."""
    return Path(path).read_text()


def talk(model: str, prompts: list[str]) -> str:
    chat = ChatOpenAI(model=model, streaming=True, stream_usage=True, use_responses_api=False)
    agent = create_agent(chat, [read_log], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": model}, "recursion_limit": 60}
    for prompt in prompts:
        answer = agent.invoke({"messages": [("user", prompt)]}, config)["messages"][-1].content
    return answer


print(
    json.dumps({model: talk(model, prompts) for model, prompts in json.loads(sys.argv[1]).items()})
)
