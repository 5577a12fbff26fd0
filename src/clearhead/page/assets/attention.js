// Attention: all heads at a glance, and one head large with scores, mask and softmax as steps.

import { arrayOf } from "./api.js";
import { wordLines } from "./arcs.js";
import { announce, chip, download, h, percent, segmented, visible } from "./dom.js";
import { Matrix } from "./matrix.js";
import { number, state, update } from "./state.js";
import { HeadGrid } from "./thumbnails.js";
import { chosenPosition } from "./strip.js";

const STEPS = [["scores", "1 Scores"], ["mask", "2 Mask"], ["weights", "3 Softmax"]];
const FORMULAS = {
  scores: ["S", " = ", "Q", "K", "ᵀ ∕ √", "d", "ₖ", "how well does query i fit key j?"],
  mask: ["S", "ᵢⱼ + ", "M", "ᵢⱼ,  ", "M", "ᵢⱼ = 0 for j ≤ i, −∞ otherwise", "the future is hidden"],
  weights: ["A", " = softmax(", "S", " + ", "M", "),  ", "head", " = ", "A", "V", "each row sums to 1"],
};
const NUM_RANKED = 5;

export async function show(main, subject, info, strip) {
  const view = new AttentionPage(main, subject, info, strip);
  await view.start();
  return { choose: (place) => view.chooseRow(place), close: () => view.close() };
}

class AttentionPage {
  constructor(main, subject, info, strip) {
    Object.assign(this, { main, subject, info, strip, controller: new AbortController(), ranked: [] });
    this.kind = Math.min(Math.max(number("v", info.views.length > 1 ? 1 : 0), 0), info.views.length - 1);
    this.step = STEPS.some(([name]) => name === state.params.get("step")) ? state.params.get("step") : "weights";
    this.onKey = (event) => this.key(event);
    this.onResize = () => (this.grid.layOut(), this.redraw(false));
    addEventListener("keydown", this.onKey);
    addEventListener("resize", this.onResize);
  }

  close() {
    this.controller.abort();
    cancelAnimationFrame(this.frame);
    removeEventListener("keydown", this.onKey);
    removeEventListener("resize", this.onResize);
  }

  get heads() {
    return this.info.views[this.kind].num_heads;
  }

  /** Tokens in the rows and in the columns of the present kind of attention. */
  get texts() {
    const [target, source] = [this.info.tokens, this.info.source].map((tokens) => tokens.map((token) => token.text));
    if (this.info.views.length === 1) return [target, target];
    return [[target, target], [target, source], [source, source]][this.kind];
  }

  async start() {
    const layer = Math.min(Math.max(number("layer", this.subject.example?.start?.layer ?? Math.floor(this.heads.length / 2)), 0), this.heads.length - 1);
    const head = Math.min(Math.max(number("head", this.subject.example?.start?.head ?? 0), 0), this.heads[layer] - 1);
    Object.assign(this, { layer, head });
    this.chosenByHand = state.params.has("head") || Boolean(this.subject.example?.start);
    const [rows, columns] = this.texts;
    this.row = this.kind === 2 ? Math.min(number("row", rows.length - 1), rows.length - 1) : chosenPosition(this.info);
    this.column = Math.min(Math.max(number("col", 0), 0), columns.length - 1);
    this.build();
    this.grid.layOut();
    this.grid.select(layer, head);
    await this.showHead(false);
    this.load();
  }

  build() {
    this.grid = new HeadGrid(this.heads, (layer, head) => this.choose(layer, head));
    this.matrix = new Matrix((row, column) => this.point(row, column));
    this.title = h("h2", { id: "head-title" });
    this.about = h("p", { class: "hint" });
    this.readout = h("p", { class: "readout" });
    this.strongest = h("ul", { class: "strongest" });
    this.maths = h("p", { class: "maths" });
    this.legend = h("div", {});
    this.lines = h("div", { class: "lines", tabindex: 0, role: "region", "aria-label": "Lines between words" });
    this.ranking = h("p", { class: "row ranking", hidden: true });
    const kinds = this.info.views.length > 1 ? segmented("Kind of attention", this.info.views.map((view, place) => [place, view.title]), this.kind, (kind) => this.changeKind(kind)) : null;
    const steps = segmented("Step", STEPS, this.step, (step) => this.changeStep(step));
    const png = h("button", { type: "button", class: "quiet", onclick: () => this.matrix.canvas.toBlob((blob) => download(`layer${this.layer}-head${this.head}.png`, blob)) }, "Save PNG");
    this.main.replaceChildren(
      h("div", { class: "attention" },
        h("section", { class: "panel heads" }, h("h2", {}, "All heads"), kinds, h("p", { class: "hint" }, "Every square is one head: queries down, keys across. Arrow keys choose; Shift with arrows works anywhere on this page."), this.ranking, this.grid.element),
        h("section", { class: "panel one" }, h("div", { class: "row spread" }, this.title, png), this.about, h("div", { class: "row" }, steps), this.maths, this.matrix.element, this.legend, this.readout),
        h("section", { class: "panel words" }, h("h2", {}, "Between words"), h("p", { class: "hint" }, "Queries left, keys right; point at a word."), this.strongest, this.lines),
      ),
    );
  }

