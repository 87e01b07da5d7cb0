// An agent of Mastra over chat completions, streamed. It sends a finished turn's steps as one reply.
import { readFile } from "node:fs/promises";
import { createOpenAI } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { Memory } from "@mastra/memory";
import { InMemoryStore } from "@mastra/core/storage";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const readLog = createTool({
  id: "read_log",
  description: "The text of a log file.",
  inputSchema: z.object({ path: z.string() }),
  execute: (input) => readFile(input.path, "utf8"),
});

async function talk(name, prompts) {
  const agent = new Agent({
    id: "reader",
    name: "reader",
    instructions: "You read logs.",
    model: openai.chat(name),
    tools: { read_log: readLog },
    memory: new Memory({ storage: new InMemoryStore(), options: { lastMessages: 100, generateTitle: false } }),
  });
  let answer = "";
  for (const content of prompts) {
    const memory = { thread: name, resource: "user" };
    const run = await agent.stream(content, { memory, maxSteps: 20 });
    answer = await run.text;
  }
  return answer;
}

const answers = {};
for (const [name, prompts] of Object.entries(JSON.parse(process.argv[2]))) answers[name] = await talk(name, prompts);
console.log(JSON.stringify(answers));
process.exit(0);
