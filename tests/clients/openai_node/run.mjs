// openai-node's own agent loop, `runTools`, streamed.
import { readFile } from "node:fs/promises";
import OpenAI from "openai";

const readLog = {
  type: "function",
  function: {
    name: "read_log",
    description: "The text of a log file.",
    parameters: {
      type: "object",
      properties: { path: { type: "string" } },
      required: ["path"],
    },
    parse: JSON.parse,
    function: ({ path }) => readFile(path, "utf8"),
  },
};

const runner = new OpenAI().chat.completions.runTools({
  model: "scripted",
  stream: true,
  messages: [{ role: "user", content: process.argv[2] }],
  tools: [readLog],
});
console.log(await runner.finalContent());