  /** Ask for the pictures of all layers, one layer at a time, so that a chosen head never waits for more than one. */
  async load() {
    const { signal } = this.controller;
    const order = this.heads.map((_, layer) => layer);
    for (const layer of order) {
      if (signal.aborted) return;
      try {
        const answer = await this.subject.ask("thumbnails", { view: this.kind, layer }, signal);
        if (signal.aborted) return;
        this.grid.add(layer, answer.thumbnails);
        if (layer === this.layer) this.describe(answer);
        this.rank(layer, answer);
      } catch (error) {
        if (error.name !== "AbortError") this.about.textContent = error.message;
        return;
      }
    }
  }

  /** Keep the heads whose attention follows no trivial pattern, and offer the first of them. */
  rank(layer, answer) {
    answer.shares?.specific?.forEach((share, head) => this.ranked.push({ layer, head, share, cell: answer.strongest[head] }));
    this.ranked.sort((one, other) => other.share - one.share);
    this.ranked.length = Math.min(this.ranked.length, NUM_RANKED);
    if (layer !== this.heads.length - 1 || !this.ranked.length) return;
    const buttons = this.ranked.map(({ layer: at, head, share, cell }) => h("button", { type: "button", onclick: () => this.choose(at, head, cell) }, `L${at} H${head} `, h("small", { class: "muted" }, percent(share))));
    this.ranking.replaceChildren(h("span", { class: "small muted" }, "Look for something specific:"), ...buttons);
    this.ranking.hidden = false;
    const [best] = this.ranked;
    if (!this.chosenByHand) this.choose(best.layer, best.head, best.cell);
  }

  changeKind(kind) {
    update({ v: kind, layer: null, head: null, row: null, col: null });
    this.controller.abort();
    Object.assign(this, { controller: new AbortController(), kind, ranked: [], colors: null });
    this.start();
  }

  changeStep(step) {
    this.step = step;
    update({ step });
    this.redraw(true);
  }

  choose(layer, head, cell = null) {
    Object.assign(this, { layer, head, chosenByHand: true });
    if (cell) [this.row, this.column] = cell;
    update({ layer, head });
    this.grid.select(layer, head);
    announce(`Layer ${layer}, head ${head}`);
    this.showHead(false);
  }

