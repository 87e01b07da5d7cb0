// An agent of LlamaIndex over chat completions, streamed.
import { readFile } from "node:fs/promises";
import { OpenAI } from "@llamaindex/openai";
import { agent } from "@llamaindex/workflow";
import { createMemory, tool } from "llamaindex";
import { z } from "zod";

// It drops the oldest messages at half of the window that it knows of.
class Roomy extends OpenAI {
  get metadata() {
    return { ...super.metadata, contextWindow: 10_000_000 };
  }
}

const readLog = tool({
  name: "read_log",
  description: "The text of a log file.",
  parameters: z.object({ path: z.string() }),
  execute: ({ path }) => readFile(path, "utf8"),
});

async function talk(name, prompts) {
  const llm = new Roomy({ model: name });
  const memory = createMemory({ llm });
  const worker = agent({ llm, memory, tools: [readLog] });
  let answer;
  for (const prompt of prompts) answer = (await worker.run(prompt)).data.result;
  return answer;
}

const answers = {};
for (const [name, prompts] of Object.entries(JSON.parse(process.argv[2]))) answers[name] = await talk(name, prompts);
console.log(JSON.stringify(answers));
