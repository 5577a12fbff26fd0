// Line charts as SVG: one axis below, one at the left, lines that tell themselves apart by color and by dash.

import { LINES, theme } from "./colors.js";
import { h, svg } from "./dom.js";

const DASHES = ["", "6 3", "2 3", "9 3 2 3"];
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [560, 220, 56, 26, 10]; // pixels
const MAX_DOTS = 30; // points of a short line, which are drawn one by one

/** The width of a chart in a grid of charts (.charts in views.css), so that its text is drawn in its own size. */
export function columnWidth(grid) {
  const [least, gap] = [24, 1.5].map((rem) => rem * parseFloat(getComputedStyle(document.documentElement).fontSize));
  const columns = Math.max(Math.floor((grid.clientWidth + gap) / (least + gap)), 1);
  return (grid.clientWidth - gap * (columns - 1)) / columns;
}

/** Round numbers between low and high, for the labels of an axis. */
function ticks(low, high, count) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

const short = (value) => (Math.abs(value) >= 10000 || (Math.abs(value) < 0.001 && value !== 0) ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(3))));

/**
 * A chart of `series`: [{name, points: [[x, y], ...]}]. `options`: title, xLabel, low, high, width, format of a y.
 * Pointing at it tells the values below.
 */
export function lineChart(series, options = {}) {
  const width = Math.max(options.width ?? WIDTH, 240);
  const shown = series.filter((one) => one.points.length);
  const all = shown.flatMap((one) => one.points);
  if (!all.length) return h("figure", { class: "chart" }, h("figcaption", {}, options.title ?? ""), h("p", { class: "hint" }, "No values yet."));
  const xs = all.map(([x]) => x);
  const ys = all.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const low = options.low ?? Math.min(...ys);
  const high = options.high ?? Math.max(...ys);
  const margin = options.low === undefined ? (high - low) * 0.06 || Math.abs(high) * 0.1 || 1 : 0;
  const [y0, y1] = [low - margin, high + (options.high === undefined ? margin || (high - low) * 0.06 || 1 : 0)];
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - 8);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0 || 1)) * (HEIGHT - BOTTOM - TOP);
  const colors = LINES[theme()];
  const grid = ticks(y0, y1, 4).flatMap((value) => [svg("line", { x1: LEFT, x2: width - 8, y1: y(value), y2: y(value), class: "grid" }), svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", class: "tick" }, (options.format ?? short)(value))]);
  const below = ticks(x0, x1, 6).map((value) => svg("text", { x: x(value), y: HEIGHT - 8, "text-anchor": "middle", class: "tick" }, (options.xFormat ?? short)(value)));
  const lines = shown.map((one, place) => svg("polyline", { points: one.points.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" "), class: "series", stroke: colors[place % colors.length], "stroke-dasharray": DASHES[Math.floor(place / 2) % DASHES.length] }));
  const dots = shown.flatMap((one, place) => (one.points.length > MAX_DOTS ? [] : one.points.map(([px, py]) => svg("circle", { cx: x(px), cy: y(py), r: 2.5, fill: colors[place % colors.length] }))));
  const pointer = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "pointer", visibility: "hidden" });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${options.title ?? "Chart"} of ${shown.map((one) => one.name).join(", ")}` }, ...grid, ...below, ...lines, ...dots, pointer);
  const readout = h("p", { class: "small muted chart-readout" }, options.xLabel ?? "");
  picture.addEventListener("mousemove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = x0 + ((((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - 8)) * (x1 - x0);
    const nearest = shown.map((one) => [one.name, one.points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best))]);
    const place = x(nearest[0][1][0]);
    for (const name of ["x1", "x2"]) pointer.setAttribute(name, place);
    pointer.setAttribute("visibility", "visible");
    const head = options.describeX ? options.describeX(nearest[0][1][0]) : `${options.xLabel ?? "x"} ${short(nearest[0][1][0])}`;
    readout.textContent = `${head}: ${nearest.map(([name, [, value]]) => `${name} ${(options.format ?? short)(value)}`).join(", ")}`;
  });
  const legend = shown.length > 1 ? h("p", { class: "row small chart-legend" }, ...shown.map((one, place) => legendItem(one.name, colors[place % colors.length], DASHES[Math.floor(place / 2) % DASHES.length]))) : null;
  return h("figure", { class: "chart" }, options.title ? h("figcaption", {}, options.title) : null, picture, readout, legend);
}

function legendItem(name, color, dash) {
  const line = svg("svg", { width: 22, height: 8, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: color, "stroke-width": 3, "stroke-dasharray": dash }));
  return h("span", { class: "row legend-item" }, line, name);
}
