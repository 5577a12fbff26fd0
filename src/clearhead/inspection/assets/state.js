"use strict";
// The data of the page, the current selection, and small helpers. page.py concatenates these files.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (name) => document.getElementById(name);
const state = { view: 0, layer: 0, head: 0, step: "weights", row: 0, column: 0, mode: "top" };

const currentView = () => data.views[state.view];
const currentLayer = () => currentView().layers[state.layer];
const numKeys = () => currentView().columns.length;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** A weight with the digits that its rounding leaves; only a masked weight is exactly 0. */
function formatWeight(weight, isMasked = false) {
  if (isMasked) return "0";
  if (weight < 0.0005) return "<0.001";
  return weight === 1 ? "1" : weight.toFixed(weight < 0.0995 ? 3 : 2);
}

/** A score with the digits that its rounding leaves: `step` is the difference between two neighboring levels. */
function formatScore(score, step) {
  if (score === -Infinity) return "−∞";
  const decimals = step > 0 ? clamp(Math.round(-Math.log10(step)), 0, 4) : 2;
  return score.toFixed(decimals).replace("-", "−");
}

function formatPercent(share) {
  return share > 0 && share < 0.005 ? "<1 %" : `${Math.round(100 * share)} %`;
}

function createElement(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Fill a fieldset with radio buttons; hide it if there are fewer than two options. */
function addRadioButtons(fieldset, name, options, onSelect) {
  for (const [value, text] of Object.entries(options)) {
    const input = createElement("input", null, { type: "radio", name, value });
    input.addEventListener("change", () => onSelect(value));
    const label = createElement("label", null);
    label.append(input, text);
    fieldset.append(label);
  }
  fieldset.hidden = Object.keys(options).length < 2;
}

function checkRadioButton(name, value) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.checked = input.value === String(value);
}
