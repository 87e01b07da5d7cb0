import { column, element, figure, number, percent, plain, signed, table } from "./common.js";
import { stacked } from "./charts.js";

const given = JSON.parse(document.getElementById("data").textContent);

const thinned = (every) => (every > 1 ? ` One request of ${number(every)} is shown.` : "");

const steps = (name, every) => (every > 1 ? `${name}, in steps of ${number(every)}` : name);

function drawTotal(home, policy) {
  stacked(home, `Cost of all requests so far, in plain input tokens.${thinned(policy.every)}`,
    [["planned", policy.after]], [["as it came", policy.before, "before"]], [], steps("Request", policy.every));
}

function drawSession(home, session) {
  const place = steps("Request of the session", session.every);
  const sent = element("div", { class: "chart" });
  const costs = element("div", { class: "chart" });
  home.replaceChildren(element("h3", { tabindex: "-1" }, `Session ${number(session.number)}: ${plain(session.model)}`), sent, costs);
  if (!session.came.length) {
    sent.append(element("p", {}, "There are too many sessions to keep the requests of this one."));
    return;
  }
  stacked(sent, "Tokens of each request as planned, by kind. The line above them is the request as it came; dotted lines are " +
    `events.${thinned(session.every)}`,
    given.kinds.map((kind, place) => [kind, session.kinds[place]]), [["as it came", session.came, "before"]], session.marks, place);
  stacked(costs, `Cost of each request's input, in plain input tokens.${thinned(session.every)}`,
    [["planned", session.costs[1]]], [["as it came", session.costs[0], "before"]], session.marks, place);
  home.append(element("h3", {}, "The plan in words, by the request's number"), session.told.length
    ? element("ol", {}, ...session.told.map(([request, words]) => element("li", { value: request + 1 }, words)))
    : element("p", {}, "The plan leaves this session as it came."));
}

function drawPolicy(home, policy) {
  const total = element("div", { class: "chart" });
  const chosen = element("section", { "aria-label": "The chosen session" });
  const choose = (session, button, focus) => {
    for (const one of home.querySelectorAll("button[aria-pressed]")) one.setAttribute("aria-pressed", String(one === button));
    drawSession(chosen, session);
    if (focus) chosen.querySelector("h3").focus();
  };
  const buttons = policy.sessions.map((session) => {
    const button = element("button", { type: "button", "aria-pressed": "false", onclick: () => choose(session, button, true) }, `Session ${number(session.number)}`);
    return button;
  });
  const listed = policy.sessions.map((session, place) => ({ ...session, button: buttons[place] }));
  home.replaceChildren(element("h2", {}, "All sessions together"), total, element("h2", {}, "Sessions"),
    table(`The sessions that cost most come first${policy.omitted ? `; ${number(policy.omitted)} more are left out` : ""}`, [
      column("Session", (row) => row.button, { raw: (row) => row.number, phone: 1 }),
      column("API", (row) => row.api),
      column("Model", (row) => row.model, { phone: 1 }),
      figure("Requests", (row) => row.requests),
      figure("Events", (row) => row.events),
      figure("Cost as it came", (row) => row.before, { phone: 2 }),
      figure("Cost as planned", (row) => row.after, { phone: 2 }),
      column("Saved", (row) => signed(row.before - row.after), { raw: (row) => row.before - row.after, kind: "number" }),
      column("Saved, of the cost as it came", (row) => percent(row.before - row.after, row.before), { raw: (row) => (row.before - row.after) / row.before, kind: "number", phone: 1 }),
    ], listed), chosen);
  if (policy.planned) drawTotal(total, policy);
  else total.append(element("p", {}, "This policy plans none of these requests; the table says why."));
  if (policy.sessions.length) choose(policy.sessions[0], buttons[0], false);
}

function drawReport(home) {
  const body = element("div", {});
  const draw = (place) => drawPolicy(body, given.policies[place]);
  const choice = element("select", { id: "policy", onchange: (event) => draw(Number(event.target.value)) },
    ...given.policies.map((policy, place) => element("option", { value: place }, plain(policy.name))));
  home.replaceChildren(given.policies.length > 1 ? element("p", {}, element("label", { for: "policy" }, "Policy "), choice) : "", body);
  draw(0);
}

drawReport(document.getElementById("report"));
