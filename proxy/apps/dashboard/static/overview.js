import { PERIODS, ask, cash, choice, column, counted, element, figure, fleet, money, moment, name, number, pair, percent, short, signed, table, tile, worth } from "./common.js";
import { bars, legend } from "./charts.js";

const TITLES = Object.fromEntries(PERIODS);
const WEEK_STEP = 6 * 3600; // seconds of a bar in a week
const total = (rows, field) => rows.reduce((sum, row) => sum + row[field], 0);

export async function overview(page, [period = "month"], me) {
  const found = await ask(`savings?period=${encodeURIComponent(period)}`);
  const heading = element("div", { class: "heading" }, element("h1", {}, "Overview"), choice("overview", period));
  if (!found.models.length) {
    page.replaceChildren(heading, nothing(me));
    return;
  }
  const chart = element("div", { class: "chart" });
  const step = period === "week" ? WEEK_STEP : found.span;
  const names = { hour: "minute", day: "hour", week: "6 hours", month: "day" };
  page.replaceChildren(heading, tiles(found, period),
    element("section", { class: "card" },
      element("h2", {}, `Tokens of each ${names[period]}, as clients sent them and as they went upstream`), chart,
      legend([["sent upstream", "fill-sent"], ["saved: came, and was not sent", "fill-came"], ["sent beyond what came", "fill-lost"]]),
      figures(found)),
    element("div", { class: "columns" },
      element("section", { class: "card" }, element("h2", {}, "Saved most"), extremes("The five sessions that saved most", found.best)),
      element("section", { class: "card" }, element("h2", {}, "Lost most"), extremes("The five sessions that lost most", found.worst))),
    element("p", { class: "faint" }, `From ${moment(found.since)} to ${moment(found.now)} UTC, ${fleet(me)}${me.replicas.length ? "; the sessions listed here are this replica's" : ""}. Tokens are those of whole prompts: instructions, tools and history. ` +
      "Costs are of the input, as upstream billed it, with reads from its cache, our summaries and what was read back. Whether tasks succeed as often is not measured here."));
  const since = period === "week" ? Math.floor(found.since / step) * step : found.since;
  bars(chart, period, since, found.now, step, found.course, `${short(total(found.course, "tokens_before"))} tokens came and ${short(total(found.course, "tokens_after"))} were sent from ${moment(found.since)} UTC on.`);
}

const nothing = (me) => element("section", { class: "card empty" }, element("h2", {}, me.off ? "The dashboard is off" : "No requests in this period"),
  element("p", {}, me.off ? me.fault : "Point a client at this proxy, and its requests appear here about a second later."));

function tiles({ models, sessions, verified, before: earlier }, period) {
  const observed = !total(models, "tokens_before") && total(models, "observed");
  const [before, after] = observed ? ["observed_before", "observed_after"] : ["tokens_before", "tokens_after"];
  const came = total(models, before);
  const saved = came - total(models, after);
  return element("dl", { class: "tiles" },
    tile(observed ? "The plan would save" : "Saved", signed(saved, percent(saved, came)), `${short(saved)} of ${short(came)} tokens that clients sent`, ...costs(models, observed),
      ...(earlier.tokens_before && !observed ? [`${percent(earlier.tokens_before - earlier.tokens_after, earlier.tokens_before)} in the ${TITLES[period] ?? TITLES.month} before`] : [])),
    tile("Sessions that cost more", signed(-sessions.losses, number(sessions.losses)), `of ${counted(sessions.sessions, "session")} whose cost is known (${percent(sessions.losses, sessions.sessions)})`),
    tile("Moved results read back", number(sessions.reads), `${counted(sessions.reads, "read")} for ${counted(sessions.moved, "moved result")}`, `${short(total(models, "retrieved_tokens"))} tokens`),
    ...(verified.asked ? [same(verified)] : []));
}

// What the model does next with its whole history, beside the noise of asking the same thing twice.
const same = ({ asked, whole_tools, whole_exact, again_tools, again_exact }) =>
  tile("Same next action", percent(whole_tools, asked), `with the whole history, of ${counted(asked, "request")} asked again`,
    `${percent(again_tools, asked)} where the same request is asked twice`, `with the same arguments: ${percent(whole_exact, asked)}, twice: ${percent(again_exact, asked)}`);

// What was saved of the cost: in money where the price is known, else in plain input tokens.
function costs(models, observed) {
  const rows = models.map((row) => (observed
    ? { price: row.price, expected: row.observed_cost_before, saved: row.observed_cost_before - row.observed_cost_after } : row)).filter((row) => row.expected);
  const priced = rows.filter((row) => row.price !== null);
  const sum = (field) => priced.reduce((all, row) => all + cash(row[field], row.price), 0);
  const [spared, expected] = [sum("saved"), sum("expected")];
  const others = rows.filter((row) => row.price === null);
  return [
    priced.length ? `${money(spared)} of ${money(expected)} (${percent(spared, expected)}) of the input's cost` : null,
    others.length ? `${short(total(others, "saved"))} of ${short(total(others, "expected"))} plain input tokens of cost (${percent(total(others, "saved"), total(others, "expected"))})${priced.length ? ", of models without a price" : ""}` : null,
  ].filter(Boolean);
}

function extremes(caption, rows) {
  const most = Math.max(...rows.map((row) => row.tokens_before), 1);
  return table(caption, [
    column("Session", (row) => element("span", {}, element("a", { href: `#session/${row.session}` }, name(row.model)), element("span", { class: "faint when" }, ` ${moment(row.began).slice(5, 16)}`)), { raw: (row) => row.session, phone: 1 }),
    column("Tokens", (row) => pair(row.tokens_before, row.tokens_after, most), { raw: (row) => row.tokens_before, phone: 2 }),
    column("Saved", (row) => signed(row.saved, spent(row)), { raw: (row) => row.saved, kind: "number", phone: 1 }),
  ], rows, "none");
}

const spent = (row) => `${worth(row.saved, row.price)} (${percent(row.saved, row.cost_before)})`;

const figures = ({ course }) => element("details", {}, element("summary", {}, "The figures as a table"), table("Tokens over time", [
  column("From (UTC)", (row) => moment(row.time), { kind: "time", phone: 1 }),
  figure("Requests", (row) => row.requests, { phone: 1 }),
  figure("Tokens as they came", (row) => row.tokens_before, { phone: 2 }),
  figure("Tokens sent", (row) => row.tokens_after, { phone: 2 }),
], course));
