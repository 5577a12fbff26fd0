// The guided tour: three bundled examples, each a few steps through the views, with data that need no model.

import { arcDiagram } from "./arcs.js";
import { byId, h } from "./dom.js";
import { go, number, state, update } from "./state.js";

let examples = null;

/** The titles, previews and steps of all examples; their data are loaded when one is opened. */
function loadExamples() {
  examples ??= fetch("/assets/examples.json").then((response) => response.json());
  return examples;
}

/** Cards of the examples, each with the arcs of its main head. */
export function exampleCards() {
  const cards = h("div", { class: "cards" });
  loadExamples().then((list) => cards.replaceChildren(...list.map(card)));
  return h("section", { "aria-label": "Guided tour" }, h("h2", {}, "Or look inside first"), cards);
}

function card(example) {
  const { texts, weights, query } = example.preview;
  return h("button", { type: "button", class: "card", onclick: () => openStep(example, 0) }, arcDiagram(texts, weights, query, { width: 330, height: 128 }), h("strong", {}, example.title), h("span", { class: "small muted" }, example.teaser));
}

function openStep(example, place) {
  const step = example.steps[place];
  go(step.view, { example: example.name, tour: place, ...step.params });
}

/** Show the step of the tour that the address names, beside the view. */
export async function showCoach() {
  const coach = byId("coach");
  const name = state.params.get("example");
  if (name === null || !state.params.has("tour")) return void (coach.hidden = true);
  const example = (await loadExamples()).find((one) => one.name === name);
  const place = number("tour", 0);
  const step = example?.steps[place];
  if (!step || state.params.get("example") !== name) return void (coach.hidden = true);
  const close = () => {
    update({ tour: null });
    coach.hidden = true;
    byId("main").focus();
  };
  const here = step.view === state.view;
  const buttons = [
    place > 0 ? h("button", { type: "button", onclick: () => openStep(example, place - 1) }, "Back") : null,
    here ? null : h("button", { type: "button", onclick: () => openStep(example, place) }, `Go to ${step.view}`),
    place + 1 < example.steps.length ? h("button", { type: "button", class: "primary", onclick: () => openStep(example, place + 1) }, "Next") : h("button", { type: "button", class: "primary", onclick: () => go("chat", {}) }, "Done"),
    h("button", { type: "button", class: "quiet", onclick: close }, "Close"),
  ];
  coach.replaceChildren(h("p", { class: "small muted" }, `${example.title} · ${place + 1} of ${example.steps.length}`), h("p", {}, step.text), h("div", { class: "row" }, ...buttons));
  coach.hidden = false;
}

