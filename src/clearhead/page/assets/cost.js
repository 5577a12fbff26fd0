// Cost: the account of this very request, predicted beside measured.

import { describeModel, inspect } from "./api.js";
import { amount, duration, h } from "./dom.js";
import { number, state, unpackIds } from "./state.js";
import { paint, ramp } from "./colors.js";

const DEFAULTS = [64, 128]; // tokens, where no answer was opened

export async function show(main) {
  const model = await describeModel();
  if (model.error) throw new Error(model.error);
  const [tokens, source] = [unpackIds(state.params.get("ids")).length, unpackIds(state.params.get("from")).length];
  const prompt = number("prompt", tokens || DEFAULTS[0]);
  const fresh = tokens ? Math.max(tokens - (source ? 1 : prompt), 0) : DEFAULTS[1];
  const data = await inspect("cost", { num_prompt_tokens: Math.max(prompt, 1), num_new_tokens: fresh });
  const measured = { first: Number(state.params.get("first")) || null, rate: Number(state.params.get("rate")) || null };
  const total = (key) => data.prefill[key] + (data.decode?.[key] ?? 0);
  const cards = [
    fact("Work", amount(total("flops"), "FLOP"), `${amount(total("flops") / (prompt + fresh), "FLOP")} per token`),
    fact("Moved", amount(total("bytes"), "B"), `${(total("flops") / total("bytes")).toFixed(1)} FLOPs per byte`),
    fact("KV cache", amount(data.cache_bytes, "B"), `${amount(data.cache_bytes_per_token, "B")} per token`),
    fact("Weights", amount(data.parameters), `${data.dtype}, ${amount(data.active_parameters)} active`),
    fact("Peak memory", amount(Math.max(data.prefill.peak_memory, data.decode?.peak_memory ?? 0), "B"), "weights, cache and activations"),
  ];
  main.replaceChildren(
    h("section", { class: "panel" }, h("h2", {}, tokens ? "What this request cost" : "What a request costs"), h("p", {}, `${prompt} tokens read, ${fresh} written${tokens ? "" : " (open an answer of the chat here to see its own account)"}.`), h("div", { class: "facts" }, ...cards)),
    h("section", { class: "panel" }, h("h2", {}, "Predicted and measured"), timeTable(data, measured, fresh), data.note ? noPrediction(data.note) : null, h("p", { class: "hint" }, "At least: if every operation ran at the measured peak rate that limits it. Measured: by this browser, over HTTP; a prompt that was cached is faster.")),
    h("section", { class: "panel" }, h("h2", {}, "Where the work goes"), h("div", { class: "operations" }, ...["prefill", "decode"].filter((phase) => data[phase]).map((phase) => operations(phase, data[phase])))),
  );
}

const fact = (name, value, note) => h("div", { class: "fact" }, h("span", { class: "small muted" }, name), h("strong", {}, value), h("span", { class: "small muted" }, note));

/** Why nothing is predicted; the command at the end of the sentence stays on one line. */
function noPrediction(note) {
  const [reason, command] = note.split(/(?<=run: )/);
  return h("p", { class: "hint" }, `No prediction: ${reason}`, command ? h("code", {}, command) : null);
}

function timeTable(data, measured, fresh) {
  const rows = [["reading the prompt", data.prefill, measured.first]];
  if (data.decode) rows.push([`writing ${fresh} tokens`, data.decode, measured.rate ? fresh / measured.rate : null]);
  const line = ([name, part, seconds]) => {
    const share = seconds && part.seconds_at_least ? `${((100 * part.seconds_at_least) / seconds).toFixed(0)}%` : "–";
    return h("tr", {}, h("td", {}, name), h("td", {}, duration(part.seconds_at_least)), h("td", {}, duration(part.seconds_predicted)), h("td", {}, duration(seconds)), h("td", {}, share));
  };
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Times" }, h("table", {}, h("thead", {}, h("tr", {}, ...["phase", "at least", "predicted", "measured", "share of the limit"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows.map(line))));
}

const operationName = ({ stack, name }) => (stack === "decoder" ? name : stack === name ? `vocabulary ${name}` : `${stack} ${name}`);

function operations(phase, part) {
  const hasLimits = part.operations.some((one) => one.limited_by); // known after a calibration
  const rows = part.operations.map((one) => {
    const share = one.flops / (part.flops || 1);
    const cell = h("td", {}, `${(100 * share).toFixed(1)}%`);
    paint(cell, ramp(0.08 + 0.8 * share));
    const limit = hasLimits ? h("td", {}, one.limited_by ?? "–") : null;
    return h("tr", {}, h("td", {}, operationName(one)), cell, h("td", {}, amount(one.flops, "FLOP")), h("td", {}, amount(one.bytes, "B")), limit, h("td", { class: "left mono" }, one.formula));
  });
  const title = phase === "prefill" ? "Reading the prompt" : "Writing the answer, with the cache";
  const names = ["operation", "share", "FLOPs", "bytes", ...(hasLimits ? ["limited by"] : []), "FLOPs per layer"];
  const heads = names.map((name) => h("th", { scope: "col", class: name === "FLOPs per layer" ? "left" : "" }, name));
  return h("div", {}, h("h3", {}, title), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows))));
}
