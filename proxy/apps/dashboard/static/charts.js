// Charts as SVG: they take colours and fonts from the page, can be read aloud, and need no library.
import { element, number, short } from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 280;
const LEFT = 58, RIGHT = 12, TOP = 12, BOTTOM = 28;

function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Draws now, and again when the width changes.
function fitted(home, paint) {
  let width = 0;
  const fit = () => {
    if (!home.isConnected) observer.disconnect();
    else if (Math.abs(home.clientWidth - width) > 1) {
      width = home.clientWidth;
      paint(Math.max(width, 240));
    }
  };
  const observer = new ResizeObserver(fit);
  observer.observe(home);
  fit();
}

// Round numbers from 0 to the largest value, about five.
function ticks(most) {
  const rough = Math.max(most, 1) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * unit >= rough) * unit;
  return Array.from({ length: Math.ceil(Math.max(most, 1) / step) + 1 }, (_, index) => index * step);
}

function frame(width, most, label) {
  const marks = ticks(most);
  const top = marks[marks.length - 1];
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": label });
  for (const mark of marks) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
      draw("text", { class: "tick", x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, short(mark).replace(/\.(\d*?)0+(?= )/, (_, kept) => kept && `.${kept}`)));
  }
  return [svg, y];
}

const axis = (svg, x, text, anchor = "middle") => svg.append(draw("text", { class: "tick", x, y: HEIGHT - 8, "text-anchor": anchor }, text));

export const legend = (entries) => element("ul", { class: "legend" }, entries.map(([name, kind, swatch = "swatch"]) =>
  element("li", {}, element("span", { class: `${swatch} ${kind}`, "aria-hidden": "true" }), name)));

const DATE = { hour: (time) => time.slice(11, 16), day: (time) => time.slice(11, 16), week: (time) => time.slice(5, 10), month: (time) => time.slice(5, 10) };

// What came and what was sent in each step of a period, from zero. rows: { time, tokens_before, tokens_after }
export function bars(home, period, since, now, step, rows, label) {
  const count = Math.max(Math.ceil((now - since) / step), 1);
  const found = Array.from({ length: count }, (_, index) => ({ time: since + index * step, came: 0, sent: 0 }));
  for (const row of rows) {
    const place = found[Math.floor((row.time - since) / step)];
    if (place) [place.came, place.sent] = [place.came + row.tokens_before, place.sent + row.tokens_after];
  }
  const most = Math.max(...found.map((one) => Math.max(one.came, one.sent)));
  fitted(home, (width) => {
    const [svg, y] = frame(width, most, label);
    const wide = (width - LEFT - RIGHT) / count;
    const labels = found.map((one) => DATE[period](new Date(one.time * 1000).toISOString()));
    const news = labels.flatMap((label, index) => (label === labels[index - 1] ? [] : [index]));
    const every = Math.ceil(news.length / Math.max(Math.floor((width - LEFT) / 80), 1));
    found.forEach((one, index) => {
      const x = LEFT + index * wide + wide * 0.12;
      const said = new Date(one.time * 1000).toISOString();
      const rect = (kind, from, to) => draw("rect", { class: kind, x, width: wide * 0.76, y: y(to), height: Math.max(y(from) - y(to), 0), rx: 1.5 });
      svg.append(draw("g", {}, draw("title", {}, `${said.slice(0, 16).replace("T", " ")} UTC: ${number(one.came)} tokens came, ${number(one.sent)} were sent`),
        draw("rect", { class: "hover", x: LEFT + index * wide, width: wide, y: TOP, height: HEIGHT - TOP - BOTTOM }),
        rect("fill-sent", 0, Math.min(one.sent, one.came)), rect(one.sent > one.came ? "fill-lost" : "fill-came", Math.min(one.sent, one.came), Math.max(one.sent, one.came))));
      if (news.includes(index) && news.indexOf(index) % every === 0) axis(svg, LEFT + (index + 0.5) * wide, labels[index]);
    });
    home.replaceChildren(svg);
  });
}

// kinds: [name, values] from the bottom up; over: [name, values, colour name] drawn as lines; marks: indexes of events
export function stacked(home, title, kinds, over, marks) {
  const count = kinds[0][1].length;
  const used = kinds.filter(([, values]) => values.some((value) => value));
  const sums = Array.from({ length: count }, (_, index) => kinds.reduce((sum, [, values]) => sum + values[index], 0));
  const most = Math.max(...sums, ...over.flatMap(([, values]) => values.map((value) => value ?? 0)));
  const svgHome = element("div", {});
  const said = element("p", { class: "readout", role: "status" }, "Point at the chart, or focus it and use the arrow keys, to read one request.");
  const label = `${title} ${count === 1 ? "One request" : `${number(count)} requests`}; sent: ${number(sums[0])} tokens at first, ${number(Math.max(...sums))} at most, ${number(sums[count - 1])} at last` +
    over.map(([name, values]) => `; ${name}: ${number(Math.max(...values.map((value) => value ?? 0)))} at most`).join("") + ".";
  home.replaceChildren(element("p", { class: "faint" }, title), svgHome, said,
    legend([...used.map(([name]) => [name, `fill-${name}`]).reverse(), ...over.map(([name, , kind]) => [name, `line-${kind}`, "dash"])]));
  let at = -1;
  fitted(svgHome, (width) => {
    const [svg, y] = frame(width, most, label);
    const wide = (width - LEFT - RIGHT) / count;
    const x = (index) => LEFT + index * wide;
    const steps = (values) => values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)} ${x(index + 1).toFixed(1)},${y(value).toFixed(1)}`);
    let below = new Array(count).fill(0);
    for (const [name, values] of used) {
      const above = values.map((value, index) => value + below[index]);
      svg.append(draw("path", { class: `fill-${name}`, d: `M${steps(above).join(" L")} L${steps(below).reverse().map((one) => one.split(" ").reverse().join(" ")).join(" L")} Z` }));
      below = above;
    }
    for (const [, values, kind] of over) {
      svg.append(draw("polyline", { class: `line-${kind}`, points: steps(values.map((value) => value ?? 0)).join(" ") }));
    }
    for (const mark of marks) svg.append(draw("line", { class: "mark", x1: x(mark), x2: x(mark), y1: TOP, y2: HEIGHT - BOTTOM }));
    const every = Math.ceil(count / Math.max(Math.floor((width - LEFT) / 70), 1));
    for (let index = 0; index < count; index += every) axis(svg, x(index + 0.5), number(index + 1));
    const cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(cursor);
    const show = (index) => {
      at = Math.min(Math.max(index, 0), count - 1);
      cursor.setAttribute("x1", x(at + 0.5));
      cursor.setAttribute("x2", x(at + 0.5));
      cursor.setAttribute("visibility", "visible");
      const parts = [...over, ...used].map(([name, values]) => `${name} ${number(values[at] ?? 0)}`);
      said.textContent = `Request of the session ${number(at + 1)}: ${number(sums[at])} tokens sent. ${parts.join(", ")}.`;
    };
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => show(Math.floor((event.clientX - svg.getBoundingClientRect().left - LEFT) / wide)));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -count, End: count }[event.key];
      if (step) {
        event.preventDefault();
        show(at + step);
      }
    });
    svgHome.replaceChildren(svg);
  });
}
