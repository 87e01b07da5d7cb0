// What the SDK makes of streams: reads `[[api, stream], …]` from standard input, and prints the replies.
import { text } from "node:stream/consumers";
import Anthropic from "@anthropic-ai/sdk";

const messages = [{ role: "user", content: "hi" }];
const made = [];
for (const [, stream] of JSON.parse(await text(process.stdin))) {
  const reply = () => new Response(stream, { headers: { "content-type": "text/event-stream" } });
  const client = new Anthropic({ apiKey: "x", fetch: async () => reply() });
  made.push(await client.beta.messages.stream({ model: "m", max_tokens: 9, messages }).finalMessage());
}
console.log(JSON.stringify(made));
