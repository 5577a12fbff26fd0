// Build elements. Data becomes attributes and text nodes only; nothing on this page parses data as markup.

/** Create an element: h("p", {class: "muted", onclick: f}, "text", child). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
}

export const byId = (id) => document.getElementById(id);

const SYMBOLS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** A token's text as one line in which nothing is invisible. */
export function visible(text, longest = 40) {
  let shown = "";
  for (const character of text)
    shown += SYMBOLS[character] ?? (/[\p{C}\p{Z}]/u.test(character) ? escapeOf(character) : character);
  if (shown === "") return "∅";
  return [...shown].length > longest ? `${[...shown].slice(0, longest - 1).join("")}…` : shown;
}

const escapeOf = (character) => `\\u{${character.codePointAt(0).toString(16)}}`;

/** A token in the middle of prose: a chip with its text. */
export const chip = (text) => h("span", { class: "token" }, visible(text));

export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 0.9995 && value < 1) return ">99.9%";
  if (value >= 0.0995) return `${(value * 100).toFixed(1)}%`;
  return value >= 0.0001 ? `${(value * 100).toFixed(2)}%` : value > 0 ? "<0.01%" : "0%";
}

const UNITS = ["", "k", "M", "G", "T", "P", "E"];

/** A number with an SI prefix: 1.35 G. */
export function amount(value, unit = "") {
  if (value === null || value === undefined) return "–";
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < UNITS.length - 1) {
    value /= 1000;
    power += 1;
  }
  const digits = power === 0 && Number.isInteger(value) ? 0 : Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[power]}${unit}`.trim();
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${Math.round(seconds / 60)} min`;
}

/** A signed number: +1.25, −0.40. */
export const signed = (value, digits = 2) =>
  value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

/** Tell people who listen to the page what has changed. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Download data as a file. */
export function download(name, content, type) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Buttons of which one is chosen; the arrow keys move the choice. */
export function segmented(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", role: "radio", "aria-checked": String(value === chosen), tabindex: value === chosen ? 0 : -1, onclick: () => choose(value) }, text),
  );
  function choose(value) {
    options.forEach(([other], place) => {
      buttons[place].setAttribute("aria-checked", String(other === value));
      buttons[place].tabIndex = other === value ? 0 : -1;
    });
    onChoose(value);
  }
  function move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const place = (buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length;
    buttons[place].focus();
    choose(options[place][0]);
  }
  return h("div", { class: "segmented", role: "radiogroup", "aria-label": label, onkeydown: move }, ...buttons);
}
