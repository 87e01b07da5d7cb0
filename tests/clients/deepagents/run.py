"""A deep agent over langchain-openai, streamed. Its own tools `grep` and `read_file` collide with
the proxy's."""

import sys

from deepagents import create_deep_agent
from deepagents.backends import FilesystemBackend
from langchain_openai import ChatOpenAI

agent = create_deep_agent(
    ChatOpenAI(model="scripted", streaming=True, stream_usage=True, use_responses_api=False),
    backend=FilesystemBackend(root_dir=".", virtual_mode=True),
)
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
