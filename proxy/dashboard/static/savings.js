import { ask, color, element, money, name, number, plain, share, signed, table, tile } from "./common.js";
import { lines } from "./charts.js";

const PERIODS = [[1, "since yesterday"], [7, "the last 7 days"], [30, "the last 30 days"]];

const total = (rows, field) => rows.reduce((sum, row) => sum + row[field], 0);

export async function savings(page, [days = "30"]) {
  const found = await ask(`savings?days=${encodeURIComponent(days)}`);
  const models = found.models;
  const select = element("select", { id: "period", onchange: () => { location.hash = `#savings/${select.value}`; } },
    ...PERIODS.map(([value, name]) => element("option", { value, selected: String(value) === days }, name)));
  const chart = element("div", { class: "chart" });
  page.replaceChildren(
    element("h1", {}, "Savings"),
    element("div", { class: "bar" }, element("label", { for: "period" }, "Period"), select),
    element("p", {}, "Costs are of the input, in plain input tokens at the policy's prices. What was expected is the cost of the same requests as they came, with everything cached that the request before had. What it came to is what upstream billed, with the proxy's own summaries and the rounds in which the model read something back. ",
      element("strong", {}, "Whether tasks succeed as often is not measured here.")),
    tiles(found),
    element("h2", {}, "Per tenant and model"),
    perModel(models),
    element("h2", {}, "Cost over time"),
    chart,
    ...observed(models),
    ...holdout(found.groups),
  );
  if (found.hours.length) {
    lines(chart, "Cost of each hour, in plain input tokens", found.hours.map((hour) => hour.time), [
      ["as the requests came", found.hours.map((hour) => hour.cost_before), color("before")],
      ["as they were sent, summaries included", found.hours.map((hour) => hour.cost_after), color("user")],
    ]);
  } else {
    chart.replaceChildren(element("p", {}, "Nothing was recorded in this period."));
  }
}

function tiles({ models, sessions }) {
  const expected = total(models, "expected");
  const saved = total(models, "saved");
  const before = total(models, "tokens_before");
  const fewer = before - total(models, "tokens_after");
  const priced = models.filter((row) => row.price !== null);
  const cash = priced.reduce((sum, row) => sum + (row.saved * row.price) / 1e6, 0);
  return element("dl", { class: "tiles" },
    tile("Saved cost", signed(saved), share(saved, expected, "expected for the rewritten requests"),
      `${number(total(models, "billed"))} of ${number(total(models, "rewritten"))} rewritten requests are counted: of these upstream said what it billed for all rounds`),
    priced.length ? tile("Saved money", signed(cash, cash.toFixed(4)), `of models with input_price in the policy, ${priced.length} of ${models.length}`) : null,
    tile("Fewer tokens of history sent", signed(fewer), share(fewer, before, "tokens that clients sent")),
    tile("Spent on summaries", number(total(models, "summaries")), `summaries: ${number(total(models, "summary_calls"))}; subtracted above`),
    tile("Tokens read back", number(total(models, "retrieved_tokens")), "in hidden rounds, whose cost is subtracted above"),
    tile("Requests that cost more", number(total(models, "losses")), share(total(models, "losses"), total(models, "billed"), "counted requests"),
      `and ${share(sessions.losses, sessions.sessions, "sessions with costs")}`),
  );
}

function perModel(models) {
  return table("Losses have a minus sign. Each percentage is of the expected cost in its row.", [
    ["Tenant", (row) => row.tenant],
    ["Model", (row) => (row.model ? name(row.model) : "not known")],
    ["Requests", (row) => number(row.requests), true],
    ["Rewritten", (row) => number(row.rewritten), true],
    ["Tokens as they came", (row) => number(row.tokens_before), true],
    ["Tokens sent", (row) => number(row.tokens_after), true],
    ["Expected cost", (row) => number(row.expected), true],
    ["Actual cost", (row) => number(row.actual), true],
    ["Summaries", (row) => number(row.summaries), true],
    ["Saved", (row) => signed(row.saved, row.expected ? `${number(row.saved)} = ${((100 * row.saved) / row.expected).toFixed(1)} %` : number(row.saved)), true],
    ["Saved money", (row) => money(row.saved, row.price), true],
  ], models);
}

function observed(models) {
  const rows = models.filter((row) => row.observed);
  if (!rows.length) return [];
  return [element("h2", {}, "Only observed"), table("What the plan would have sent and cost. These requests went as they came.", [
    ["Tenant", (row) => row.tenant],
    ["Model", (row) => (row.model ? name(row.model) : "not known")],
    ["Requests", (row) => number(row.observed), true],
    ["Tokens as they came", (row) => number(row.observed_before), true],
    ["Tokens as planned", (row) => number(row.observed_after), true],
    ["Cost as they came", (row) => number(row.observed_cost_before), true],
    ["Cost as planned", (row) => number(row.observed_cost_after), true],
    ["The plan would save", (row) => signed(row.observed_cost_before - row.observed_cost_after), true],
  ], rows)];
}

const known = (row, cost) => (row.billed ? number(cost) : "not known");

function holdout(groups) {
  if (!groups.length) return [];
  const groupName = { kept: "left as they came", planned: "as the policy says" };
  return [element("h2", {}, "Held-out conversations"), table("What both groups really cost. Only requests whose usage upstream reported are counted. Few conversations prove little.", [
    ["Tenant", (row) => row.tenant],
    ["Model", (row) => (row.model ? name(row.model) : "not known")],
    ["Group", (row) => groupName[row.holdout] ?? plain(row.holdout)],
    ["Conversations", (row) => number(row.sessions), true],
    ["Requests counted", (row) => number(row.billed), true],
    ["Cost", (row) => known(row, row.cost), true],
    ["Cost per request", (row) => known(row, row.cost / row.billed), true],
    ["Cost per conversation", (row) => known(row, row.cost / row.sessions), true],
  ], groups)];
}
