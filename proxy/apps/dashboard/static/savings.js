import { ask, cash, choice, column, element, figure, fleet, inMoney, judged, money, name, number, plain, saving, share, table } from "./common.js";

const model = column("Model", (row) => name(row.model), { raw: (row) => row.model, phone: 1 });
const tenant = column("Tenant", (row) => row.tenant, { phone: 1 });

const MONEY = "Money is for the input, where a model's price is known. What was expected is the price of the same requests as they came, with everything cached that the request before had. What it came to is what upstream billed, with the proxy's own summaries and the rounds in which the model read something back. ";

export async function savings(page, [asked = ""], me) {
  const found = await ask(`savings?period=${encodeURIComponent(asked)}`);
  const { period } = found;
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Savings"), choice("savings", period)),
    element("p", {}, `The sums ${fleet(me)}. `, found.models.some((row) => row.price !== null) ? MONEY : "",
      element("strong", {}, "Whether tasks succeed as often is not measured here.")),
    perModel(found.models), ...misses(found.misses), ...observed(found.models), ...holdout(found.groups));
}

// An amount in money, or why there is none.
const paid = (title, cost) => column(title, (row) => (row.price === null ? "no price" : money(cash(cost(row), row.price))), { raw: (row) => cash(cost(row), row.price) ?? "", kind: "number" });

function bill(row, [before, after]) {
  if (row.price === null) return "no price";
  return before ? judged(before, after, saving(before, after, inMoney(row.price))) : "not known";
}

const perModel = (models, priced = models.some((row) => row.price !== null)) => table("Per tenant and model. Each percentage is of what was expected in its row.", [
  { ...tenant, phone: 2 }, model,
  column("Tokens saved", (row) => share(row.tokens_before, row.tokens_after), { raw: (row) => row.tokens_before - row.tokens_after, kind: "number", phone: priced ? 2 : 1 }),
  ...(priced ? [
    column("Money saved", (row) => bill(row, [row.expected, row.expected - row.saved]), { raw: (row) => cash(row.saved, row.price) ?? "", kind: "number", phone: 1 }),
    paid("Expected", (row) => row.expected),
    paid("Actual", (row) => row.actual),
    { ...paid("Summaries", (row) => row.summaries), kind: "saved-only" },
    column("Requests that cost more", (row) => (row.price === null ? "" : number(row.losses)), { raw: (row) => (row.price === null ? "" : row.losses), kind: "number" }),
  ] : []),
  figure("Requests", (row) => row.requests),
  figure("Rewritten", (row) => row.rewritten, { kind: "saved-only" }),
  figure("Upstream said what it billed", (row) => row.billed, { kind: "saved-only" }),
  figure("Tokens as they came", (row) => row.tokens_before),
  figure("Tokens sent", (row) => row.tokens_after),
], models, "nothing in this period");

const causes = {
  first: "first request that this process saw",
  client: "the client changed its own history",
  expired: "the cache at upstream had expired",
  event: "the proxy moved something",
  other: "not known",
};

function misses(rows) {
  if (!rows.length) return [];
  return [element("h2", {}, "Missing in upstream's cache"), table("Tokens that were not new, and that upstream's cache lacked, by cause.", [
    tenant, model,
    column("Cause", (row) => causes[row.miss] ?? plain(row.miss), { phone: 1 }),
    figure("Requests", (row) => row.requests),
    figure("Tokens", (row) => row.missed_tokens, { phone: 1 }),
  ], rows)];
}

function observed(models) {
  const rows = models.filter((row) => row.observed);
  if (!rows.length) return [];
  return [element("h2", {}, "Only observed"), table("What the plan would have sent and cost. These requests went as they came.", [
    tenant, model,
    figure("Requests", (row) => row.observed),
    figure("Tokens as they came", (row) => row.observed_before, { phone: 2 }),
    figure("Tokens as planned", (row) => row.observed_after, { phone: 2 }),
    column("The plan would save", (row) => share(row.observed_before, row.observed_after), { raw: (row) => row.observed_before - row.observed_after, kind: "number", phone: 1 }),
    ...(rows.some((row) => row.price !== null) ? [
      paid("Money as they came", (row) => row.observed_cost_before),
      paid("Money as planned", (row) => row.observed_cost_after),
      column("Money saved", (row) => bill(row, [row.observed_cost_before, row.observed_cost_after]), { raw: (row) => cash(row.observed_cost_before - row.observed_cost_after, row.price) ?? "", kind: "number" }),
    ] : []),
  ], rows)];
}

const known = (title, cost, phone) => column(title, (row) => (row.billed ? number(cost(row)) : "not known"), { raw: (row) => (row.billed ? cost(row) : ""), kind: "number", phone });

function holdout(groups) {
  if (!groups.length) return [];
  const groupName = { kept: "left as they came", planned: "as the policy says" };
  return [element("h2", {}, "Held-out conversations"), table("What both groups really cost, in plain input tokens. Only requests whose usage upstream reported are counted. Few conversations prove little.", [
    tenant, model,
    column("Group", (row) => groupName[row.holdout] ?? plain(row.holdout), { phone: 2 }),
    figure("Conversations", (row) => row.sessions),
    figure("Requests counted", (row) => row.billed),
    known("Cost", (row) => row.cost),
    known("Cost per request", (row) => row.cost / row.billed),
    known("Cost per conversation", (row) => row.cost / row.sessions, 2),
  ], groups)];
}
