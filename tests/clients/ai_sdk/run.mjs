// An agent loop of the AI SDK over chat completions, Responses or Messages, streamed.
import { readFile } from "node:fs/promises";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const stateless = { store: false, include: ["reasoning.encrypted_content"] };
const apis = {
  chat: { model: openai.chat },
  responses: { model: openai.responses, providerOptions: { openai: stateless } },
  messages: { model: anthropic, providerOptions: { anthropic: { thinking: { type: "adaptive" } } } },
};

// Node waits 300 seconds between two bytes of a reply; the SDK waits for text and thinking only if it is told to.
const bytes = Number(process.env.BYTES_TIMEOUT_MS);
const content = process.env.CONTENT_TIMEOUT_MS;
const timeout = content ? { chunkMs: Number(content) } : undefined;
if (bytes) {
  await fetch("data:,"); // makes the dispatcher
  const dispatcher = Symbol.for("undici.globalDispatcher.1");
  const { constructor: Agent } = globalThis[dispatcher];
  globalThis[dispatcher] = new Agent({ bodyTimeout: bytes });
}

const tools = {
  read_log: tool({
    description: "The text of a log file.",
    inputSchema: z.object({ path: z.string() }),
    execute: ({ path }) => readFile(path, "utf8"),
  }),
};

async function talk({ model, ...options }, name, prompts) {
  const messages = [];
  let answer = "";
  for (const content of prompts) {
    messages.push({ role: "user", content });
    const run = streamText({ model: model(name), messages, tools, stopWhen: stepCountIs(20), timeout, ...options });
    answer = await run.text;
    messages.push(...(await run.responseMessages));
  }
  return answer;
}

const answers = {};
for (const [name, prompts] of Object.entries(JSON.parse(process.argv[3]))) {
  answers[name] = await talk(apis[process.argv[2]], name, prompts);
}
console.log(JSON.stringify(answers));
