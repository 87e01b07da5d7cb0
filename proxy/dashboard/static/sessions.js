import { ask, cached, clock, element, happened, moment, name, number, plain, signed, table } from "./common.js";
import { stacked } from "./charts.js";

export async function sessions(page) {
  const rows = await ask("sessions");
  page.replaceChildren(element("h1", {}, "Sessions"),
    element("p", {}, "A session is all requests with the same API, model, and messages up to the user's first."),
    table("The sessions with the newest requests", [
      ["Last request (UTC)", (row) => element("a", { href: `#session/${row.session}` }, moment(row.last)), "time"],
      ["Tenant", (row) => row.tenant],
      ["Model", (row) => name(row.model)],
      ["API", (row) => row.dialect],
      ["Requests", (row) => number(row.requests), true],
      ["Events", (row) => number(row.events), true],
      ["Tokens of the last request", (row) => number(row.newest_before), true],
      ["of which were sent", (row) => number(row.kind === "observed" ? row.newest_before : row.newest_after), true],
      ["Cost as it came", (row) => (row.cost_before ? number(row.cost_before) : "not known"), true],
      ["Saved, before summaries", saved, true],
    ], rows, "none yet"));
}

function saved(row) {
  if (!row.cost_before) return "not known";
  const difference = row.cost_before - row.cost_after;
  return row.kind === "observed" ? `observed; the plan: ${number(difference)}` : signed(difference);
}

// The sentences of the plan, and where a summary that was waited for begins to be sent.
function sentences(rows) {
  return rows.flatMap((row, index) => {
    const waited = index && row.compressed > rows[index - 1].compressed && !row.new_event && row.kind !== "observed";
    const ready = waited ? `From here on the summary is sent, which stands for ${number(row.compressed)} old messages. ` : "";
    return ready || row.words ? [`${clock(row.time)}, at ${number(row.messages)} messages: ${ready}${plain(row.words, 2000)}`] : [];
  });
}

export async function session(page, [id], me) {
  const rows = (await ask(`sessions/${encodeURIComponent(id)}`)).filter((row) => row.kinds);
  const chart = element("div", { class: "chart" });
  page.replaceChildren(element("h1", {}, "Session"), element("p", { class: "faint" }, plain(id)), chart);
  if (!rows.length) {
    chart.replaceChildren(element("p", {}, "Nothing is kept of this session."));
    return;
  }
  const [{ tenant, model, dialect }] = rows;
  const marks = rows.flatMap((row, index) => (row.new_event && row.kind !== "observed" ? [index] : []));
  const requests = rows.length === 1 ? "1 request" : `${number(rows.length)} requests`;
  page.querySelector("p").replaceChildren(plain(tenant), ", ", element("bdi", {}, plain(model)), `, ${plain(dialect)}; ${requests}`);
  stacked(chart, "Tokens sent with each request, by kind. The line above them is the request as it came; dotted lines are events.",
    me.kinds.map((kind, place) => [kind, rows.map((row) => row.kinds[place])]),
    [["as it came", rows.map((row) => row.tokens_before), "before"],
      ["read from upstream's cache, all rounds", rows.map((row) => (row.prompt_tokens ? row.cached_tokens : null)), "cached"]],
    marks);
  const words = sentences(rows);
  const observed = rows.every((row) => row.kind === "observed");
  page.append(element("h2", {}, "The plan in words"),
    ...(observed ? [element("p", {}, "These requests were only observed and went as they came. This is what the plan would have done.")] : []),
    words.length ? element("ol", {}, ...words.map((one) => element("li", {}, one)))
      : element("p", {}, "The plan has left this session as it came so far."),
    element("h2", {}, "Requests"),
    table("All figures of the chart. The link shows each message as it came and as it was sent.", [
      ["Time (UTC)", (row) => element("a", { href: `#request/${row.id}` }, clock(row.time)), "time"],
      ["Messages", (row) => number(row.messages), true],
      ["As it came", (row) => number(row.tokens_before), true],
      ["Sent", (row) => number(row.kinds.reduce((sum, tokens) => sum + tokens, 0)), true],
      ...me.kinds.map((kind, place) => [kind, (row) => number(row.kinds[place]), true]),
      ["Cached share of the prompt", cached, true],
      ["What happened", happened, "wide"],
    ], rows));
}

