import { ask, column, element, figure, moment, number, plain, table, tile } from "./common.js";

const said = (fault) => (fault ? element("span", { class: "bad" }, plain(fault)) : element("span", { class: "good" }, "answers"));

const both = (title, show) => column(title, show, { phone: 2 });

export async function health(page) {
  const { dashboard, store, upstreams, caches, policies, reload, windows } = await ask("health");
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Health")),
    element("p", {}, "The state of one worker of this machine, asked for just now. Other replicas have pages of their own."),
    element("dl", { class: "tiles" },
      tile("Store", said(store.fault), store.breaker === "closed" ? "works" : `breaker: ${plain(store.breaker)}`),
      tile("This dashboard", dashboard.off ? element("span", { class: "bad" }, "off") : element("span", { class: "good" }, "records"),
        `${number(dashboard.written)} rows written by this worker, ${number(dashboard.dropped)} dropped`, plain(dashboard.fault), plain(dashboard.file ?? "")),
      tile("Policies", number(policies.length), reload ? `${reload[1] ? `the last reload failed: ${plain(reload[1])}` : "reloaded"} at ${moment(reload[0])} UTC` : "as read at the start")),
    table("Upstreams", [column("Address", ([address]) => address, { phone: 1 }), both("State", ([, fault]) => said(fault))], Object.entries(upstreams)),
    table("Policies in force", [
      column("Tenant", (row) => row.tenant, { phone: 1 }), both("Upstream", (row) => row.upstream), column("Mode", (row) => row.mode, { phone: 1 }),
      figure("Offload above (tokens)", (row) => row.max_total_tokens),
      column("Held out", (row) => (row.holdout ? `${(100 * row.holdout).toFixed(1)} % of conversations` : "none"), { raw: (row) => row.holdout, kind: "number" }),
      column("Records kept", (row) => (row.retention === null ? "for ever" : `${number(row.retention / 86400)} days`)),
      column("Rules for", (row) => row.rules.join(", ")),
    ], policies),
    table("Context windows that refusals have shown", [
      column("Namespace", ([name]) => name, { phone: 1 }), both("Upstream", ([, row]) => row.upstream), both("Model", ([, row]) => row.model),
      figure("Window (tokens)", ([, row]) => row.window, { phone: 1 }),
    ], windows),
    table("Caches of this worker", [
      column("Cache", ([name]) => name, { phone: 1 }), figure("Entries", ([, size]) => size[0], { phone: 2 }), figure("Bytes", ([, size]) => size[1], { phone: 2 }),
    ], Object.entries(caches)));
}
