// Leads pi's own providers to the proxy of `offload-proxy run`, which starts pi with `-e` and this file. pi does not
// compact at the model's window, as the proxy does it before.
const ADDRESSES = { openai: process.env.OPENAI_BASE_URL, anthropic: process.env.ANTHROPIC_BASE_URL };
const WINDOW = 1_000_000; // tokens

export default function (pi) {
  for (const [provider, baseUrl] of Object.entries(ADDRESSES)) pi.registerProvider(provider, { baseUrl });
  pi.on("session_start", (_, { modelRegistry }) => {
    for (const model of modelRegistry.getAll()) {
      if (model.provider in ADDRESSES) model.contextWindow = Math.max(model.contextWindow, WINDOW);
    }
  });
}
