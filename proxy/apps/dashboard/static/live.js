import { ask, button, cached, clock, column, counted, element, happened, here, isWrong, lasting, line, moment, name, number, pair, percent, plain, save, sent, share, tile, visible } from "./common.js";

const EVERY = 2000; // milliseconds between two looks for new rows
const PAGE = 50; // rows on the page
const SAVED = 10000; // rows of a file, at most
const TOGETHER = 500; // rows that are asked for at once
const FILTERS = ["tenant", "model", "outcome", "sort", "text", "session"];
const OUTCOMES = [["", "All outcomes"], ["changed", "Changed"], ["unchanged", "Went as they came"], ["observed", "Only observed"], ["errors", "Errors"], ["other", "Others"]];
const SORTS = [["time", "Newest first"], ["came", "Largest as they came"], ["sent", "Largest as sent"], ["saved", "Saved most"], ["seconds", "Slowest"]];

const columns = (most, me) => [
  column("Time (UTC)", (row) => element("a", { href: `#request/${row.id}` }, element("time", { datetime: new Date(row.time * 1000).toISOString(), title: moment(row.time) }, clock(row.time))), { raw: (row) => moment(row.time), kind: "time", phone: 1 }),
  column("Model", (row) => element("span", {}, name(row.model), me.operator ? element("span", { class: "faint" }, ` ${row.tenant}`) : ""), { raw: (row) => row.model, phone: 1 }),
  column("Tenant", (row) => row.tenant, { kind: "saved-only" }),
  column("Tokens: came, sent", (row) => (row.dialect && row.tokens_before ? pair(row.tokens_before, sent(row), most()) : ""), { raw: (row) => row.tokens_before, kind: "bars-cell", phone: 2 }),
  column("Tokens sent", (row) => number(sent(row)), { raw: sent, kind: "saved-only" }),
  column("Saved", (row) => (row.tokens_before ? share(row.tokens_before, sent(row)) : ""), { raw: (row) => row.tokens_before - sent(row), kind: "number", phone: 1 }),
  column("Cached", (row) => (row.prompt_tokens ? cached(row) : ""), { raw: (row) => row.cached_tokens, kind: "number" }),
  column("Latency", (row) => lasting(row.seconds), { raw: (row) => row.seconds, kind: "number" }),
  column("What happened", (row) => element(row.session ? "a" : "span", { href: row.session && `#session/${row.session}`, class: isWrong(row) && "bad" }, plain(happened(row))), { raw: happened, kind: "wide", phone: 2 }),
];

