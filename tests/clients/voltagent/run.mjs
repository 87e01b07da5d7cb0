// An agent of VoltAgent over chat completions, streamed. It sends a finished turn's steps as one reply.
import { readFile } from "node:fs/promises";
import { createOpenAI } from "@ai-sdk/openai";
import { Agent, createTool } from "@voltagent/core";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const readLog = createTool({
  name: "read_log",
  description: "The text of a log file.",
  parameters: z.object({ path: z.string() }),
  execute: ({ path }) => readFile(path, "utf8"),
});

async function talk(name, prompts) {
  const agent = new Agent({ name: "reader", instructions: "You read logs.", model: openai.chat(name), tools: [readLog] });
  let answer = "";
  for (const content of prompts) {
    const memory = { userId: "user", conversationId: name };
    const run = await agent.streamText(content, { ...memory, memory, maxSteps: 20 });
    answer = await run.text;
  }
  return answer;
}

const answers = {};
for (const [name, prompts] of Object.entries(JSON.parse(process.argv[2]))) answers[name] = await talk(name, prompts);
console.log(JSON.stringify(answers));
process.exit(0);
