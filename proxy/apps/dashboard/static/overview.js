import { PERIODS, ask, cash, choice, column, counted, element, figure, fleet, inMoney, judged, money, moment, name, number, ofWhole, pair, percent, saving, share, short, table, tile } from "./common.js";
import { bars, legend } from "./charts.js";

const TITLES = Object.fromEntries(PERIODS);
const WEEK_STEP = 6 * 3600; // seconds of a bar in a week
const hasPrice = (row) => row.price !== null;
const hasNone = (row) => row.price === null;
const total = (rows, field) => rows.reduce((sum, row) => sum + row[field], 0);

export async function overview(page, [asked = ""], me) {
  const found = await ask(`savings?period=${encodeURIComponent(asked)}`);
  const { period } = found;
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
    element("div", { class: "columns" }, most("Saved most", "The five sessions that saved most", found.best),
      found.sessions.some(hasPrice) ? most("Cost more", "The five sessions that became dearest", found.worst) : null),
    element("p", { class: "faint" }, `From ${moment(found.since)} to ${moment(found.now)} UTC, ${fleet(me)}${me.replicas.length ? "; the sessions listed here are this replica's" : ""}. Tokens are those of whole prompts: instructions, tools and history. ` +
      "Money is for the input, as upstream billed it, with reads from its cache, our summaries and what was read back. Whether tasks succeed as often is not measured here."));
  const since = period === "week" ? Math.floor(found.since / step) * step : found.since;
  bars(chart, period, since, found.now, step, found.course, `${short(total(found.course, "tokens_before"))} tokens came and ${short(total(found.course, "tokens_after"))} were sent from ${moment(found.since)} UTC on.`);
}

const nothing = (me) => element("section", { class: "card empty" }, element("h2", {}, me.off ? "The dashboard is off" : "No requests in this period"),
  element("p", {}, me.off ? me.fault : "Point a client at this proxy, and its requests appear here about a second later."));

function tiles({ models, sessions, misses, verified, before: earlier }, period) {
  const observed = !total(models, "tokens_before") && total(models, "observed");
  const [before, after] = observed ? ["observed_before", "observed_after"] : ["tokens_before", "tokens_after"];
  const tokens = [total(models, before), total(models, after)];
  const moneyOfAll = bill(models, observed);
  const priced = sessions.filter(hasPrice);
  return element("dl", { class: "tiles" },
    tile(observed ? "The plan would save" : "Saved", judged(...(moneyOfAll ?? tokens), share(...(moneyOfAll ?? tokens))),
      ...(moneyOfAll ? [paid(...moneyOfAll, models)] : []), fewer(...tokens, Boolean(moneyOfAll)),
      ...(earlier.tokens_before && !observed ? [`${share(earlier.tokens_before, earlier.tokens_after)} of the tokens in the ${TITLES[period] ?? TITLES.month} before`] : [])),
    ...(priced.length ? [dearer(priced)] : sessions.length ? [readAgain(models, misses), largest(sessions)] : []),
    tile("Moved results read back", number(total(sessions, "reads")), `${counted(total(sessions, "reads"), "read")} for ${counted(total(sessions, "moved"), "moved result")}`, `${short(total(models, "retrieved_tokens"))} tokens`),
    ...proof(verified));
}

// The money for the input of rewritten requests, as they came and as they were sent, where the price is known.
function bill(models, observed) {
  const rows = models.filter(hasPrice).map((row) => (observed ? [row.observed_cost_before, row.observed_cost_after] : [row.expected, row.expected - row.saved]).map((cost) => cash(cost, row.price)));
  const sums = [0, 1].map((place) => rows.reduce((sum, row) => sum + row[place], 0));
  return sums[0] ? sums : null;
}

function paid(before, after, models) {
  const whose = models.some((row) => hasNone(row) && row.rewritten) ? " of models that have a price" : "";
  return `${ofWhole(before, after, money)} for the input${whose}`;
}

function fewer(before, after, beside) {
  return `${beside ? `${share(before, after)} of the tokens: ` : ""}${ofWhole(before, after)} tokens that clients sent`;
}

function dearer(sessions) {
  const [known, losses] = [total(sessions, "sessions"), total(sessions, "losses")];
  return tile("Sessions that cost more", number(losses), `of ${counted(known, "session")} whose cost is known (${percent(losses, known)})`);
}

// What stands for costs where there is no bill.
function readAgain(models, misses) {
  const lost = total(misses.filter((row) => row.miss === "event"), "missed_tokens");
  return tile("Prompt read again", counted(total(models, "events"), "time"), `in ${counted(total(models, "requests"), "request")}: when results move, the server reads on from there`,
    ...(lost ? [`${short(lost)} tokens, as the server counted them`] : []));
}

function largest(sessions) {
  const [before, after] = ["largest_before", "largest_after"].map((field) => Math.max(...sessions.map((row) => row[field])));
  return tile("Largest prompt", `${short(after)} tokens`, `${short(before)} tokens without the proxy`);
}

// What requests that were asked again show, with intervals; how many more are needed where that is nothing yet.
function proof({ asked, failed, spent, figures: shown, missing }) {
  if (!asked && !failed) return [];
  const vain = failed ? [`${counted(failed, "more request")} had no reply to compare`] : [];
  const cost = spent ? [`asking again cost at most ${money(spent)}`] : [];
  if (missing) return [tile("Same next action", "not known yet", missing, ...vain, ...cost)];
  const last = shown.length - 1;
  return shown.map(({ title, value, lines }, place) => tile(title, value, ...lines, ...(place === last ? cost : [])));
}

const most = (heading, caption, rows) => element("section", { class: "card" }, element("h2", {}, heading), extremes(caption, rows));

function extremes(caption, rows) {
  const widest = Math.max(...rows.map((row) => row.tokens_before), 1);
  return table(caption, [
    column("Session", (row) => element("span", {}, element("a", { href: `#session/${row.session}` }, name(row.model)), element("span", { class: "faint under when" }, ` ${moment(row.began).slice(5, 16)}`)), { raw: (row) => row.session, phone: 1 }),
    column("Tokens", (row) => pair(row.tokens_before, row.tokens_after, widest), { raw: (row) => row.tokens_before, phone: 2 }),
    column("Saved", spared, { raw: (row) => row.saved, kind: "number", phone: 1 }),
  ], rows, "none");
}

function spared(row) {
  const [before, after] = hasPrice(row) ? [row.cost_before, row.cost_after] : [row.tokens_before, row.tokens_after];
  return judged(before, after, saving(before, after, hasPrice(row) ? inMoney(row.price) : short));
}

const figures = ({ course }) => element("details", {}, element("summary", {}, "The figures as a table"), table("Tokens over time", [
  column("From (UTC)", (row) => moment(row.time), { kind: "time", phone: 1 }),
  figure("Requests", (row) => row.requests, { phone: 1 }),
  figure("Tokens as they came", (row) => row.tokens_before, { phone: 2 }),
  figure("Tokens sent", (row) => row.tokens_after, { phone: 2 }),
], course));