export async function live(page, parameters, me) {
  const wanted = new URLSearchParams(parameters.join("/"));
  const query = (more) => {
    const asked = new URLSearchParams(more);
    for (const filter of FILTERS) if (wanted.get(filter)) asked.set(filter, wanted.get(filter));
    return asked.toString();
  };
  const [names, rows] = await Promise.all([ask("names"), ask(`requests?${query({ limit: PAGE })}`)]);
  let most = 1;
  const shown = columns(() => most, me);
  const onPage = visible(shown);
  const status = element("p", { role: "status", class: "faint" }, "Looking for requests.");
  const stats = element("dl", { class: "tiles small" });
  const body = element("tbody", {});
  const turning = element("span", { class: "pages" });
  let [paused, offset, count, newest, held] = [false, 0, 0, 0, []];
  const pause = button("Pause", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Go on" : "Pause";
    if (!paused) add(held.splice(0));
  }, { "aria-pressed": "false" });
  const fill = (found) => {
    most = Math.max(1, ...found.map((row) => row.tokens_before));
    body.replaceChildren(...(found.length ? found.map((row) => line(onPage, row))
      : [element("tr", {}, element("td", { colspan: onPage.length, class: "faint" }, "none yet"))]));
    newest = Math.max(newest, ...found.map((row) => row.id));
    turning.replaceChildren(button("Newer", () => turn(offset - PAGE), { disabled: offset === 0 }),
      element("span", {}, found.length ? `${number(offset + 1)} to ${number(offset + found.length)}` : "none"),
      button("Older", () => turn(offset + PAGE), { disabled: found.length < PAGE }));
  };
  const turn = async (to) => {
    offset = Math.max(to, 0);
    fill(await ask(`requests?${query({ limit: PAGE, offset })}`));
  };
  const follows = () => offset === 0 && ["", "time", null].includes(wanted.get("sort"));
  const add = (came) => {
    if (!came.length || !follows()) return;
    if (!count && !rows.length) body.replaceChildren();
    count += came.length;
    most = Math.max(most, ...came.map((row) => row.tokens_before));
    came.forEach((row) => body.prepend(line(onPage, row)));
    while (body.rows.length > PAGE) body.lastChild.remove();
  };
  const measure = async () => measured(stats, await ask(`latency?${query({})}`));
  const look = async () => {
    try {
      const came = (await ask(`requests?${query({ after: newest, limit: PAGE })}`)).filter((row) => row.id > newest).sort((one, other) => one.id - other.id);
      newest = came.length ? came[came.length - 1].id : newest;
      if (paused) held = [...held, ...came].slice(-PAGE);
      else add(came);
      status.textContent = count ? `${counted(count, "request")} since this page was opened.` : "Waiting for requests.";
      if (came.length) await measure();
    } catch (error) {
      status.textContent = `No rows now, trying again: ${error.message}`;
    }
  };
  const every = async (found = []) => {
    const more = await ask(`requests?${query({ limit: TOGETHER, offset: found.length })}`);
    const all = [...found, ...more];
    return more.length < TOGETHER || all.length >= SAVED ? all : every(all);
  };
  const saving = button("CSV", async () => save("Requests", shown, await every()),
    { "aria-label": `Save as CSV: these requests, ${number(SAVED)} at most` });
  page.replaceChildren(element("div", { class: "heading" }, element("h1", {}, "Live"), pause, status), stats, filters(wanted, names),
    element("div", { class: "tabled" }, element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" },
      element("table", { class: "rows live" }, element("caption", {}, "Requests of all workers", here(me), `A pair of bars is a prompt as it came, above, and as it was sent.`),
        element("thead", {}, element("tr", {}, onPage.map(({ heading, kind }) => element("th", { scope: "col", class: kind }, heading)))), body)),
    element("div", { class: "bar foot" }, turning, saving)));
  fill(rows);
  await measure();
  const timer = setInterval(look, EVERY);
  look();
  return () => clearInterval(timer);
}

function measured(home, found) {
  const seconds = (title, values) => tile(title, values ? lasting(values.p50) : "–", values ? `p95 ${lasting(values.p95)}, p99 ${lasting(values.p99)}` : "none yet");
  home.replaceChildren(seconds("Latency, median", found.seconds), seconds("First byte, median", found.first), seconds("Added by the proxy, median", found.added),
    tile("Errors", number(found.errors), `of the newest ${counted(found.requests, "request")} (${percent(found.errors, found.requests)})`));
}

function filters(wanted, names) {
  const change = (field, value) => {
    if (value) wanted.set(field, value);
    else wanted.delete(field);
    location.hash = `#live/${wanted}`;
  };
  const select = (field, title, options) => element("label", {}, title, element("select", { onchange: (event) => change(field, event.target.value) },
    options.map(([value, label]) => element("option", { value, selected: (wanted.get(field) ?? "") === value }, label))));
  const each = (field, all) => [["", all], ...[...new Set(names.map((row) => row[field]).filter(Boolean))].map((one) => [one, one.slice(0, 60)])];
  const search = element("form", { role: "search", onsubmit: (event) => { event.preventDefault(); change("text", event.target.elements.text.value.trim()); } },
    element("label", {}, "Search", element("input", { type: "search", name: "text", value: wanted.get("text") ?? "", placeholder: "model, path, error, words, id" })));
  return element("div", { class: "bar filters" }, select("tenant", "Tenant", each("tenant", "All tenants")), select("model", "Model", each("model", "All models")),
    select("outcome", "Outcome", OUTCOMES), select("sort", "Order", SORTS), search,
    wanted.get("session") ? button("All sessions", () => change("session", "")) : null,
    [...wanted].length ? element("a", { href: "#live" }, "Clear") : null);
}