  async showHead(blend) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.title.textContent = `Layer ${this.layer}, head ${this.head}`;
    this.about.textContent = "";
    this.matrix.element.classList.add("busy");
    try {
      const data = await this.headData();
      if (turn !== this.turn || this.controller.signal.aborted) return;
      this.data = data;
      this.redraw(blend);
    } catch (error) {
      if (error.name !== "AbortError") this.about.textContent = error.message;
    }
    this.matrix.element.classList.remove("busy");
    this.subject.ask("thumbnails", { view: this.kind, layer: this.layer }, this.controller.signal).then((answer) => turn === this.turn && this.describe(answer), () => {});
  }

  async headData() {
    const fields = { view: this.kind, layer: this.layer, head: this.head };
    try {
      const answer = await this.subject.ask("head", fields, this.controller.signal);
      return { weights: arrayOf(answer.weights), scores: arrayOf(answer.scores), allowed: answer.allowed && arrayOf(answer.allowed) };
    } catch (error) {
      if (!this.subject.example) throw error;
      return this.fromThumbnail(await this.subject.ask("thumbnails", { view: this.kind, layer: this.layer }));
    }
  }

  /** A bundled example has the weights of all heads in 8 bits, and the scores of a few. */
  fromThumbnail({ thumbnails, largest }) {
    const [, height, width] = thumbnails.shape;
    const bytes = arrayOf(thumbnails).subarray(this.head * height * width, (this.head + 1) * height * width);
    const weights = Float32Array.from(bytes, (byte) => (byte / 255) ** 2 * largest[this.head]);
    return { weights, scores: null, allowed: null };
  }

  describe({ shares }) {
    if (!shares) return;
    const parts = Object.entries(shares).map(([name, values]) => [name, values[this.head]]).sort((one, other) => other[1] - one[1]);
    const words = parts.slice(0, 3).filter(([, share]) => share >= 0.05).map(([name, share]) => `${name} ${percent(share)}`);
    this.about.textContent = `Where its attention goes: ${words.join(", ")}.`;
  }

  redraw(blend) {
    if (!this.data) return;
    const step = this.data.scores ? this.step : "weights";
    const [rows, columns] = this.texts;
    this.matrix.draw(this.data, rows, columns, step, blend);
    this.legend.replaceChildren(this.matrix.legend());
    this.showFormula(step);
    this.point(Math.min(this.row, rows.length - 1), Math.min(this.column, columns.length - 1));
  }

  showFormula(step) {
    const parts = FORMULAS[step];
    const letters = parts.slice(0, -1).map((part) => (/^[A-Za-z]$|^head$/.test(part) ? h("i", {}, part) : part));
    this.maths.replaceChildren(h("span", { class: "lit" }, ...letters), h("span", { class: "small muted" }, `  ${parts.at(-1)}`));
    if (!this.data.scores) this.maths.append(h("span", { class: "small muted" }, " (the bundled example holds only the weights of this head)"));
  }

  chooseRow(place) {
    if (this.kind !== 2) this.point(place, this.column);
  }

  point(row, column) {
    Object.assign(this, { row, column });
    update(this.kind === 2 ? { row, col: column } : { at: row, col: column });
    this.matrix.select(row, column);
    if (this.kind !== 2) this.strip.mark(row);
    if (!this.data) return;
    const [rows, columns] = this.texts;
    const cell = row * columns.length + column;
    const { weights, scores, allowed } = this.data;
    const hidden = allowed && allowed[cell] === 0;
    const score = scores ? ` score ${scores[cell].toFixed(2)},` : "";
    this.readout.replaceChildren("Query ", chip(rows[row]), ` ${row} → key `, chip(columns[column]), ` ${column}:${score} ${hidden ? "masked, so weight 0" : `weight ${percent(weights[cell])}`}`);
    if (this.drawn?.data === this.data && this.drawn.row === row) return; // only the key has changed
    this.drawn = { data: this.data, row };
    cancelAnimationFrame(this.frame); // rows that the pointer crosses between two frames are not drawn
    this.frame = requestAnimationFrame(() => this.showWords(row, rows, columns));
  }

  showWords(row, rows, columns) {
    this.showStrongest(row, rows, columns);
    const width = Math.min(Math.max(this.lines.clientWidth, 240), 520);
    this.lines.replaceChildren(wordLines(rows, columns, this.data.weights, row, (other) => other !== this.row && this.point(other, this.column), width));
    this.keepInView(this.lines.querySelector(".query"));
  }

  /** Scroll the lines to the word of the chosen query, if it is outside. */
  keepInView(word) {
    const [outer, inner] = [this.lines, word].map((element) => element.getBoundingClientRect());
    if (inner.top < outer.top || inner.bottom > outer.bottom) this.lines.scrollTop += inner.top - outer.top - outer.height / 2;
  }

  showStrongest(row, rows, columns) {
    const weights = this.data.weights.subarray(row * columns.length, (row + 1) * columns.length);
    const order = [...weights.keys()].sort((one, other) => weights[other] - weights[one]).slice(0, 4);
    const items = order.map((column) => {
      const bar = h("span", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--share", String(weights[column]));
      return h("li", {}, h("span", { class: "name" }, `${visible(columns[column], 16)}`), bar, h("span", { class: "value" }, percent(weights[column])));
    });
    this.strongest.replaceChildren(h("li", { class: "muted small" }, h("span", {}, chip(rows[row]), " attends to")), ...items);
  }

  key(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !event.shiftKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    event.preventDefault();
    const layer = Math.min(Math.max(this.layer + step[0], 0), this.heads.length - 1);
    this.choose(layer, Math.min(Math.max(this.head + step[1], 0), this.heads[layer] - 1));
  }
}
