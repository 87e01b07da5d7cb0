// An agent loop of the AI SDK over chat completions, streamed.
import { readFile } from "node:fs/promises";
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const tools = {
  read_log: tool({
    description: "The text of a log file.",
    inputSchema: z.object({ path: z.string() }),
    execute: ({ path }) => readFile(path, "utf8"),
  }),
};

async function talk(model, prompts) {
  const messages = [];
  let answer = "";
  for (const content of prompts) {
    messages.push({ role: "user", content });
    const run = streamText({ model: provider.chat(model), messages, tools, stopWhen: stepCountIs(20) });
    answer = await run.text;
    messages.push(...(await run.responseMessages));
  }
  return answer;
}

const answers = {};
for (const [model, prompts] of Object.entries(JSON.parse(process.argv[2]))) {
  answers[model] = await talk(model, prompts);
}
console.log(JSON.stringify(answers));
