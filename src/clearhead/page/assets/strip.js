// The text under inspection as a strip of tokens above the views: colored by probability, one of them chosen.

import { inspect } from "./api.js";
import { css, paint, surpriseColor } from "./colors.js";
import { byId, h, percent, visible } from "./dom.js";
import { describeModel } from "./api.js";
import { go, number, state, update } from "./state.js";
import { DEFAULT_TEXT } from "./subject.js";

/** Show the strip; `onChoose` is called when another token is chosen. */
export async function showStrip(subject, info, onChoose) {
  const container = byId("subject");
  const chosen = chosenPosition(info);
  const spans = info.tokens.map((token, place) => tokenSpan(token, place, chosen));
  const list = h("div", { id: "strip", role: "group", "aria-label": "Tokens; choose one with the arrow keys" }, ...spans);
  let marked = chosen;
  function mark(place) {
    if (place === marked) return;
    for (const other of [marked, place]) {
      spans[other].setAttribute("aria-pressed", String(other === place));
      spans[other].tabIndex = other === place ? 0 : -1;
    }
    marked = place;
    keepVisible(list, spans[place]);
  }
  function choose(place) {
    mark(place);
    update({ at: place });
    spans[place].focus();
    onChoose(place);
  }
  list.addEventListener("click", (event) => {
    const place = spans.indexOf(event.target.closest(".piece"));
    if (place >= 0) choose(place);
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(Math.min(Math.max(marked + step, 0), spans.length - 1));
  });
  container.replaceChildren(await textForm(subject), list);
  container.hidden = false;
  keepVisible(list, spans[chosen]);
  const color = () => subject.probabilities.then((values) => paintTokens(spans, info.tokens, values), () => {});
  return { mark, color };
}

/** Color the tokens by their probabilities, which arrive after the text. */
function paintTokens(spans, tokens, probabilities) {
  probabilities?.forEach((value, place) => {
    if (value === null || tokens[place].special) return;
    paint(spans[place], surpriseColor(value));
    spans[place].title += `, probability ${percent(value)}`;
  });
}

export const chosenPosition = (info) => Math.min(Math.max(number("at", info.tokens.length - 1), 0), info.tokens.length - 1);

function tokenSpan(token, place, chosen) {
  return h(
    "span",
    {
      class: token.special ? "piece special" : "piece",
      role: "button",
      tabindex: place === chosen ? 0 : -1,
      "aria-pressed": String(place === chosen),
      title: `${place}: ${visible(token.text)}, id ${token.id}`,
    },
    token.text.replaceAll("\n", "⏎\n"),
  );
}

function keepVisible(list, span) {
  if (!span) return;
  const [outer, inner] = [list.getBoundingClientRect(), span.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) list.scrollTop += inner.top - outer.top - outer.height / 2;
}

async function textForm(subject) {
  const model = await describeModel();
  const crosses = subject.source.length > 0;
  if (model.error) return h("p", { class: "hint" }, "A bundled example. Start a server to inspect your own texts: clearhead serve smollm2");
  const text = h("input", { id: "own-text", "aria-label": "Text to inspect", placeholder: "Type any text to inspect it", value: state.params.get("text") ?? "" });
  const source = model.kind === "encoder-decoder" ? h("input", { "aria-label": "Source of the encoder", placeholder: "Source text", value: state.params.get("source") ?? "" }) : null;
  function submit(event) {
    event.preventDefault();
    if (!text.value.trim()) return;
    go(state.view, { text: text.value, ...(source ? { source: source.value || DEFAULT_TEXT } : {}) });
  }
  const name = subject.example ? `Example: ${subject.example.title}` : crosses ? "Target of the decoder" : null;
  return h("form", { class: "row own-text", onsubmit: submit }, source, text, h("button", {}, "Inspect"), name ? h("span", { class: "muted small" }, name) : null);
}

/** The legend of the colors of tokens. */
export function surpriseLegend() {
  const steps = [1, 0.8, 0.5, 0.2, 0.05, 0];
  const gradient = `linear-gradient(to right, ${steps.map((step) => css(surpriseColor(step))).join(", ")})`;
  return h("span", { class: "legend small muted" }, "certain", h("span", { class: "ramp", style: { background: gradient } }), "surprising");
}

/** The texts of token ids, asked for once each. */
const known = new Map();
export async function textsOf(ids) {
  const missing = [...new Set(ids)].filter((id) => !known.has(id));
  if (missing.length) {
    const { tokens } = await inspect("encode", { tokens: missing });
    for (const token of tokens) known.set(token.id, token.text);
  }
  return ids.map((id) => known.get(id));
}
