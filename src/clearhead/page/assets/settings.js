// How answers are sampled, the system prompt, and the prompt as the template made it.

import { h } from "./dom.js";
import { promptOf } from "./generation.js";
import { paint, ramp } from "./colors.js";

const STORE = "clearhead-settings";
const DEFAULTS = { system: "", temperature: 0.7, topP: 0.95, maxTokens: 256, seed: null };

export const settings = { ...DEFAULTS, ...read() };

function read() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function change(name, value) {
  settings[name] = value;
  localStorage.setItem(STORE, JSON.stringify(settings));
}

function slider(name, label, { min, max, step, explain }) {
  const shown = h("output", { class: "mono small" }, String(settings[name]));
  const input = h("input", { type: "range", id: `set-${name}`, min, max, step, value: settings[name], oninput: () => {
    change(name, Number(input.value));
    shown.textContent = input.value;
  } });
  return h("div", { class: "setting" }, h("div", { class: "row spread" }, h("label", { for: `set-${name}` }, label), shown), input, h("p", { class: "hint" }, explain));
}

/** The panel beside the chat. `asked` gives what the next answer would be asked. */
export function settingsPanel(conversation, clear, asked) {
  const system = h("textarea", { id: "system", rows: 3, value: settings.system, placeholder: "None: the template may have its own", oninput: () => change("system", system.value) });
  const seed = h("input", { id: "seed", inputmode: "numeric", value: settings.seed ?? "", placeholder: "random", oninput: () => change("seed", /^\d+$/.test(seed.value.trim()) ? Number(seed.value) : null) });
  const raw = h("div", { class: "raw" });
  const details = h("details", { ontoggle: () => details.open && showPrompt(raw, conversation, asked) }, h("summary", {}, "The prompt as the model reads it"), raw);
  return h(
    "aside",
    { class: "panel settings", "aria-label": "Settings of the chat" },
    h("details", { open: matchMedia("(min-width: 60rem)").matches },
      h("summary", {}, h("strong", {}, "Settings")),
      h("div", { class: "setting" }, h("label", { for: "system" }, "System prompt"), system),
      slider("temperature", "Temperature τ", { min: 0, max: 2, step: 0.05, explain: "p = softmax(z / τ): 0 takes the most likely token." }),
      slider("topP", "Top-p", { min: 0.05, max: 1, step: 0.05, explain: "Only the likeliest tokens that reach this total." }),
      slider("maxTokens", "New tokens at most", { min: 16, max: 1024, step: 16, explain: "The answer ends here at the latest." }),
      h("div", { class: "setting row spread" }, h("label", { for: "seed" }, "Seed"), seed),
    ),
    details,
    h("p", {}, h("button", { type: "button", onclick: clear }, "New chat")),
  );
}

async function showPrompt(raw, conversation, asked) {
  try {
    const question = await asked(conversation.length);
    if (question.messages && !question.messages.some((one) => one.role === "user")) question.messages.push({ role: "user", content: "(your message)" });
    if (!question.messages && !question.text) return raw.replaceChildren(h("p", { class: "hint" }, "Send a message first."));
    const { tokens } = await promptOf(question);
    const spans = tokens.map((token, place) => {
      const span = h("span", { class: token.special ? "special" : "", title: `id ${token.id}` }, token.text);
      if (!token.special) paint(span, ramp(place % 2 ? 0.05 : 0.16));
      return span;
    });
    raw.replaceChildren(h("p", { class: "hint" }, `${tokens.length} tokens; special ones are outlined.`), h("pre", {}, ...spans));
  } catch (error) {
    raw.replaceChildren(h("p", { class: "error" }, error.message));
  }
}
