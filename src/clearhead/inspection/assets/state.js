"use strict";
// What the page holds, what is chosen, and the numbers behind it. These files are joined in the order of page.py.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (name) => document.getElementById(name);
const state = { view: 0, layer: 0, head: 0, step: "weights", row: 0, column: 0, mode: "top" };

const decoded = new Map();
const TYPES = { float32: Float32Array, int32: Int32Array, uint8: Uint8Array };

function numbers(reference) {
  if (!decoded.has(reference.array)) {
    const text = atob(byId(`array-${reference.array}`).textContent);
    const bytes = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
    decoded.set(reference.array, new TYPES[reference.type](bytes.buffer));
  }
  return decoded.get(reference.array);
}

const view = () => data.views[state.view];
const layer = () => view().layers[state.layer];
const numKeys = () => view().columns.length;

/** The matrices of the chosen head, or null where the page holds its thumbnail alone. */
function head() {
  const { scores, weights } = layer().heads[state.head];
  if (!weights) return null;
  const mask = layer().allowed;
  return { scores: scores && numbers(scores), weights: numbers(weights), allowed: mask && numbers(mask) };
}

function shown(value) {
  if (value === -Infinity) return "−∞";
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 ? value.toExponential(5) : value.toPrecision(6);
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function choices(fieldset, name, options, choose) {
  for (const [value, text] of Object.entries(options)) {
    const input = element("input", null, { type: "radio", name, value });
    input.addEventListener("change", () => choose(value));
    const label = element("label", null);
    label.append(input, text);
    fieldset.append(label);
  }
  fieldset.hidden = Object.keys(options).length < 2;
}

const check = (name, value) => {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.checked = input.value === String(value);
};
