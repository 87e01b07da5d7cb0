// opencode's own server, and one session of it for each model. Starting the program takes longer than a session.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";

const [program, conversations] = process.argv.slice(2);
const server = spawn(program, ["serve", "--port", "0"], { stdio: ["ignore", "pipe", "inherit"] });
let url;
for await (const line of createInterface({ input: server.stdout })) {
  url = line.match(/https?:\/\/\S+/)?.[0];
  if (url) break;
}

async function post(path, body) {
  const headers = { "content-type": "application/json" };
  const reply = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(`${path}: ${reply.status} ${await reply.text()}`);
  return reply.json();
}

async function talk(modelID, prompts) {
  const { id } = await post("/session", { title: "Logs" });
  let answer = "";
  for (const text of prompts) {
    const model = { providerID: "offload", modelID };
    const { parts } = await post(`/session/${id}/message`, { model, parts: [{ type: "text", text }] });
    answer = parts.filter((part) => part.type === "text").map((part) => part.text).join("");
  }
  return answer;
}

try {
  const answers = {};
  for (const [model, prompts] of Object.entries(JSON.parse(conversations))) {
    answers[model] = await talk(model, prompts);
  }
  console.log(JSON.stringify(answers));
} finally {
  server.kill();
  await once(server, "exit");
}
