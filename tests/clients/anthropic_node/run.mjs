// The tool runner of Anthropic's SDK for TypeScript, streamed.
import { readFile } from "node:fs/promises";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic();
const readLog = betaZodTool({
  name: "read_log",
  description: "The text of a log file.",
  inputSchema: z.object({ path: z.string() }),
  run: ({ path }) => readFile(path, "utf8"),
});

async function talk(model, prompts) {
  let messages = [];
  let answer = "";
  for (const content of prompts) {
    const runner = client.beta.messages.toolRunner({
      model,
      max_tokens: 2000,
      thinking: { type: "adaptive" },
      messages: [...messages, { role: "user", content }],
      tools: [readLog],
      stream: true,
      thread: false, // else the history is upstream's, and cannot be planned
    });
    for await (const stream of runner) await stream.finalMessage();
    const last = await runner.done();
    messages = runner.params.messages;
    if (messages.at(-1).role === "user") messages = [...messages, { role: "assistant", content: last.content }];
    answer = last.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  }
  return answer;
}

const answers = {};
for (const [model, prompts] of Object.entries(JSON.parse(process.argv[2]))) {
  answers[model] = await talk(model, prompts);
}
console.log(JSON.stringify(answers));
