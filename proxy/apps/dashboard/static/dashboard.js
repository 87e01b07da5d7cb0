import { PERIODS, ask, element, plain } from "./common.js";
import { health } from "./health.js";
import { live } from "./live.js";
import { overview } from "./overview.js";
import { savings } from "./savings.js";
import { request, session, sessions } from "./sessions.js";

const PAGES = { overview, live, savings, sessions, session, request, health };
const OF_A_PERIOD = ["overview", "savings"];
const BELONGS = { session: "sessions", request: "sessions" };

const page = document.getElementById("content");
const me = await ask("me");
let leave = null;
let turn = 0;

function pageOf(name, [first]) {
  const isPeriod = !first || PERIODS.some(([period]) => period === first);
  return Object.hasOwn(PAGES, name) && (isPeriod || !OF_A_PERIOD.includes(name)) ? PAGES[name] : unknown;
}

function unknown(made) {
  made.replaceChildren(element("h1", {}, "There is no such page"),
    element("p", {}, `Nothing is at ${plain(location.hash)}. The `, element("a", { href: "#overview" }, "overview"), " is a good start."));
}

async function show() {
  const skips = location.hash === "#content"; // the link to the content of the page that is shown
  if (skips && turn) return;
  const [name, ...parameters] = (skips ? "overview" : location.hash.slice(1) || "overview").split("/");
  leave?.();
  leave = null;
  turn += 1;
  const mine = turn;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${BELONGS[name] ?? name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const made = element("div");
  page.replaceChildren(made);
  page.setAttribute("aria-busy", "true");
  try {
    const left = await pageOf(name, parameters)(made, parameters, me);
    if (mine === turn) leave = left ?? null;
    else left?.();
  } catch (error) {
    if (mine === turn) made.replaceChildren(element("h1", {}, "This page cannot be shown"), element("p", { role: "alert" }, plain(error.message, 1000)));
  }
  if (mine === turn) {
    const heading = made.querySelector("h1");
    if (heading) document.title = `${heading.textContent} - Offload Proxy`;
    page.removeAttribute("aria-busy");
    page.setAttribute("data-shown", location.hash || "#overview");
    if (turn > 1) {
      page.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
  }
}

document.querySelector('nav a[href="#health"]').hidden = !me.operator;
document.querySelector("header form").hidden = !me.logged_in;
document.getElementById("about").textContent = `Version ${me.version}, replica ${me.replica}, worker ${me.worker}. All times are UTC. ` +
  (me.operator ? "" : `You see the requests of your own key (${plain(me.namespace)}).`);
window.addEventListener("hashchange", show);
show();
