// One head large: a canvas with its scores, its masked scores or its weights. Changing the step blends one into the other.

import { css, MASKED, ramp, rampTable, resolved, textOn, theme } from "./colors.js";
import { h, visible } from "./dom.js";

const MAX_CELL = 44;
const MIN_LABEL_CELL = 9; // pixels: smaller rows have no room for their label
const MIN_NUMBER_CELL = 34;
const BLEND_MILLISECONDS = 450;

/** The intensity of every cell in a step, from 0 to 1; NaN where the mask forbids the cell. */
function intensities(head, step) {
  const { weights, scores, allowed } = head;
  const values = step === "weights" ? weights : scores;
  const masked = (cell) => step !== "scores" && allowed !== null && allowed[cell] === 0;
  let [low, high] = [Infinity, -Infinity];
  for (let cell = 0; cell < values.length; cell++) {
    if (masked(cell) || !Number.isFinite(values[cell])) continue;
    if (values[cell] < low) low = values[cell];
    if (values[cell] > high) high = values[cell];
  }
  if (step === "weights") low = 0;
  const span = high - low || 1;
  const shown = new Float32Array(values.length);
  for (let cell = 0; cell < values.length; cell++) {
    const share = (values[cell] - low) / span;
    shown[cell] = masked(cell) ? NaN : step === "weights" ? Math.sqrt(Math.max(share, 0)) : share;
  }
  return { shown, low, high };
}

