// The logit lens: what the model would say after every layer, and the tokens that rise or fall on the way.

import { css, paint, ramp } from "./colors.js";
import { lineChart } from "./chart.js";
import { download, h, percent, segmented, visible } from "./dom.js";
import { number, state, update } from "./state.js";
import { chosenPosition } from "./strip.js";

const COLUMNS = 12;
const MAX_ROWS = 10; // layers at first, so that the table comes at once

/** The color of a cell whose first candidate has this probability. */
const shade = (probability) => ramp(0.05 + 0.9 * probability);

export async function show(main, subject, info) {
  if (!info.next.length) {
    main.replaceChildren(h("p", { class: "panel" }, "This model predicts no next token, so there is nothing for the lens to decode."));
    return {};
  }
  const view = new LensPage(main, subject, info);
  view.start();
  return { choose: (place) => view.choosePosition(place), close: () => view.controller.abort() };
}

const branchName = (after) => (after === "attention" ? "attention" : "feed-forward");

class LensPage {
  constructor(main, subject, info) {
    Object.assign(this, { main, subject, info, controller: new AbortController() });
    this.every = Math.max(number("every", subject.example?.lens?.every ?? Math.ceil(info.num_layers / MAX_ROWS)), 1);
    this.branches = state.params.get("branches") === "both" ? "both" : "layers";
    this.scale = state.params.get("scale") === "rank" ? "rank" : "probability";
  }

  start() {
    this.position = chosenPosition(this.info);
    const strides = [...new Set([1, 2, 3, 5, this.every])].filter((step) => step === 1 || step < this.info.num_layers).sort((one, other) => one - other);
    this.table = h("div", { class: "scroll lens-table", tabindex: 0, role: "region", "aria-label": "Logit lens" });
    this.detail = h("div", { class: "lens-detail" });
    this.tracks = h("div", {});
    const shades = [0, 0.25, 0.5, 0.75, 1].map((probability) => css(shade(probability))).join(", ");
    this.main.replaceChildren(
      h("section", { class: "panel" },
        h("div", { class: "row spread" }, h("h2", {}, "What each layer would say next"), h("button", { type: "button", class: "quiet", onclick: () => this.save() }, "Save JSON")),
        h("p", { class: "maths" }, h("span", { class: "lit" }, h("i", {}, "p"), h("sub", {}, "ℓ"), " = softmax(norm(", h("i", {}, "x"), h("sub", {}, "ℓ"), ") ", h("i", {}, "W"), "ᵀ)"), h("span", { class: "small muted" }, "  the residual stream after layer ℓ, decoded as if it were the last")),
        h("div", { class: "row" },
          segmented("Stride of layers", strides.map((step) => [step, step === 1 ? "all layers" : `every ${step}`]), this.every, (every) => this.change({ every })),
          segmented("Depths", [["layers", "after layers"], ["both", "also after attention"]], this.branches, (branches) => this.change({ branches })),
        ),
        h("p", { class: "hint" }, "The last layer is always shown: it is the model's own prediction. Choose a cell for its five candidates."),
        h("p", { class: "legend small muted" }, "unsure", h("span", { class: "ramp", style: { background: `linear-gradient(to right, ${shades})` } }), "sure"),
        h("div", { class: "lens-row" }, this.table, this.detail),
      ),
      h("section", { class: "panel" },
        h("div", { class: "row spread" }, h("h2", {}, "Tokens that rank high in any layer"), segmented("Scale", [["probability", "probability"], ["rank", "rank"]], this.scale, (scale) => this.change({ scale }))),
        this.tracks,
      ),
    );
    this.load();
  }

  change(changes) {
    Object.assign(this, changes);
    update(changes);
    if ("scale" in changes && this.trackData) return this.drawTracks();
    if ("branches" in changes && this.data) return this.drawTable();
    this.load();
  }

  choosePosition(place) {
    this.position = place;
    this.load();
  }

  /** The positions in the table: some before the chosen one, and it. */
  get window() {
    const last = Math.min(Math.max(this.position, COLUMNS - 1), this.info.tokens.length - 1);
    const first = Math.max(last - COLUMNS + 1, 0);
    return Array.from({ length: last - first + 1 }, (_, place) => first + place);
  }

