// Patching: run another text with the residual stream of this one at one layer and token, and see what carries the answer.

import { inspect } from "./api.js";
import { css, signColor, textOn } from "./colors.js";
import { chip, h, signed, visible } from "./dom.js";
import { state, update } from "./state.js";

export function showPatching(panel, subject, info, target, controller) {
  const input = h("input", { id: "other-text", "aria-label": "Another text of the same length", placeholder: "The same text with one word changed", value: state.params.get("other") ?? subject.example?.other ?? "" });
  const out = h("div", {});
  const run = async (event) => {
    event?.preventDefault();
    update({ other: input.value || null });
    try {
      await patchAll(out, subject, info, input.value, target(), controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") out.replaceChildren(h("p", { class: "error" }, error.message));
    }
  };
  panel.replaceChildren(
    h("h2", {}, "Patch between two texts"),
    h("p", { class: "hint" }, "The model reads the other text, but at one layer and one token it gets the residual stream of the text above. Where the answer comes back, that place carried it."),
    h("form", { class: "row own-text", onsubmit: run }, input, h("button", {}, "Patch")),
    out,
  );
  if (input.value && (state.params.has("other") || subject.example)) run();
}

async function otherTokens(subject, text) {
  if (subject.example && text === subject.example.other) return subject.example.otherTokens;
  return (await inspect("encode", { text })).tokens;
}

async function patchAll(out, subject, info, text, { token, text: tokenText, position }, signal) {
  if (!text) return;
  const other = await otherTokens(subject, text);
  if (other.length !== info.tokens.length) throw new Error(`The other text has ${other.length} tokens and this one ${info.tokens.length}; patching needs equal lengths.`);
  const ids = other.map((one) => one.id);
  const head = h("tr", {}, h("th", { scope: "col" }, "layer"), ...other.map((one, place) => h("th", { scope: "col", class: one.id === info.tokens[place].id ? "upright" : "upright differs" }, h("span", {}, visible(one.text, 14)))));
  const body = h("tbody", {});
  const note = h("p", { class: "hint" });
  out.replaceChildren(h("p", {}, "Gain in the log-probability of ", chip(tokenText), ", in nats; changed tokens are marked."), note, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Gains by layer and token" }, h("table", { class: "parts patch" }, h("thead", {}, head), body)));
  const rows = [];
  for (let layer = 0; layer < info.num_layers; layer++) {
    if (signal.aborted) return;
    note.textContent = `Layer ${layer + 1} of ${info.num_layers} …`;
    const { gains } = await subject.ask("patch-row", { corrupted: ids, token, layer, position }, signal);
    rows.push(gains);
    const largest = Math.max(...rows.flat().map((gain) => Math.abs(gain ?? 0)), 0.5);
    body.replaceChildren(...rows.map((values, place) => row(values, place, largest)).reverse());
  }
  note.textContent = "Blue: the patch brings the answer back. Rows are layers, the last on top.";
}

function row(gains, layer, largest) {
  const cells = gains.map((gain) => {
    const color = signColor((gain ?? 0) / largest);
    const cell = h("td", { title: `${signed(gain, 3)} nats` }, Math.abs(gain ?? 0) >= largest * 0.2 ? signed(gain, 1) : "");
    cell.style.setProperty("background-color", css(color));
    cell.style.setProperty("color", textOn(color));
    return cell;
  });
  return h("tr", {}, h("th", { scope: "row" }, String(layer)), ...cells);
}
