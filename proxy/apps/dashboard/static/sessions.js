import { ask, cached, cachedInARound, cash, clock, column, counted, element, figure, happened, here, isWaiting, lasting, moment, name, inMoney, judged, number, ofWhole, pair, plain, saving, sent, share, short, table, tile } from "./common.js";
import { stacked } from "./charts.js";

export async function sessions(page, _, me) {
  const rows = await ask("sessions");
  const most = Math.max(1, ...rows.map((row) => row.newest_before));
  const priced = rows.some((row) => row.price !== null);
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Sessions")),
    element("p", {}, `A session is all requests with the same API, model, and messages up to the user's first. These are the newest ${counted(rows.length, "session")}`, here(me)),
    table("The sessions with the newest requests", [
      column("Last request (UTC)", (row) => element("a", { href: `#session/${row.session}` }, moment(row.last)), { raw: (row) => moment(row.last), kind: "time", phone: 1 }),
      column("Model", (row) => element("span", {}, name(row.model), me.operator ? element("span", { class: "faint" }, ` ${row.tenant}`) : ""), { raw: (row) => row.model, phone: 2 }),
      figure("Requests", (row) => row.requests),
      figure("Events", (row) => row.events),
      column("Newest request: came, sent", (row) => pair(row.newest_before, row.kind === "observed" ? row.newest_before : row.newest_after, most), { raw: (row) => row.newest_before, kind: "bars-cell", phone: 2 }),
      column("Tokens saved", (row) => `${row.kind === "observed" ? "the plan: " : ""}${share(row.tokens_before, row.tokens_after)}`, { raw: (row) => row.tokens_before - row.tokens_after, kind: "number", phone: priced ? 0 : 1 }),
      ...(priced ? [column("Money saved, before summaries", spared, { raw: (row) => (row.price === null ? "" : cash(row.cost_before - row.cost_after, row.price)), kind: "number", phone: 1 })] : []),
    ], rows, "none yet"));
}

function spared(row) {
  if (row.price === null) return "no price";
  if (!row.cost_before) return "not known";
  const text = saving(row.cost_before, row.cost_after, inMoney(row.price));
  return row.kind === "observed" ? `the plan: ${text}` : judged(row.cost_before, row.cost_after, text);
}

// The sentences of the plan, and where a summary that was waited for begins to be sent.
function sentences(rows) {
  return rows.flatMap((row, index) => {
    const waited = index && row.compressed > rows[index - 1].compressed && !row.new_event && row.kind !== "observed";
    const ready = waited ? `From here on the summary is sent, which stands for ${number(row.compressed)} old messages. ` : "";
    const told = row.words && (!isWaiting(row) || index === rows.length - 1);
    return ready || told ? [[row, `${ready}${told ? plain(row.words, 5000) : ""}`]] : [];
  });
}

// One of the tiles is judged: the money, or where there is none, the tokens.
function totals(row, observed) {
  const tokens = [row.tokens_before, row.tokens_after];
  const cost = [row.cost_before, row.cost_after];
  const billed = row.price !== null && row.cost_before;
  const [title, inFull] = [observed ? "The plan would save" : "Saved", inMoney(row.price)];
  return element("dl", { class: "tiles" },
    ...(billed ? [tile(`${title}: money`, judged(...cost, share(...cost)), `${ofWhole(...cost, inFull)} for the input, before summaries`)] : []),
    tile(`${title}: tokens`, billed ? share(...tokens) : judged(...tokens, share(...tokens)), `${ofWhole(...tokens)} in ${counted(row.requests, "request")}`),
    ...(row.price === null && !observed ? [tile("Prompt read again", counted(row.events, "time"), "when results moved, the server read on from there")] : []),
    ...(row.price !== null && !billed ? [tile("Money for the input", "not known", "upstream has not said what it counted for a changed request")] : []),
    tile("Largest prompt", `${short(observed ? row.largest_before : row.largest_after)} tokens`, `${short(observed ? row.largest_after : row.largest_before)} tokens ${observed ? "as planned" : "without the proxy"}`),
    tile("Moved results", number(row.moved), `${counted(row.reads, "read")} of them by the model`));
}

