// What all pages share. Text from requests only ever becomes text nodes. All times are UTC, as in the log.

const LONGEST = 300; // characters of a value in a table
const LONGEST_NAME = 60; // characters of a model's name in a table
const PAGED = 60; // rows from which a table has pages
const PAGE = 50; // rows on one page
const DEARER = 1.01; // times the cost as it came that count as dearer: see plan/prices.py

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
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

// -- figures --

export const number = (value) => Math.round(value).toLocaleString("en-US");

// 1,234,567 as 1.23 M, where a figure is looked at and not compared digit by digit.
export function short(value) {
  const size = Math.abs(value);
  const [unit, name] = size >= 1e9 ? [1e9, " G"] : size >= 1e6 ? [1e6, " M"] : size >= 1e4 ? [1e3, " k"] : [1, ""];
  const digits = unit === 1 ? 0 : size / unit < 10 ? 2 : size / unit < 100 ? 1 : 0;
  return `${(value / unit).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}${name}`;
}

export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share.toFixed(Math.abs(share) < 10 && share !== 0 ? 1 : 0)} %`;
}

export function money(value) {
  const size = Math.abs(value);
  const digits = size >= 1 || size === 0 ? 2 : Math.min(Math.max(2, 1 - Math.floor(Math.log10(size))), 6);
  return `${value < 0 ? "-" : ""}$${size.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
}

export const cash = (cost, price) => (price === null || price === undefined ? null : (cost * price) / 1e6);

// Shows a cost in money, at this price of a million plain input tokens.
export const inMoney = (price) => (cost) => money(cash(cost, price));

export const moment = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19);

export const clock = (seconds) => moment(seconds).slice(11);

export const lasting = (seconds) =>
  seconds === null || seconds === undefined ? "–" : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;

export const counted = (count, noun, plural = `${noun}s`) => `${number(count)} ${count === 1 ? noun : plural}`;

// A name that a client chose, as one line of a table can hold it.
export const name = (text) => element("bdi", {}, text ? plain(text, LONGEST_NAME) : "not known");

// The part that was saved: "30 %", or where it became more, "30 % more".
export const share = (before, after) =>
  (after > before ? `${percent(after - before, before)} more` : percent(before - after, before));

// What was saved: "1,200 (30 %)", or where it became more, "1,200 more (+30 %)".
export const saving = (before, after, show = short) =>
  (after > before ? `${show(after - before)} more (+${percent(after - before, before)})` : `${show(before - after)} (${percent(before - after, before)})`);

// The same beside what it was: "1,200 of 4,000", or "1,200 more than 4,000".
export const ofWhole = (before, after, show = short) =>
  (after > before ? `${show(after - before)} more than ${show(before)}` : `${show(before - after)} of ${show(before)}`);

// Green where it became less, red where it became more by a per cent.
export const judged = (before, after, text) =>
  element("span", { class: after > before * DEARER ? "bad" : after < before ? "good" : null }, text);

export const tile = (title, figure, ...notes) => element("div", {}, element("dt", {}, title),
  element("dd", {}, element("div", { class: "figure" }, figure), ...notes.map((note) => element("div", { class: "faint" }, note))));

// What came and what was sent, as a pair of bars. `most` is as wide as there is room.
export function pair(came, sent, most) {
  const bar = (kind, value) => {
    const made = element("span", { class: `bar-${kind}` });
    made.style.width = `${most ? Math.max((100 * value) / most, value ? 1 : 0) : 0}%`;
    return made;
  };
  return element("span", { class: "pair" },
    element("span", { class: "bars", "aria-hidden": "true" }, bar("came", came), bar(sent > came ? "lost" : "sent", sent)),
    element("span", { class: "figures" }, `${short(came)} → ${short(sent)}`));
}

// -- tables --

// A column: its heading, what a cell shows (a node or text), and further: `raw` for sorting and saving, `kind` (number,
// time, wide, text, saved-only: in files and not on the page), and `phone`: on which of a row's two lines it stands on a phone.
export const column = (heading, show, options = {}) => ({ heading, show, raw: show, ...options });

export const figure = (heading, raw, options = {}) => column(heading, (row) => number(raw(row)), { raw, kind: "number", ...options });

const text = (value) => (value instanceof Node ? value.textContent : value ?? "");

export function line(columns, row) {
  return element("tr", {}, ...columns.map(({ heading, show, kind, phone }) => {
    const value = show(row);
    return element("td", { class: [kind, phone ? `line${phone}` : "wide-only"].filter(Boolean).join(" "), "data-label": heading },
      value instanceof Node ? value : plain(value));
  }));
}

