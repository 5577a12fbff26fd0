// Circuits: which parts of the network make a logit, what happens without some of them, and patching between two texts.

import { inspect } from "./api.js";
import { css, paint, signColor, textOn } from "./colors.js";
import { announce, chip, h, percent, signed, visible } from "./dom.js";
import { showPatching } from "./patching.js";
import { state, update } from "./state.js";
import { chosenPosition, textsOf } from "./strip.js";

export async function show(main, subject, info) {
  if (!info.next.length) {
    main.replaceChildren(h("p", { class: "panel" }, "This model predicts no next token, so there is no logit to take apart."));
    return {};
  }
  const view = new CircuitPage(main, subject, info);
  await view.start();
  return { choose: (place) => view.choosePosition(place), close: () => view.controller.abort() };
}

class CircuitPage {
  constructor(main, subject, info) {
    Object.assign(this, { main, subject, info, controller: new AbortController(), off: readParts(), position: chosenPosition(info) });
  }

  async start() {
    this.prediction = h("ul", { class: "candidates" });
    this.grid = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Contributions of heads and feed-forward layers" });
    this.sum = h("p", { class: "hint" });
    this.effect = h("div", { class: "effect" });
    this.patching = h("section", { class: "panel" });
    this.main.replaceChildren(
      h("div", { class: "circuit" },
        h("section", { class: "panel" }, h("h2", {}, "The next token"), h("p", { class: "hint" }, "Choose the token to explain."), this.prediction, h("h3", {}, "Switched off"), this.effect),
        h("section", { class: "panel who-wrote" }, h("h2", {}, "Who wrote this logit"), h("p", { class: "maths" }, h("span", { class: "lit" }, h("i", {}, "z"), " = Σ ", h("i", {}, "w"), " · norm(", h("i", {}, "x"), "₀ + Σ heads + Σ feed-forward)"), h("span", { class: "small muted" }, "  direct logit attribution")), this.sum, this.grid, h("p", { class: "hint" }, "Blue raises the logit, orange lowers it. Choose a cell to switch that part off and see the effect on the next token.")),
        this.patching,
      ),
    );
    await this.load();
    showPatching(this.patching, this.subject, this.info, () => ({ token: this.token, text: this.tokenText, position: this.position }), this.controller);
  }

  async choosePosition(place) {
    this.position = place;
    this.token = undefined;
    update({ token: null });
    await this.load();
  }

  /** What the model predicts at the position; the last position's is known already. */
  async candidates() {
    if (this.position === this.info.tokens.length - 1) return this.info.next;
    const effect = await this.subject.ask("ablation", { token: 0, position: this.position, parts: [] }, this.controller.signal);
    return effect.before;
  }

  async load() {
    try {
      const candidates = await this.candidates();
      const asked = state.params.get("token");
      this.token = asked === null ? candidates[0].id : Number(asked);
      const found = candidates.find((one) => one.id === this.token);
      this.tokenText = found ? found.text : (await textsOf([this.token]))[0];
      this.prediction.replaceChildren(...candidates.slice(0, 6).map((one) => this.candidate(one)), this.otherToken());
      await Promise.all([this.loadAttribution(), this.loadEffect()]);
    } catch (error) {
      if (error.name !== "AbortError") this.sum.textContent = error.message;
    }
  }

  candidate(one) {
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", String(one.probability ?? 0));
    return h("li", {}, h("button", { type: "button", class: "candidate", "aria-pressed": String(one.id === this.token), onclick: () => this.chooseToken(one.id) }, h("span", { class: "name" }, visible(one.text, 20)), " ", bar, h("span", { class: "value" }, percent(one.probability))));
  }

  otherToken() {
    const input = h("input", { "aria-label": "Another token", placeholder: "another token", size: 14 });
    async function encode() {
      const { tokens } = await inspect("encode", { text: input.value });
      return tokens.filter((one) => !one.special).at(-1)?.id;
    }
    const choose = async (event) => {
      event.preventDefault();
      const id = input.value && (await encode().catch(() => undefined));
      if (id !== undefined && id !== "") this.chooseToken(id);
    };
    return h("li", {}, h("form", { class: "row", onsubmit: choose }, input, h("button", {}, "Explain")));
  }

  chooseToken(id) {
    update({ token: id });
    this.load();
  }

  async loadAttribution() {
    this.grid.classList.add("busy");
    try {
      const answer = await this.subject.ask("attribution", { token: this.token, position: this.position }, this.controller.signal);
      this.drawGrid(answer.contributions);
      this.drawSum(answer);
    } catch (error) {
      if (error.name !== "AbortError") this.drawGrid(this.partsWithoutValues());
      if (error.name !== "AbortError") this.sum.textContent = `No numbers: ${error.message}. The parts can still be switched off.`;
    }
    this.grid.classList.remove("busy");
  }

  /** All parts, for a model whose logits are no sum over them. */
  partsWithoutValues() {
    return this.info.views[0].num_heads.flatMap((count, layer) => [
      ...Array.from({ length: count }, (_, head) => ({ part: "attention", layer, head, logit: null })),
      { part: "feed_forward", layer, head: null, logit: null },
    ]);
  }

