// What all pages share. Text from requests only ever becomes text nodes.

const LONGEST = 300; // characters of a value in a table
const LONGEST_NAME = 60; // characters of a model's name in a table

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Control characters and those that change the direction of text become visible.
export function plain(value, most = LONGEST) {
  const text = String(value ?? "");
  const cut = text.length > most ? `${text.slice(0, most)}…` : text;
  // eslint-disable-next-line no-control-regex
  return cut.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export async function ask(path) {
  const reply = await fetch(`api/${path}`, { headers: { accept: "application/json" }, credentials: "same-origin" });
  if (reply.status === 401) {
    location.assign("login");
  }
  const body = await reply.json();
  if (!reply.ok) throw new Error(body?.error?.message ?? `status ${reply.status}`);
  return body;
}

export const number = (value) => Math.round(value).toLocaleString("en-US");

// A percentage never stands without what it is a share of.
export function share(part, whole, of) {
  if (!whole) return `no ${of} yet`;
  const percent = (100 * part) / whole;
  const digits = Math.abs(percent) < 10 && percent !== 0 ? 1 : 0;
  return `${percent.toFixed(digits)} % of ${number(whole)} ${of}`;
}

export const money = (cost, price) =>
  price === null || price === undefined ? "" : ((cost * price) / 1e6).toLocaleString("en-US", { maximumFractionDigits: 4 });

export const moment = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19);

export const clock = (seconds) => moment(seconds).slice(11);

// A name that a client chose, as one line of a table can hold it.
export const name = (text) => element("bdi", {}, plain(text, LONGEST_NAME));

const kindOf = (kind) => (kind === true ? "number" : kind || null);

// columns: [heading, (row) => node or text, true for a number or else a class]
export function table(caption, columns, rows, none = "none") {
  const head = element("tr", {}, ...columns.map(([heading, , kind]) => element("th", { scope: "col", class: kindOf(kind) }, heading)));
  const empty = element("tr", {}, element("td", { colspan: columns.length, class: "faint" }, none));
  const body = element("tbody", {}, ...(rows.length ? rows.map((row) => line(columns, row)) : [empty]));
  return element("div", { class: "scroll" },
    element("table", { class: "rows" }, element("caption", {}, caption), element("thead", {}, head), body));
}

export function line(columns, row) {
  return element("tr", {}, ...columns.map(([heading, cell, kind]) => {
    const value = cell(row);
    return element("td", { class: kindOf(kind), "data-label": heading },
      value instanceof Node ? value : plain(value));
  }));
}

export function signed(value, text = number(value)) {
  if (!Math.round(value * 1e4)) return element("span", {}, text);
  return element("span", { class: value < 0 ? "bad" : "good" }, value < 0 ? `${text} (a loss)` : text);
}

export function tile(name, figure, ...notes) {
  return element("div", {}, element("dt", {}, name),
    element("dd", {}, element("div", { class: "figure" }, figure), ...notes.map((note) => element("div", { class: "faint" }, note))));
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Why a request went upstream as it came, without a plan: the values of `reason` in the log.
const REASONS = {
  off: "left alone: the policy's mode is off",
  header: "left alone: the client asked for that",
  encoding: "left alone: the body cannot be decompressed",
  invalid: "left alone: the body is no request that the API takes",
  too_many_messages: "left alone: too many messages",
  too_many_tools: "left alone: too many tools",
  too_many_members: "left alone: too many members",
  field: "left alone: our tools do not go with the field",
  busy: "not observed: the proxy had too much to do",
  tools_refused: "sent as it came: upstream refuses our tools",
  refused: "sent as it came: upstream refused the request as we changed it",
};

// What happened to a request, in words.
export function happened(row) {
  if (row.fault) return `error: ${row.fault}${row.detail ? `, ${row.detail}` : ""}`;
  if (row.kind === "summary") return "a summary was made";
  if (row.kind === "refused") return "refused by the proxy";
  if (row.status >= 400) return `upstream answered ${row.status}`;
  if (row.kind === "relay") return `passed on: ${row.method} ${row.path}`;
  if (row.kind === "operation") return row.path;
  if (row.reason) return `${REASONS[row.reason] ?? row.reason}${row.obstacle ? ` ${row.obstacle}` : ""}`;
  const done = [];
  if (row.compacted) done.push(`${number(row.compacted)} moved`);
  if (row.compressed) done.push(`${number(row.compressed)} summarised`);
  if (row.reinserted) done.push(`${number(row.reinserted)} hidden rounds put back`);
  const what = done.length ? done.join(", ") : "nothing to do";
  const event = row.new_event ? `event ${row.events}: ` : "";
  if (row.kind === "observed") return `${row.holdout === "kept" ? "held out" : "only observed"}; the plan: ${event}${what}`;
  return `${event}${what}`;
}

export const cached = (row) => (row.prompt_tokens ? `${Math.round((100 * row.cached_tokens) / row.prompt_tokens)} %` : "not known");
