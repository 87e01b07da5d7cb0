import { ask, cached, clock, element, happened, moment, number, plain, signed, table } from "./common.js";
import { stacked } from "./charts.js";

export async function sessions(page) {
  const rows = await ask("sessions");
  page.replaceChildren(element("h1", {}, "Sessions"),
    element("p", {}, "A session is all requests with the same API, model, and messages up to the user's first."),
    table("The sessions with the newest requests", [
      ["Last request (UTC)", (row) => element("a", { href: `#session/${row.session}` }, moment(row.last))],
      ["Tenant", (row) => row.tenant],
      ["Model", (row) => row.model],
      ["API", (row) => row.dialect],
      ["Requests", (row) => number(row.requests), true],
      ["Events", (row) => number(row.events), true],
      ["Tokens of the last request", (row) => number(row.tokens_before), true],
      ["of which were sent", (row) => number(row.tokens_after), true],
      ["Cost as it came", (row) => number(row.cost_before), true],
      ["Difference", (row) => (row.cost_before ? signed(row.cost_before - row.cost_after) : "not known"), true],
    ], rows));
}

export async function session(page, [name], me) {
  const rows = (await ask(`sessions/${encodeURIComponent(name)}`)).filter((row) => row.kinds);
  const chart = element("div", { class: "chart" });
  page.replaceChildren(element("h1", {}, "Session"), element("p", { class: "faint" }, plain(name)), chart);
  if (!rows.length) {
    chart.replaceChildren(element("p", {}, "Nothing is kept of this session."));
    return;
  }
  const [{ tenant, model, dialect }] = rows;
  const marks = rows.flatMap((row, index) => (row.new_event && row.kind !== "observed" ? [index] : []));
  page.querySelector("p").textContent = `${plain(tenant)}, ${plain(model)}, ${plain(dialect)}; ${number(rows.length)} requests`;
  stacked(chart, "Tokens sent with each request, by kind. The line above them is the request as it came; dotted lines are events.",
    me.kinds.map((kind, place) => [kind, rows.map((row) => row.kinds[place])]),
    [["as it came", rows.map((row) => row.came), "before"],
      ["read from upstream's cache, all rounds", rows.map((row) => (row.prompt_tokens ? row.cached_tokens : null)), "cached"]],
    marks);
  const events = rows.filter((row) => row.words);
  page.append(element("h2", {}, "The plan in words"),
    events.length
      ? element("ol", {}, ...events.map((row) => element("li", {}, `${clock(row.time)}, at ${number(row.messages)} messages: ${plain(row.words, 1000)}`)))
      : element("p", {}, "The plan has left this session as it came so far."),
    element("h2", {}, "Requests"),
    table("All figures of the chart. The link shows each message as it came and as it was sent.", [
      ["Time (UTC)", (row) => (row.detailed ? element("a", { href: `#request/${row.id}` }, clock(row.time)) : clock(row.time))],
      ["Messages", (row) => number(row.messages), true],
      ["As it came", (row) => number(row.came), true],
      ["Sent", (row) => number(row.kinds.reduce((sum, tokens) => sum + tokens, 0)), true],
      ...me.kinds.map((kind, place) => [kind, (row) => number(row.kinds[place]), true]),
      ["Cached share of the prompt", cached, true],
      ["What happened", happened],
    ], rows));
}

const RULES = {
  "": "as it came",
  first_sight: "moved before the model saw it: larger than max_unseen_tool_tokens",
  event: "moved at event",
  summarised: "part of the summary",
};

export async function request(page, [id]) {
  const row = await ask(`requests/${encodeURIComponent(id)}`);
  const { messages, omitted, texts, snapshot } = row.detail;
  const rule = (one) => `${RULES[one.rule] ?? plain(one.rule)}${one.event ? ` ${one.event}` : ""}`;
  const withText = Object.keys(texts).length > 0;
  const text = (place) => (one) => element("pre", { tabindex: "0" }, plain(texts[one.index]?.[place] ?? "", 100000));
  page.replaceChildren(element("h1", {}, "Request"),
    element("p", {}, element("a", { href: `#session/${plain(row.session)}` }, "Its session")),
    element("p", {}, `${moment(row.time)}, ${plain(row.tenant)}, ${plain(row.model)}: ${plain(happened(row))}`),
    ...(row.kind === "observed" ? [element("p", {}, "It went as it came. The table shows the plan.")] : []),
    ...(omitted ? [element("p", {}, `The first ${number(omitted)} messages are not listed.`)] : []),
    element("p", { class: "faint" }, withText ? "The operator and the tenant's policy allow the texts to be shown." : "Texts are not kept: only sizes and digests."),
    table("Messages as they came, and what was sent of them", [
      ["Message", (one) => number(one.index), true],
      ["Kind", (one) => one.kind],
      ["Digest", (one) => one.digest],
      ["Tokens as it came", (one) => number(one.tokens), true],
      ["Tokens sent", (one) => number(one.sent), true],
      ["Rule", rule],
      ...(withText ? [["As it came", text(0)], ["As it was sent, if that differs", text(1)]] : []),
    ], messages),
    ...(snapshot ? [element("h2", {}, "The summary"), element("pre", { tabindex: "0" }, plain(snapshot, 100000))] : []));
}
