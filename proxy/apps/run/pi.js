// Leads pi's own providers to the proxy of `offload-proxy run`, which starts pi with `-e` and this file.
export default function (pi) {
  pi.registerProvider("openai", { baseUrl: process.env.OPENAI_BASE_URL });
  pi.registerProvider("anthropic", { baseUrl: process.env.ANTHROPIC_BASE_URL });
}
