import { ask, cash, choice, column, element, figure, fleet, money, name, number, percent, plain, signed, table } from "./common.js";

const model = column("Model", (row) => name(row.model), { raw: (row) => row.model, phone: 1 });
const tenant = column("Tenant", (row) => row.tenant, { phone: 1 });

export async function savings(page, [period = "month"], me) {
  const found = await ask(`savings?period=${encodeURIComponent(period)}`);
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Savings"), choice("savings", period)),
    element("p", {}, `The sums ${fleet(me)}. `, "Costs are of the input, in plain input tokens at the policy's prices. What was expected is the cost of the same requests as they came, with everything cached that the request before had. What it came to is what upstream billed, with the proxy's own summaries and the rounds in which the model read something back. ",
      element("strong", {}, "Whether tasks succeed as often is not measured here.")),
    perModel(found.models), ...misses(found.misses), ...observed(found.models), ...holdout(found.groups));
}

const perModel = (models) => table("Per tenant and model. Losses have a minus sign; each percentage is of the expected cost in its row.", [
  tenant, model,
  column("Saved", (row) => signed(row.saved, row.expected ? `${number(row.saved)} (${percent(row.saved, row.expected)})` : number(row.saved)), { raw: (row) => row.saved, kind: "number", phone: 1 }),
  column("Saved money", (row) => (row.price === null ? "no price" : money(cash(row.saved, row.price))), { raw: (row) => cash(row.saved, row.price) ?? "", kind: "number", phone: 1 }),
  figure("Requests", (row) => row.requests),
  figure("Rewritten", (row) => row.rewritten),
  figure("Upstream said what it billed", (row) => row.billed),
  figure("Tokens as they came", (row) => row.tokens_before, { phone: 2 }),
  figure("Tokens sent", (row) => row.tokens_after, { phone: 2 }),
  figure("Expected cost", (row) => row.expected),
  figure("Actual cost", (row) => row.actual),
  figure("Summaries", (row) => row.summaries),
  figure("Requests that cost more", (row) => row.losses),
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
    figure("Cost as they came", (row) => row.observed_cost_before),
    figure("Cost as planned", (row) => row.observed_cost_after),
    column("The plan would save", (row) => signed(row.observed_cost_before - row.observed_cost_after), { raw: (row) => row.observed_cost_before - row.observed_cost_after, kind: "number", phone: 1 }),
  ], rows)];
}

const known = (title, cost, phone) => column(title, (row) => (row.billed ? number(cost(row)) : "not known"), { raw: (row) => (row.billed ? cost(row) : ""), kind: "number", phone });

function holdout(groups) {
  if (!groups.length) return [];
  const groupName = { kept: "left as they came", planned: "as the policy says" };
  return [element("h2", {}, "Held-out conversations"), table("What both groups really cost. Only requests whose usage upstream reported are counted. Few conversations prove little.", [
    tenant, model,
    column("Group", (row) => groupName[row.holdout] ?? plain(row.holdout), { phone: 2 }),
    figure("Conversations", (row) => row.sessions),
    figure("Requests counted", (row) => row.billed),
    known("Cost", (row) => row.cost),
    known("Cost per request", (row) => row.cost / row.billed),
    known("Cost per conversation", (row) => row.cost / row.sessions, 2),
  ], groups)];
}
