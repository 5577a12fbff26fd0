// All heads at a glance: one canvas with a small picture of every head, layers in rows, heads in columns.

import { arrayOf } from "./api.js";
import { css, ramp, rampTable, resolved } from "./colors.js";
import { h } from "./dom.js";

const LABEL = 30; // pixels for the number of the layer
const GAP = 3;

/** Draw bytes as pixels. */
export function pixels(bytes, width, height) {
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const table = rampTable();
  for (let place = 0; place < bytes.length; place++) {
    const [red, green, blue] = table[bytes[place]];
    image.data.set([red, green, blue, 255], 4 * place);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A grid of heads. `numHeads`: of every layer. `onChoose(layer, head)` is called by mouse and keys. */
export class HeadGrid {
  constructor(numHeads, onChoose) {
    this.numHeads = numHeads;
    this.onChoose = onChoose;
    this.pictures = numHeads.map(() => null);
    this.selected = [0, 0];
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.element = h("div", { class: "head-grid", tabindex: 0, role: "group", "aria-label": "All heads, layers in rows; the arrow keys choose one" }, this.canvas);
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  get columns() {
    return Math.max(...this.numHeads);
  }

  /** Choose the size of a picture for the width of the panel. */
  layOut() {
    const width = Math.max(this.element.clientWidth - 2, 240);
    this.cell = Math.max(Math.min(Math.floor((width - LABEL) / this.columns) - GAP, 56), 10);
    const ratio = devicePixelRatio || 1;
    const [w, t] = [LABEL + this.columns * (this.cell + GAP), this.numHeads.length * (this.cell + GAP)];
    Object.assign(this.canvas, { width: w * ratio, height: t * ratio });
    this.canvas.style.setProperty("width", `${w}px`);
    this.canvas.style.setProperty("height", `${t}px`);
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.colors = { muted: resolved("--muted"), line: resolved("--line"), cursor: resolved("--cursor"), font: getComputedStyle(this.element).fontFamily };
    this.numHeads.forEach((_, layer) => this.drawLayer(layer));
  }

  /** Take the pictures of one layer: {type, shape: [heads, height, width], data}. */
  add(layer, thumbnails) {
    const [count, height, width] = thumbnails.shape;
    const bytes = arrayOf(thumbnails);
    const size = height * width;
    this.pictures[layer] = Array.from({ length: count }, (_, head) => pixels(bytes.subarray(head * size, (head + 1) * size), width, height));
    this.drawLayer(layer);
  }

  drawLayer(layer) {
    const { context, cell } = this;
    const top = layer * (cell + GAP);
    context.clearRect(0, top, this.canvas.width, cell + GAP);
    context.fillStyle = this.colors.muted;
    context.font = `11px ${this.colors.font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    if (cell >= 11 || layer % 2 === 0) context.fillText(`L${layer}`, LABEL - 7, top + cell / 2);
    for (let head = 0; head < this.numHeads[layer]; head++) {
      const left = LABEL + head * (cell + GAP);
      const picture = this.pictures[layer]?.[head];
      if (picture) context.drawImage(picture, left, top, cell, cell);
      else {
        context.fillStyle = css(ramp(0.06));
        context.fillRect(left, top, cell, cell);
      }
      context.lineWidth = 1;
      context.strokeStyle = this.colors.line;
      context.strokeRect(left - 0.5, top + 0.5, cell + 1, cell);
    }
    if (this.selected[0] === layer) this.outline();
  }

  outline() {
    const { context, cell } = this;
    const [layer, head] = this.selected;
    context.lineWidth = 3;
    context.strokeStyle = this.colors.cursor;
    context.strokeRect(LABEL + head * (cell + GAP) - 0.5, layer * (cell + GAP) + 1.5, cell + 1, cell - 1);
  }

  select(layer, head) {
    const [before] = this.selected;
    this.selected = [layer, head];
    if (!this.context) return;
    for (const one of new Set([before - 1, before, before + 1, layer])) if (one >= 0 && one < this.numHeads.length) this.drawLayer(one);
    this.outline();
    const top = layer * (this.cell + GAP);
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop || top + this.cell > scrollTop + clientHeight) this.element.scrollTop = top - clientHeight / 2;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top) / (this.cell + GAP));
    const head = Math.floor((event.clientX - box.left - LABEL) / (this.cell + GAP));
    return head >= 0 && layer >= 0 && layer < this.numHeads.length && head < this.numHeads[layer] ? [layer, head] : null;
  }

  click(event) {
    const found = this.at(event);
    if (found) this.onChoose(...found);
  }

  point(event) {
    const found = this.at(event);
    this.canvas.title = found ? `layer ${found[0]}, head ${found[1]}` : "";
  }

  move(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const layer = Math.min(Math.max(this.selected[0] + step[0], 0), this.numHeads.length - 1);
    this.onChoose(layer, Math.min(Math.max(this.selected[1] + step[1], 0), this.numHeads[layer] - 1));
  }
}