// Saves rows as CSV. Spreadsheets would run a cell that begins like a formula.
export function save(title, columns, rows) {
  const cell = (value) => {
    const said = plain(text(value), 10000);
    return /[",\n]/.test(said) || (/^[=+\-@\t]/.test(said) && typeof value !== "number")
      ? `"${(/^[=+\-@\t]/.test(said) ? `'${said}` : said).replaceAll('"', '""')}"` : said;
  };
  const lines = [columns.map(({ heading }) => cell(heading)), ...rows.map((row) => columns.map(({ raw }) => cell(raw(row))))];
  const link = element("a", {
    href: URL.createObjectURL(new Blob([lines.map((one) => `${one.join(",")}\r\n`).join("")], { type: "text/csv" })),
    download: `offload-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 40)}.csv`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export const button = (label, onclick, attributes = {}) => element("button", { type: "button", onclick, ...attributes }, label);

export const pages = (at, size, count, turn) => element("span", { class: "pages" },
  button("Previous", () => turn(at - size), { disabled: at === 0 }),
  element("span", {}, `${number(at + 1)} to ${number(Math.min(at + size, count))} of ${number(count)}`),
  button("Next", () => turn(at + size), { disabled: at + size >= count }));

// The columns that are shown; a file has them all.
export const visible = (columns) => columns.filter(({ kind }) => kind !== "saved-only");

export function table(caption, all, rows, none = "none") {
  const columns = visible(all);
  let at = 0;
  let sorted = { place: -1, down: true };
  const body = element("tbody", {});
  const foot = element("div", { class: "bar foot" });
  const heads = columns.map(({ heading, kind }, place) => element("th", { scope: "col", class: kind },
    rows.length > 1 ? button(heading, () => sort(place), { class: "sort" }) : heading));
  const fill = (ordered) => {
    const size = rows.length >= PAGED ? PAGE : rows.length;
    body.replaceChildren(...ordered.slice(at, at + size).map((row) => line(columns, row)));
    foot.replaceChildren(...(rows.length >= PAGED ? [pages(at, size, rows.length, (to) => { at = to; fill(ordered); })] : []),
      ...(rows.length ? [button("CSV", () => save(caption, all, ordered), { "aria-label": `Save as CSV: ${caption}` })] : []));
  };
  const sort = (place) => {
    sorted = { place, down: sorted.place === place ? !sorted.down : columns[place].kind === "number" };
    heads.forEach((head, one) => (one === place ? head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    const way = sorted.down ? -1 : 1;
    const value = (row) => { const raw = columns[place].raw(row); return typeof raw === "number" ? raw : text(raw); };
    at = 0;
    fill([...rows].sort((one, other) => way * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0)));
  };
  fill(rows);
  if (!rows.length) body.append(element("tr", {}, element("td", { colspan: columns.length, class: "faint" }, none)));
  return element("div", { class: "tabled" }, element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", { class: "rows" }, element("caption", {}, caption), element("thead", {}, element("tr", {}, heads)), body)), foot);
}

// -- what all pages say of a request --

export const PERIODS = [["hour", "1 hour"], ["day", "24 hours"], ["week", "7 days"], ["month", "30 days"]];

// Where the rows of a page are, with links to the pages of the other replicas.
export const here = ({ replica, replicas }) => [` on this replica (${plain(replica)}`, replicas.length ? "; others: " : "",
  ...replicas.flatMap(({ name, url }, place) => [place ? ", " : "", element("a", { href: `${url}/_offload/${location.hash}` }, plain(name))]), "). "];

// What sums are of.
export const fleet = ({ replica, replicas }) => (replicas.length
  ? `of ${counted(replicas.length + 1, "replica")} together, others' as of up to two minutes ago` : `of this replica (${plain(replica)})`);

export const choice = (page, chosen) => element("nav", { class: "choice", "aria-label": "Period" },
  PERIODS.map(([period, title]) => element("a", { href: `#${page}/${period}`, "aria-current": period === chosen ? "true" : null }, title)));

// Whether the words say only what the plan waits for, or why there is none.
export const isWaiting = (row) => /^(waiting|sent as it came)/.test(row.words ?? "");

export const isWrong = (row) => Boolean(row.fault) || row.status >= 400;

// What happened to a request, in words.
export function happened(row) {
  if (row.fault) return `error: ${row.fault}${row.detail ? `, ${row.detail}` : ""}`;
  if (row.kind === "summary") return "a summary was made";
  if (row.kind === "verify") return "asked again, to compare what the model does next";
  if (row.kind === "refused") return "refused by the proxy";
  if (row.status >= 400) return `upstream answered ${row.status}`;
  if (row.kind === "relay") return `passed on: ${row.method} ${row.path}`;
  if (row.kind === "operation") return row.path;
  if (row.reason) return row.words;
  const done = [];
  if (row.compacted) done.push(`${number(row.compacted)} moved`);
  if (row.compressed) done.push(`${number(row.compressed)} summarised`);
  if (row.reinserted) done.push(`${counted(row.reinserted, "hidden round")} put back`);
  if (row.rounds) done.push(`${counted(row.rounds, "round")} read back`);
  const what = done.length ? done.join(", ") : isWaiting(row) ? row.words : "nothing to do";
  const event = row.new_event ? `event ${row.events}: ` : "";
  if (row.kind === "observed") return `${row.holdout === "kept" ? "held out" : "only observed"}; the plan: ${event}${what}`;
  return `${event}${what}`;
}

// The tokens that really went upstream.
export const sent = (row) => (row.kind === "observed" ? row.tokens_before : row.tokens_after);

// Each hidden round reads the cache, too, so the sum of all can be more than a prompt has.
export const cachedInARound = (row) => (row.prompt_tokens ? row.cached_tokens / (row.rounds + 1) : null);

export const cached = (row) => (row.prompt_tokens ? `${Math.round((100 * row.cached_tokens) / row.prompt_tokens)} %` : "not known");
