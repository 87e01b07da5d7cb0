"""A session of the Claude Agent SDK with Claude Code's own tools."""

import asyncio
import json
import sys

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage


async def talk(model: str, prompts: list[str]) -> str:
    options = ClaudeAgentOptions(model=model, allowed_tools=["Read"], thinking={"type": "adaptive"})
    answer = ""
    async with ClaudeSDKClient(options) as client:
        for prompt in prompts:
            await client.query(prompt)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    answer = message.result
    return answer


async def main() -> None:
    asked = json.loads(sys.argv[1])
    print(json.dumps({model: await talk(model, prompts) for model, prompts in asked.items()}))


asyncio.run(main())