const RULES = {
  "": "as it came",
  first_sight: "only a preview: the model had not seen it, and it is larger than max_unseen_tool_tokens",
  event: "a reference, since event",
  summarised: "not sent: the summary stands for it",
  marked: "as it came, with a cache breakpoint",
  restored: "as the model wrote it",
};

function rule(one) {
  const said = `${RULES[one.rule ?? ""] ?? plain(one.rule)}${one.event ? ` ${one.event}` : ""}`;
  return one.hidden ? `${said}; hidden rounds of ${number(one.hidden)} tokens are put back with it` : said;
}

// Why there is no list of messages.
function unlisted(row) {
  if (row.kind === "untouched" && row.reason) return "The request was sent without a plan, and messages are only listed with one.";
  if (!row.session) return "Only requests that ask a model for a reply have messages.";
  return "Its messages are no longer listed: only those of the newest requests are.";
}

function messages(row) {
  const { messages, omitted, texts, snapshot } = row.detail;
  const withText = Object.keys(texts).length > 0;
  const text = (place) => (one) => (texts[one.index]?.[place] ? element("pre", { tabindex: "0" }, plain(texts[one.index][place], 100000)) : "");
  return [
    ...(row.kind === "observed" ? [element("p", {}, "It went as it came. The table shows the plan, which nobody has written out, so what would have been moved has no digest as it was sent.")] : []),
    ...(omitted ? [element("p", {}, `${number(omitted)} older messages are not listed.`)] : []),
    element("p", { class: "faint" }, withText ? "The operator and the tenant's policy allow the texts to be shown." : "Texts are not kept: only sizes and digests."),
    table("Messages as they came, and as they were sent. A digest is the beginning of the SHA-256 of a message's bytes.", [
      ["Message", (one) => number(one.index), true],
      ["Kind", (one) => one.kind],
      ["Tokens as it came", (one) => number(one.tokens), true],
      ["Tokens sent", (one) => number(one.sent), true],
      ["Rule", rule],
      ["Digest as it came", (one) => one.digest],
      ["Digest as it was sent", (one) => one.sent_digest || (one.rule ? "" : "the same")],
      ...(withText ? [["As it came", text(0), "text"], ["As it was sent, if that differs", text(1), "text"]] : []),
    ], messages),
    ...(snapshot ? [element("h2", {}, "The summary"), element("pre", { tabindex: "0" }, plain(snapshot, 100000))] : []),
  ];
}

export async function request(page, [id], me) {
  const row = await ask(`requests/${encodeURIComponent(id)}`);
  const sent = (row.kinds ?? []).flatMap((tokens, place) => (tokens ? [`${me.kinds[place]} ${number(tokens)}`] : []));
  const facts = [
    ["Tenant", row.tenant], ["Model", row.model], ["API", row.dialect], ["Path", `${row.method} ${row.path}`],
    ["Status", row.status || "none: the client left"], ["What happened", happened(row)], ["The plan", row.words],
    ["Tokens of the messages as they came", row.dialect ? number(row.tokens_before) : ""],
    [row.kind === "observed" ? "as the plan would have sent them" : "as they were sent", row.dialect ? number(row.tokens_after) : ""],
    ["Tokens sent of each kind", sent.join(", ")],
    ["Prompt tokens, as upstream counted them in all rounds", row.prompt_tokens ? number(row.prompt_tokens) : ""],
    ["of these, read from its cache", row.prompt_tokens ? number(row.cached_tokens) : ""],
    ["Cost as it came, in plain input tokens", row.cost_before ? number(row.cost_before) : ""],
    [row.kind === "observed" ? "as planned" : "as it was sent", row.cost_before ? number(row.cost_after) : ""],
    ["Request id", row.request_id],
  ];
  page.replaceChildren(element("h1", {}, "Request"),
    element("p", {}, `${moment(row.time)} UTC`, ...(row.session ? [", ", element("a", { href: `#session/${plain(row.session)}` }, "of this session")] : [])),
    element("dl", { class: "facts" }, ...facts.filter(([, value]) => value !== "").flatMap(([name, value]) =>
      [element("dt", {}, name), element("dd", {}, plain(value, 1000))])),
    element("h2", {}, "Messages"),
    ...(row.detail ? messages(row) : [element("p", {}, unlisted(row))]));
}