export async function session(page, [id], me) {
  const [[whole], found] = await Promise.all([ask(`sessions?session=${encodeURIComponent(id)}`), ask(`sessions/${encodeURIComponent(id)}`)]);
  const rows = found.filter((row) => row.kinds);
  if (!rows.length || !whole) {
    page.replaceChildren(element("h1", {}, "Session"), element("p", {}, "Nothing is kept of this session."));
    return;
  }
  const chart = element("div", { class: "chart" });
  const marks = rows.flatMap((row, index) => (row.new_event && row.kind !== "observed" ? [index] : []));
  const observed = rows.every((row) => row.kind === "observed");
  const words = sentences(rows);
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Session"), element("a", { href: `#live/session=${encodeURIComponent(id)}` }, "Its requests, live")),
    element("p", { class: "faint" }, plain(whole.tenant), ", ", element("bdi", {}, plain(whole.model)), `, ${plain(whole.dialect)}; ${counted(rows.length, "request")} from ${moment(whole.began)} to ${moment(whole.last)} UTC; ${plain(id)}`),
    totals(whole, observed),
    element("section", { class: "card" }, chart, figures(rows, me.kinds)),
    element("section", { class: "card" }, element("h2", {}, "The plan in words"),
      ...(observed ? [element("p", {}, "These requests were only observed and went as they came. This is what the plan would have done.")] : []),
      words.length ? element("ol", { class: "events" }, words.map(([row, said]) => element("li", {}, element("a", { href: `#request/${row.id}` }, clock(row.time)), `, at ${number(row.messages)} messages: ${said}`)))
        : element("p", {}, "The plan has left this session as it came so far.")),
    element("h2", {}, "Requests"),
    table("The link shows each message as it came and as it was sent.", [
      column("Time (UTC)", (row) => element("a", { href: `#request/${row.id}` }, clock(row.time)), { raw: (row) => moment(row.time), kind: "time", phone: 1 }),
      column("What happened", happened, { kind: "wide", phone: 2 }),
      figure("Messages", (row) => row.messages),
      figure("As it came", (row) => row.tokens_before, { phone: 1 }),
      figure("Sent", sent, { phone: 1 }),
      ...me.kinds.map((kind, place) => figure(kind, (row) => row.kinds[place], { kind: "saved-only" })),
      column("Cached share of the prompt", cached, { kind: "number" }),
      column("Latency", (row) => lasting(row.seconds), { raw: (row) => row.seconds, kind: "number" }),
    ], rows));
  stacked(chart, "Tokens sent with each request, by kind. The line above is the request as it came; dotted lines are events.",
    me.kinds.map((kind, place) => [kind, rows.map((row) => row.kinds[place])]),
    [["as it came", rows.map((row) => row.tokens_before), "came"],
      [CACHED, rows.map(cachedInARound), "cached"]],
    marks);
}

const CACHED = "read from upstream's cache, in a round";

// The chart as a table, with the kinds that there are.
function figures(rows, kinds) {
  const used = kinds.map((kind, place) => [kind, place]).filter(([, place]) => rows.some((row) => row.kinds[place]));
  return element("details", {}, element("summary", {}, "The figures as a table"), table("Tokens of each kind that were sent", [
    column("Time (UTC)", (row) => clock(row.time), { raw: (row) => moment(row.time), kind: "time", phone: 1 }),
    figure("As it came", (row) => row.tokens_before, { phone: 1 }),
    figure("Sent", sent, { phone: 1 }),
    ...used.map(([kind, place]) => figure(kind, (row) => row.kinds[place], { phone: 2 })),
    column(CACHED, (row) => (row.prompt_tokens ? number(cachedInARound(row)) : "not known"), { raw: (row) => cachedInARound(row) ?? "", kind: "number", phone: 2 }),
  ], rows));
}

const RULES = {
  "": "as it came",
  first_sight: "only a preview: the model had not seen it, and it is larger than a result may be at first",
  event: "a reference, since event",
  summarised: "not sent: the summary stands for it",
  marked: "as it came, with a cache breakpoint",
  restored: "as the model wrote it",
};

// What became of a message. A result that stays says why, in the plan's own words if these say only that.
const rule = (row) => (one) => {
  const stays = { small: "as it came: a reference would not be smaller", waiting: `as it came, ${isWaiting(row) ? plain(row.words) : "waiting for an event that pays"}` };
  const said = stays[one.stays] ?? `${RULES[one.rule] ?? plain(one.rule)}${one.event ? ` ${one.event}` : ""}`;
  return one.hidden ? `${said}; hidden rounds of ${number(one.hidden)} tokens are put back with it` : said;
};

// Why there is no list of messages.
function unlisted(row) {
  if (row.kind === "untouched" && row.reason) return "The request was sent without a plan, and messages are only listed with one.";
  if (!row.session) return "Only requests that ask a model for a reply have messages.";
  return "Its messages are no longer listed: only those of the newest requests are.";
}

const results = (row, messages) => {
  const moved = messages.filter((one) => one.event || one.rule === "first_sight");
  return element("section", { class: "card" }, element("h2", {}, "Moved results"), moved.length ? table("Results that were sent as a preview or a reference", [
    figure("Message", (one) => one.index, { phone: 1 }),
    column("What it is", (one) => one.about || one.origin, { phone: 1 }),
    column("File", (one) => one.files.join(", "), { phone: 2 }),
    column("Tokens: came, sent", (one) => `${number(one.tokens)} → ${number(one.sent)}`, { raw: (one) => one.tokens, kind: "number", phone: 1 }),
    column("Why", rule(row), { kind: "wide", phone: 2 }),
  ], moved) : element("p", {}, "No result was moved out of this request."));
};