  drawGrid(contributions) {
    const largest = Math.max(...contributions.map((one) => Math.abs(one.logit ?? 0)), 1e-9);
    const layers = Math.max(...contributions.map((one) => one.layer ?? -1)) + 1;
    const numHeads = Math.max(...contributions.map((one) => one.head ?? -1)) + 1;
    const parts = new Map(contributions.map((one) => [`${one.part} ${one.layer} ${one.head}`, one.logit]));
    const cell = (layer, part, head) => {
      const value = parts.get(`${part} ${layer} ${head}`);
      if (value === undefined) return h("td", {});
      const off = this.off.has(partKey(layer, part, head));
      const name = head === null ? `feed-forward ${layer}` : `layer ${layer} head ${head}`;
      const button = h("button", { type: "button", class: off ? "part off" : "part", "aria-pressed": String(off), "aria-label": off ? `× ${name} is switched off` : `${name}: ${signed(value, 1)}`, title: `${name}: ${signed(value, 3)}`, onclick: () => this.toggle(layer, part, head) }, off ? "×" : Math.abs(value) >= largest * 0.12 ? signed(value, 1) : "");
      const color = signColor(value / largest);
      button.style.setProperty("background-color", css(color));
      button.style.setProperty("color", textOn(color));
      return h("td", {}, button);
    };
    const head = h("tr", {}, h("th", { scope: "col" }, "layer"), ...Array.from({ length: numHeads }, (_, place) => h("th", { scope: "col" }, `H${place}`)), h("th", { scope: "col" }, "FF"));
    const rows = Array.from({ length: layers }, (_, place) => layers - 1 - place).map((layer) => h("tr", {}, h("th", { scope: "row" }, String(layer)), ...Array.from({ length: numHeads }, (_, place) => cell(layer, "attention", place)), cell(layer, "feed_forward", null)));
    this.grid.replaceChildren(h("table", { class: "parts" }, h("thead", {}, head), h("tbody", {}, ...rows)));
  }

  drawSum({ contributions, logit }) {
    const top = [...contributions].filter((one) => one.layer !== null).sort((one, other) => Math.abs(other.logit) - Math.abs(one.logit)).slice(0, 3);
    const names = top.map((one) => `${one.head === null ? (one.part === "feed_forward" ? "feed-forward" : one.part) : `head ${one.head}`} of layer ${one.layer} (${signed(one.logit)})`);
    this.sum.replaceChildren("The logit of ", chip(this.tokenText), ` is ${signed(logit)}; the largest parts: ${names.join(", ")}.`);
  }

  toggle(layer, part, head) {
    const key = partKey(layer, part, head);
    if (!this.off.delete(key)) this.off.add(key);
    update({ off: [...this.off].join("_") || null });
    this.loadAttribution();
    this.loadEffect();
  }

  async loadEffect() {
    if (!this.off.size) return this.effect.replaceChildren(h("p", { class: "hint" }, "Nothing yet. Choose cells in the table."));
    const parts = [...this.off].map(parsePart);
    const names = parts.map((one) => (one.head === undefined ? `feed-forward ${one.layer}` : `L${one.layer} H${one.head}`));
    this.effect.classList.add("busy");
    try {
      const effect = await this.subject.ask("ablation", { token: this.token, position: this.position, parts }, this.controller.signal);
      this.drawEffect(effect, names);
    } catch (error) {
      if (error.name !== "AbortError") this.effect.replaceChildren(h("p", { class: "error" }, error.message));
    }
    this.effect.classList.remove("busy");
  }

  drawEffect(effect, names) {
    const before = new Map(effect.before.map((one) => [one.id, one.probability]));
    const rows = effect.after.slice(0, 6).map((one) => h("tr", {}, h("td", { class: "left" }, chip(one.text)), h("td", {}, before.has(one.id) ? percent(before.get(one.id)) : "rare"), h("td", {}, percent(one.probability))));
    const gain = h("strong", {}, `${signed(effect.gain)} nats`);
    paint(gain, signColor(Math.max(Math.min(effect.gain / 4, 1), -1)));
    gain.classList.add("gain");
    const all = h("button", { type: "button", onclick: () => (this.off.clear(), update({ off: null }), this.load()) }, "Switch all on");
    this.effect.replaceChildren(h("p", {}, `Without ${names.join(", ")}: `, chip(this.tokenText), " changes by ", gain, `; the distribution moves by ${effect.divergence === null ? "–" : effect.divergence.toFixed(3)} nats (KL).`), h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "left", scope: "col" }, "token"), h("th", { scope: "col" }, "before"), h("th", { scope: "col" }, "after"))), h("tbody", {}, ...rows)), h("p", {}, all));
    announce(`Log-probability changes by ${signed(effect.gain)}`);
  }
}

const partKey = (layer, part, head) => (head === null ? `${layer}f` : `${layer}h${head}`);

function parsePart(key) {
  const [, layer, head] = key.match(/^(\d+)(?:h(\d+)|f)$/);
  return head === undefined ? { layer: Number(layer), part: "feed_forward" } : { layer: Number(layer), part: "attention", head: Number(head) };
}

const readParts = () => new Set((state.params.get("off") ?? "").split("_").filter((key) => /^\d+(h\d+|f)$/.test(key)));
