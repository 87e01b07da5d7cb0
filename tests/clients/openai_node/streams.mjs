// What the SDK makes of streams: reads `[[api, stream], …]` from standard input, and prints the replies.
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const messages = [{ role: "user", content: "hi" }];
const made = [];
for (const [api, stream] of JSON.parse(await text(process.stdin))) {
  const reply = () => new Response(stream, { headers: { "content-type": "text/event-stream" } });
  const client = new OpenAI({ apiKey: "x", fetch: async () => reply() });
  made.push(
    api === "chat"
      ? await client.chat.completions.stream({ model: "m", messages }).finalChatCompletion()
      : await client.responses.stream({ model: "m", input: messages }).finalResponse(),
  );
}
console.log(JSON.stringify(made));