export class Matrix {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.cursor = h("canvas", { class: "cursor", "aria-hidden": "true" });
    this.element = h("div", { class: "matrix", tabindex: 0, role: "group", "aria-label": "Matrix of queries and keys; the arrow keys choose a cell" }, this.canvas, this.cursor);
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => this.point(event));
    this.element.addEventListener("keydown", (event) => this.move(event));
    this.cell = [0, 0];
  }

  /** Show a head: {weights, scores, allowed} as typed arrays of rows × columns, and a step of it. */
  draw(head, rows, columns, step, blend = false) {
    const before = blend && this.colors ? this.colors : null;
    Object.assign(this, { head, rows, columns, step });
    this.layOut();
    this.values = intensities(head, step);
    this.colors = this.paintCells();
    cancelAnimationFrame(this.frame);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches || !before || before.length !== this.colors.length;
    if (still) this.put(this.colors);
    else this.blend(before, performance.now());
    this.drawCursor();
  }

  layOut() {
    const available = Math.max(this.element.clientWidth - 4, 220);
    const longest = (texts) => Math.min(Math.max(...texts.map((text) => [...visible(text, 14)].length)) * 7 + 12, 112, available * 0.3);
    const [wide, tall] = [longest(this.rows), longest(this.columns)];
    let size = Math.min((available - wide) / this.columns.length, MAX_CELL, Math.max(620, innerHeight - 260) / this.rows.length);
    const labeled = size >= MIN_LABEL_CELL;
    if (!labeled) size = Math.min((available - 14) / this.columns.length, Math.max(640, innerHeight - 260) / this.rows.length);
    this.cursorColor = resolved("--cursor"); // reading it costs a layout, which is too much for every move of the pointer
    this.geometry = { size: size >= 4 ? Math.floor(size) : size, left: labeled ? wide : 14, top: labeled ? tall : 14, labeled };
  }

  paintCells() {
    const { shown } = this.values;
    const [table, masked] = [rampTable(), MASKED[theme()]];
    const data = new Uint8ClampedArray(4 * shown.length);
    for (let cell = 0; cell < shown.length; cell++) {
      const color = Number.isNaN(shown[cell]) ? masked : table[Math.round(Math.min(Math.max(shown[cell], 0), 1) * 255)];
      data[4 * cell] = color[0];
      data[4 * cell + 1] = color[1];
      data[4 * cell + 2] = color[2];
      data[4 * cell + 3] = 255;
    }
    return data;
  }

  blend(before, started) {
    const share = Math.min((performance.now() - started) / BLEND_MILLISECONDS, 1);
    const eased = share * share * (3 - 2 * share);
    const mixed = new Uint8ClampedArray(before.length);
    for (let place = 0; place < before.length; place++) mixed[place] = before[place] + (this.colors[place] - before[place]) * eased;
    this.put(mixed, share === 1);
    if (share < 1) this.frame = requestAnimationFrame(() => this.blend(before, started));
  }

  put(colors, withNumbers = true) {
    const { size, left, top } = this.geometry;
    const [height, width] = [this.rows.length, this.columns.length];
    const context = resize(this.canvas, left + size * width + 2, top + size * height + 2);
    const small = h("canvas", { width, height });
    small.getContext("2d").putImageData(new ImageData(colors, width, height), 0, 0);
    context.imageSmoothingEnabled = size * (devicePixelRatio || 1) < 1;
    context.imageSmoothingQuality = "high";
    context.drawImage(small, left, top, size * width, size * height);
    this.drawLabels(context);
    if (withNumbers && size >= MIN_NUMBER_CELL) this.drawNumbers(context);
  }

  drawLabels(context) {
    const { size, left, top, labeled } = this.geometry;
    const style = getComputedStyle(this.element);
    context.fillStyle = resolved("--muted");
    context.font = labeled ? `${Math.min(12, Math.max(size, 9))}px ${style.getPropertyValue("--mono")}` : `11px ${style.fontFamily}`;
    context.textBaseline = "middle";
    if (!labeled) {
      context.textAlign = "left";
      context.fillText("keys →", left, 6);
      context.save();
      context.rotate(-Math.PI / 2);
      context.textAlign = "right";
      context.fillText("queries", -top, 7);
      return context.restore();
    }
    context.textAlign = "right";
    this.rows.forEach((text, row) => context.fillText(visible(text, 14), left - 6, top + (row + 0.5) * size));
    context.textAlign = "left";
    this.columns.forEach((text, column) => {
      context.save();
      context.translate(left + (column + 0.5) * size, top - 6);
      context.rotate(-Math.PI / 2);
      context.fillText(visible(text, 14), 0, 0);
      context.restore();
    });
  }

  drawNumbers(context) {
    const { size, left, top } = this.geometry;
    const { weights, scores } = this.head;
    const values = this.step === "weights" ? weights : scores;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    values.forEach((value, cell) => {
      const shown = this.values.shown[cell];
      if (Number.isNaN(shown)) return;
      const [row, column] = [Math.floor(cell / this.columns.length), cell % this.columns.length];
      context.fillStyle = textOn(ramp(shown));
      const text = this.step === "weights" ? (value < 0.005 ? "0" : value.toFixed(2)) : value.toFixed(1);
      context.fillText(text, left + (column + 0.5) * size, top + (row + 0.5) * size);
    });
  }

  /** Outline a row and one of its cells. */
  select(row, column) {
    this.cell = [row, column];
    if (this.geometry) this.drawCursor();
  }

  drawCursor() {
    const { size, left, top } = this.geometry;
    const [row, column] = this.cell;
    const context = resize(this.cursor, left + size * this.columns.length + 2, top + size * this.rows.length + 2);
    context.strokeStyle = this.cursorColor;
    context.lineWidth = 1;
    context.strokeRect(left - 0.5, top + row * size - 0.5, size * this.columns.length + 1, size + 1);
    context.lineWidth = 2;
    const large = Math.max(size, 5);
    context.strokeRect(left + (column + 0.5) * size - large / 2, top + (row + 0.5) * size - large / 2, large, large);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const { size, left, top } = this.geometry;
    const row = Math.floor((event.clientY - box.top - top) / size);
    const column = Math.floor((event.clientX - box.left - left) / size);
    if (row < 0 || row >= this.rows.length || column < -left / size || column >= this.columns.length) return;
    const cell = [row, Math.max(column, 0)];
    if (String(cell) !== String(this.cell)) this.onPoint(...cell);
  }

  move(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.onPoint(clamp(this.cell[0] + step[0], this.rows.length), clamp(this.cell[1] + step[1], this.columns.length));
  }

  /** The colors of the present step as a small legend. */
  legend() {
    const { low, high } = this.values;
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => css(ramp(share))).join(", ");
    const format = (value) => (this.step === "weights" ? value.toFixed(2) : value.toFixed(1));
    const masked = this.step !== "scores" && this.head.allowed?.includes(0);
    const key = masked ? h("span", {}, h("span", { class: "swatch", style: { background: css(MASKED[theme()]) } }), this.step === "weights" ? "masked: 0" : "masked: −∞") : null;
    return h("p", { class: "legend small muted" }, format(low), h("span", { class: "ramp", style: { background: `linear-gradient(to right, ${stops})` } }), `${format(high)}${this.step === "weights" ? ", color by square root" : ""}`, key);
  }
}

function resize(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  const size = { width: Math.round(width * ratio), height: Math.round(height * ratio) };
  if (canvas.width !== size.width || canvas.height !== size.height) {
    Object.assign(canvas, size);
    canvas.style.setProperty("width", `${width}px`);
    canvas.style.setProperty("height", `${height}px`);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
