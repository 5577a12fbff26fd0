// Training runs, live: loss, rate, gradient norm, speed, and samples of the trained model.

import { inspect } from "./api.js";
import { columnWidth, lineChart } from "./chart.js";
import { amount, h } from "./dom.js";
import { state, update } from "./state.js";

const CHARTS = [
  ["Loss", ["loss", "validation_loss"]],
  ["Learning rate", ["learning_rate"]],
  ["Gradient norm", ["gradient_norm"]],
  ["Tokens per second", ["tokens_per_second"]],
  ["Accuracy and margin", ["accuracy", "margin"]],
];
const REFRESH_MILLISECONDS = 3000;

export async function show(main) {
  const { runs } = await inspect("runs");
  if (runs === null) {
    main.replaceChildren(h("section", { class: "panel" }, h("h2", {}, "Training runs"), h("p", {}, "Start the server with a folder of runs to watch them here, while they train or afterwards:"), h("p", { class: "mono" }, "clearhead serve smollm2 --runs runs")));
    return undefined;
  }
  if (!runs.length) {
    main.replaceChildren(h("section", { class: "panel" }, h("h2", {}, "Training runs"), h("p", {}, "The folder has no runs yet. Start one, for example: "), h("p", { class: "mono" }, "clearhead train capitals --out runs/capitals --smoke")));
    return undefined;
  }
  const view = new RunsPage(main, runs);
  await view.choose(runs.some((run) => run.name === state.params.get("run")) ? state.params.get("run") : runs[0].name);
  const timer = setInterval(() => document.hidden || view.refresh(), REFRESH_MILLISECONDS);
  return () => clearInterval(timer);
}

class RunsPage {
  constructor(main, runs) {
    this.list = h("ul", { class: "runs" });
    this.title = h("h2", {});
    this.facts = h("div", { class: "facts" });
    this.charts = h("div", { class: "charts" });
    this.sample = h("pre", { class: "sample", tabindex: 0 });
    this.runs = runs;
    main.replaceChildren(h("div", { class: "runs-view" }, h("section", { class: "panel" }, h("h2", {}, "Runs"), this.list), h("section", { class: "panel" }, this.title, this.facts, this.charts, h("h3", {}, "Samples"), this.sample)));
  }

  async choose(name) {
    this.name = name;
    this.rows = [];
    update({ run: name });
    this.drawList();
    await this.load();
  }

  async refresh() {
    try {
      this.runs = (await inspect("runs")).runs;
      this.drawList();
      await this.load();
    } catch {
      return; // the server is busy or gone; the next turn tries again
    }
  }

  async load() {
    const name = this.name;
    const last = this.rows.at(-1)?.step ?? -1;
    const { rows, sample } = await inspect("run", { name, after_step: last });
    if (name !== this.name) return;
    if (rows.length || !this.charts.children.length || last < 0) {
      this.rows.push(...rows);
      this.draw();
    }
    this.sample.textContent = sample ?? "Samples are written at the end of the run.";
  }

  drawList() {
    const items = this.runs.map((run) => {
      const seconds = Date.now() / 1000 - run.changed;
      const age = seconds < 30 && run.last.seconds_left !== 0 ? "live" : seconds < 60 ? "just now" : seconds < 3600 ? `${Math.round(seconds / 60)} min ago` : new Date(run.changed * 1000).toLocaleDateString();
      const loss = run.last.loss ?? run.last.validation_loss;
      return h("li", {}, h("button", { type: "button", "aria-pressed": String(run.name === this.name), onclick: () => this.choose(run.name) }, h("strong", {}, run.name), h("span", { class: "small" }, ` step ${run.last.step ?? 0}${loss === undefined ? "" : `, loss ${loss.toFixed(3)}`} · ${age}`)));
    });
    this.list.replaceChildren(...items);
  }

  draw() {
    this.title.textContent = this.name;
    const last = Object.assign({}, ...this.rows);
    const shown = Object.entries(last).filter(([name]) => ["step", "loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "seconds_left"].includes(name));
    this.facts.replaceChildren(...shown.map(([name, value]) => h("div", { class: "fact" }, h("span", { class: "small muted" }, name.replaceAll("_", " ")), h("strong", {}, name === "step" || value >= 1000 ? amount(value) : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(4)))))));
    const charts = CHARTS.map(([title, names]) => [title, names.map((name) => ({ name: name.replaceAll("_", " "), points: this.rows.filter((row) => name in row).map((row) => [row.step, row[name]]) })).filter((one) => one.points.length)]);
    this.charts.replaceChildren(...charts.filter(([, series]) => series.length).map(([title, series]) => lineChart(series, { title, xLabel: "step", width: columnWidth(this.charts) })));
  }
}
