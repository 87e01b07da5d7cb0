import { ask, cached, clock, element, happened, line, name, number, table } from "./common.js";

const MOST = 500; // rows on the page

const EVERY = 2000; // milliseconds between two looks for new rows

const COLUMNS = [
  ["Time (UTC)", (row) => element("a", { href: `#request/${row.id}` }, element("time", { datetime: new Date(row.time * 1000).toISOString() }, clock(row.time))), "time"],
  ["Tenant", (row) => row.tenant],
  ["Model", (row) => name(row.model)],
  ["API", (row) => row.dialect],
  ["Tokens as they came", (row) => number(row.tokens_before ?? 0), true],
  ["Tokens sent", (row) => number((row.kind === "observed" ? row.tokens_before : row.tokens_after) ?? 0), true],
  ["Cached share of the prompt", cached, true],
  ["Hidden rounds", (row) => number(row.rounds ?? 0), true],
  ["What happened", (row) => (row.session ? element("a", { href: `#session/${row.session}` }, happened(row)) : happened(row)), "wide"],
  ["Worker", (row) => row.worker, true],
];

export async function live(page) {
  const status = element("p", { role: "status", class: "faint" }, "Connecting.");
  let paused = false;
  let held = []; // rows that came while it was paused
  const pause = element("button", {
    "aria-pressed": "false",
    onclick: () => {
      paused = !paused;
      pause.setAttribute("aria-pressed", String(paused));
      pause.textContent = paused ? "Go on" : "Pause";
      if (!paused) held.splice(0).forEach(add);
    },
  }, "Pause");
  const rows = await ask("requests");
  const shown = table("Requests of all workers of this machine, the newest first", COLUMNS, rows, "none yet");
  const body = shown.querySelector("tbody");
  page.replaceChildren(element("h1", {}, "Live"), element("div", { class: "bar" }, pause, status), shown);
  let count = 0;
  const add = (row) => {
    count += 1;
    status.textContent = `${number(count)} since this page was opened.`;
    if (count === 1 && !rows.length) body.replaceChildren();
    body.prepend(line(COLUMNS, row));
    while (body.rows.length > MOST) body.lastChild.remove();
  };
  let newest = rows.length ? rows[0].id : 0;
  const look = async () => {
    try {
      const came = (await ask(`requests?after=${newest}`)).reverse();
      if (!count) status.textContent = "Waiting for requests.";
      if (!came.length) return;
      newest = came[came.length - 1].id;
      if (!paused) came.forEach(add);
      else held = [...held, ...came].slice(-MOST);
    } catch (error) {
      status.textContent = `No rows now, trying again: ${error.message}`;
    }
  };
  const timer = setInterval(look, EVERY);
  return () => clearInterval(timer);
}
