"use strict";
// The data of the page, the current selection, and access to the embedded arrays. page.py concatenates these files.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (name) => document.getElementById(name);
const state = { view: 0, layer: 0, head: 0, step: "weights", row: 0, column: 0, mode: "top" };

const decodedArrays = new Map();
const ARRAY_TYPES = { float32: Float32Array, int32: Int32Array, uint8: Uint8Array };

/** The numbers of an embedded array, decoded on first use. */
function arrayOf(reference) {
  if (!decodedArrays.has(reference.array)) {
    const text = atob(byId(`array-${reference.array}`).textContent);
    const bytes = new Uint8Array(text.length);
    for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
    decodedArrays.set(reference.array, new ARRAY_TYPES[reference.type](bytes.buffer));
  }
  return decodedArrays.get(reference.array);
}

const currentView = () => data.views[state.view];
const currentLayer = () => currentView().layers[state.layer];
const numKeys = () => currentView().columns.length;

/** The matrices of the selected head, or null if the page has only its thumbnail. */
function currentMatrices() {
  const { scores, weights } = currentLayer().heads[state.head];
  if (!weights) return null;
  const mask = currentLayer().allowed;
  return { scores: scores && arrayOf(scores), weights: arrayOf(weights), allowed: mask && arrayOf(mask) };
}

function formatNumber(value) {
  if (value === -Infinity) return "−∞";
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(3);
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