function messages(row) {
  const { messages, omitted, texts, snapshot } = row.detail;
  const withText = Object.keys(texts).length > 0;
  const text = (place) => (one) => (texts[one.index]?.[place] ? element("pre", { tabindex: "0" }, plain(texts[one.index][place], 100000)) : "");
  return [
    results(row, messages),
    element("h2", {}, "Messages"),
    ...(row.kind === "observed" ? [element("p", {}, "It went as it came. The table shows the plan, which nobody has written out, so what would have been moved has no digest as it was sent.")] : []),
    ...(omitted ? [element("p", {}, `${number(omitted)} older messages are not listed.`)] : []),
    element("p", { class: "faint" }, withText ? "The operator and the tenant's policy allow the texts to be shown." : "Texts are not kept: only sizes and digests."),
    table("Messages as they came, and as they were sent. A digest is the beginning of the SHA-256 of a message's bytes.", [
      figure("Message", (one) => one.index, { phone: 1 }),
      column("Kind", (one) => (one.origin ? `${one.kind}: ${one.about || one.origin}` : one.kind), { phone: 1 }),
      figure("Tokens as it came", (one) => one.tokens, { phone: 1 }),
      figure("Tokens sent", (one) => one.sent, { phone: 1 }),
      column("Rule", rule(row), { kind: "wide", phone: 2 }),
      column("Digest as it came", (one) => one.digest, { kind: withText && "saved-only" }),
      column("Digest as it was sent", (one) => one.sent_digest || (["", "marked", "restored"].includes(one.rule) ? "the same" : ""), { kind: withText && "saved-only" }),
      ...(withText ? [column("As it came", text(0), { kind: "text", phone: 2 }), column("As it was sent, if that differs", text(1), { kind: "text", phone: 2 })] : []),
    ], messages),
    ...(snapshot ? [element("h2", {}, "The summary"), element("pre", { tabindex: "0" }, plain(snapshot, 100000))] : []),
  ];
}

const readBack = (uses) => (uses ?? []).map((use) => `${use.tool}${use.calls > 1 ? ` × ${use.calls}` : ""}: ${use.result}, ${counted(use.tokens, "token")}`).join("; ");

export async function request(page, [id], me) {
  const row = await ask(`requests/${encodeURIComponent(id)}`);
  const kinds = (row.kinds ?? []).flatMap((tokens, place) => (tokens ? [`${me.kinds[place]} ${number(tokens)}`] : []));
  const facts = [
    ["What happened", happened(row)], ["The plan", row.words], ["Read back by the model", readBack(row.tool_uses)],
    ["Tokens of each kind that were sent", kinds.join(", ")],
    ["Prompt tokens, as upstream counted them in all rounds", row.prompt_tokens ? `${number(row.prompt_tokens)}, of which ${number(row.cached_tokens)} came from its cache` : ""],
    ["Money for the input", row.cost_before && row.price !== null ? `${inMoney(row.price)(row.cost_after)} as it was ${row.kind === "observed" ? "planned" : "sent"}, ${inMoney(row.price)(row.cost_before)} as it came` : ""],
    ["Latency", `${lasting(row.seconds)}; first byte ${lasting(row.first_byte_seconds)}; added by the proxy ${lasting(row.added_seconds)}`],
    ["Tenant", row.tenant], ["Model", row.model], ["API", row.dialect], ["Path", `${row.method} ${row.path}`],
    ["Status", row.status || "none: the client left"], ["Request id", row.request_id],
  ];
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Request"), ...(row.session ? [["Its session", `#session/${plain(row.session)}`], ["Previous", row.previous && `#request/${row.previous}`], ["Next", row.next && `#request/${row.next}`]] : [])
      .filter(([, href]) => href).map(([title, href]) => element("a", { href }, title))),
    element("p", { class: "faint" }, `${moment(row.time)} UTC`),
    ...(row.dialect && row.tokens_before ? [element("dl", { class: "tiles" },
      tile("As it came", number(row.tokens_before), "tokens of the whole prompt"),
      tile(row.kind === "observed" ? "The plan would send" : "Sent", number(row.tokens_after), "tokens, in the first round"),
      tile(row.kind === "observed" ? "The plan would save" : "Saved", share(row.tokens_before, row.tokens_after), `${number(Math.abs(row.tokens_before - row.tokens_after))} tokens${row.tokens_after > row.tokens_before ? " more" : ""}`))] : []),
    element("dl", { class: "facts" }, facts.filter(([, value]) => value !== "" && value !== null).flatMap(([title, value]) =>
      [element("dt", {}, title), element("dd", {}, plain(value, 5000))])),
    ...(row.detail ? messages(row) : [element("h2", {}, "Messages"), element("p", {}, unlisted(row))]));
}