  async load() {
    this.controller.abort();
    const { signal } = (this.controller = new AbortController());
    this.table.classList.add("busy");
    try {
      const data = await this.subject.ask("lens", { every: this.every, top: 5, positions: this.window }, signal);
      if (signal.aborted) return;
      this.data = data;
      this.drawTable();
      const trackData = await this.subject.ask("lens-tracks", { position: this.position, count: 8 }, signal);
      if (signal.aborted) return;
      this.trackData = trackData;
      this.drawTracks();
    } catch (error) {
      if (error.name !== "AbortError") this.detail.replaceChildren(h("p", { class: "error" }, error.message));
    }
    this.table.classList.remove("busy");
  }

  drawTable() {
    const { positions, stages, texts } = this.data;
    const rows = stages.filter((stage) => this.branches === "both" || stage.after === "feed_forward").reverse();
    const head = h("tr", {}, h("th", { scope: "col", class: "left" }, "after"), ...positions.map((position) => h("th", { scope: "col", class: position === this.position ? "chosen" : "" }, visible(this.info.tokens[position].text, 12))));
    const body = rows.map((stage) => {
      const name = this.branches === "both" ? `${stage.layer} ${branchName(stage.after)}` : `layer ${stage.layer}`;
      const cells = positions.map((position, place) => {
        const [id, probability] = [stage.ids[place][0], stage.probabilities[place][0]];
        const cell = h("td", { class: position === this.position ? "chosen" : "" }, h("button", { type: "button", class: "lens-cell", "aria-label": `${visible(texts[id])} ${percent(probability)} after ${name}, at ${visible(this.info.tokens[position].text)}`, title: `${visible(texts[id])} ${percent(probability)}`, onclick: () => this.showDetail(stage, place) }, visible(texts[id], 12)));
        paint(cell.firstChild, shade(probability ?? 0));
        return cell;
      });
      return h("tr", {}, h("th", { scope: "row", class: "left" }, name), ...cells);
    });
    const next = h("tr", { class: "next" }, h("th", { scope: "row", class: "left" }, "in the text"), ...positions.map((position) => h("td", {}, this.info.tokens[position + 1] ? visible(this.info.tokens[position + 1].text, 12) : "?")));
    this.table.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...body, next)));
    const place = positions.indexOf(this.position);
    this.showDetail(rows[0], place < 0 ? positions.length - 1 : place);
    this.table.scrollLeft = this.table.scrollWidth;
  }

  showDetail(stage, place) {
    const { positions, texts } = this.data;
    const position = positions[place];
    const bars = stage.ids[place].map((id, rank) => {
      const bar = h("span", { class: "bar", "aria-hidden": "true" });
      bar.style.setProperty("--share", String(stage.probabilities[place][rank] ?? 0));
      return h("li", {}, h("span", { class: "name" }, visible(texts[id], 20)), bar, h("span", { class: "value" }, percent(stage.probabilities[place][rank])));
    });
    const entropy = stage.entropy[place];
    this.detail.replaceChildren(h("p", { class: "small muted" }, `After layer ${stage.layer} ${branchName(stage.after)}, at token ${position} ${visible(this.info.tokens[position].text)}; entropy ${entropy === null ? "–" : entropy.toFixed(2)} nats`), h("ul", { class: "candidates" }, ...bars));
  }

  drawTracks() {
    const { stages, tracks } = this.trackData;
    const byRank = this.scale === "rank";
    const depth = (stage) => stage.layer + (stage.after === "attention" ? 0.5 : 1);
    const series = tracks.map((track) => ({ name: visible(track.text, 20), points: stages.map((stage, place) => [depth(stage), byRank ? -Math.log10(track.ranks[place] + 1) : track.probabilities[place] ?? 0]) }));
    const options = byRank
      ? { title: "Rank (logarithmic; the top is the most likely token)", format: (value) => String(Math.round(10 ** -value)), xLabel: "layers" }
      : { title: "Probability", low: 0, format: (value) => percent(value), xLabel: "layers" };
    const describeX = (x) => (x % 1 ? `after attention of layer ${Math.floor(x)}` : `after layer ${x - 1}`);
    this.tracks.replaceChildren(h("p", { class: "hint" }, `At token ${this.trackData.position} ${visible(this.info.tokens[this.trackData.position].text)}. Half of the lines are the model's final predictions, the others led somewhere on the way.`), lineChart(series, { ...options, describeX, width: this.tracks.clientWidth }));
  }

  save() {
    download("lens.json", JSON.stringify({ lens: this.data, tracks: this.trackData }, null, 1), "application/json");
  }
}
