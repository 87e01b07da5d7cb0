// An agent of LangChain.js over chat completions.
import { readFile } from "node:fs/promises";
import { createAgent, tool } from "langchain";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const readLog = tool(({ path }) => readFile(path, "utf8"), {
  name: "read_log",
  description: "The text of a log file.",
  schema: z.object({ path: z.string() }),
});

async function talk(name, prompts) {
  const model = new ChatOpenAI({ model: name, useResponsesApi: false });
  const agent = createAgent({ model, tools: [readLog] });
  let messages = [];
  for (const content of prompts) {
    ({ messages } = await agent.invoke({ messages: [...messages, { role: "user", content }] }));
  }
  return messages.at(-1).content;
}

const answers = {};
for (const [name, prompts] of Object.entries(JSON.parse(process.argv[2]))) answers[name] = await talk(name, prompts);
console.log(JSON.stringify(answers));
