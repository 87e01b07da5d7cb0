import { ask, element, moment, number, plain, table, tile } from "./common.js";

const said = (fault) => (fault ? element("span", { class: "bad" }, plain(fault)) : element("span", { class: "good" }, "answers"));

export async function health(page) {
  const found = await ask("health");
  const { dashboard, store, upstreams, caches, policies, reload, windows } = found;
  page.replaceChildren(element("h1", {}, "Health"),
    element("p", {}, "The state of one worker of this machine, asked for just now. Other replicas have pages of their own."),
    element("dl", { class: "tiles" },
      tile("Store", said(store.fault), `breaker: ${plain(store.breaker)}`),
      tile("This dashboard", dashboard.off ? element("span", { class: "bad" }, "off") : element("span", { class: "good" }, "records"),
        `${number(dashboard.written)} rows written by this worker, ${number(dashboard.dropped)} dropped`, plain(dashboard.fault), plain(dashboard.file ?? "")),
      tile("Policies", number(policies.length), reload ? `${reload[1] ? `the last reload failed: ${plain(reload[1])}` : "reloaded"} at ${moment(reload[0])} UTC` : "as read at the start")),
    table("Upstreams", [["Address", ([address]) => address], ["State", ([, fault]) => said(fault)]], Object.entries(upstreams)),
    table("Policies in force", [
      ["Tenant", (row) => row.tenant], ["Upstream", (row) => row.upstream], ["Mode", (row) => row.mode],
      ["Offload above (tokens)", (row) => number(row.max_total_tokens), true],
      ["Held out", (row) => (row.holdout ? `${(100 * row.holdout).toFixed(1)} % of conversations` : "none"), true],
      ["Records kept", (row) => (row.retention === null ? "for ever" : `${number(row.retention / 86400)} days`)],
      ["Rules for", (row) => row.rules.join(", ")],
    ], policies),
    table("Context windows that refusals have shown this worker", [
      ["Namespace", ([name]) => name], ["Upstream", ([, row]) => row.upstream], ["Model", ([, row]) => row.model],
      ["Window (tokens)", ([, row]) => number(row.window), true],
    ], windows),
    table("Caches of this worker", [
      ["Cache", ([name]) => name], ["Entries", ([, size]) => number(size[0]), true], ["Bytes", ([, size]) => number(size[1]), true],
    ], Object.entries(caches)));
}
