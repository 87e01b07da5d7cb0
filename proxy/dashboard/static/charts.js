/* global uPlot */
import { color, element, number } from "./common.js";

const HEIGHT = 320;
const DAY = 86400; // seconds before a single point over time
const charts = new Set();

function draw(home, title, options, data) {
  const paint = () => {
    const axis = { stroke: color("faint"), grid: { stroke: color("line") }, ticks: { stroke: color("line") } };
    const made = options();
    const size = { width: Math.max(home.clientWidth, 280), height: HEIGHT };
    const axes = made.axes.map((one) => ({ ...axis, ...one }));
    home.replaceChildren(element("p", { class: "faint" }, title));
    const chart = new uPlot({ ...size, ...made, axes }, data, home);
    chart.root.querySelector("canvas").setAttribute("aria-hidden", "true");
    return chart;
  };
  const kept = { home, chart: paint(), paint };
  charts.add(kept);
}

function each(work) {
  for (const kept of charts) {
    if (kept.home.isConnected) work(kept);
    else {
      kept.chart.destroy();
      charts.delete(kept);
    }
  }
}

window.addEventListener("resize", () => each((kept) => kept.chart.setSize({ width: Math.max(kept.home.clientWidth, 280), height: HEIGHT })));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => each((kept) => {
  kept.chart.destroy();
  kept.chart = kept.paint();
}));

const figures = { size: 80, values: (_, ticks) => ticks.map((tick) => number(tick)) };

// series: [name, values, colour]
export function lines(home, title, times, series) {
  draw(home, title, () => ({
    scales: { x: { range: (_, first, last) => (times.length > 1 ? [first, last] : [times[0] - DAY, times[0] + DAY / 24]) } },
    axes: [{}, figures],
    series: [{ label: "Time" }, ...series.map(([label, , stroke]) => ({ label, stroke, width: 2, points: { show: times.length < 50 }, value: (_, value) => (value === null ? "" : number(value)) }))],
  }), [times, ...series.map(([, values]) => values)]);
}

// kinds: [name, values] from the bottom up; over: [name, values, colour name] drawn as lines; marks: indexes of events
export function stacked(home, title, kinds, over, marks, place = "Request of the session") {
  const count = kinds[0][1].length;
  const places = Array.from({ length: count }, (_, index) => index + 1);
  let below = new Array(count).fill(0);
  const layers = kinds.map(([name, values]) => {
    below = values.map((value, index) => value + below[index]);
    return [name, values, below];
  }).reverse();
  draw(home, title, () => ({
    scales: { x: { time: false } },
    axes: [{ label: place, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) }, figures],
    series: [
      { label: "Request" },
      ...layers.map(([name, values]) => ({
        label: name, stroke: color(name), fill: color(name), width: 0, points: { show: false },
        value: (_, __, ___, index) => (index === null || index === undefined ? "" : number(values[index])),
      })),
      ...over.map(([label, , stroke]) => ({
        label, stroke: color(stroke), width: 2, dash: stroke === "cached" ? [4, 4] : undefined, points: { show: count < 3 },
        value: (_, value) => (value === null || value === undefined ? "" : number(value)),
      })),
    ],
    hooks: {
      draw: [(chart) => {
        const { ctx, bbox } = chart;
        ctx.save();
        ctx.strokeStyle = color("text");
        ctx.setLineDash([2, 3]);
        for (const mark of marks) {
          const x = chart.valToPos(mark + 1, "x", true);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.restore();
      }],
    },
  }), [places, ...layers.map(([, , sums]) => sums), ...over.map(([, values]) => values)]);
}
