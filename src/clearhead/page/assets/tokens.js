// Tokens: how the text was cut, with the id, the bytes and the probability of each piece.

import { paint, ramp, surpriseColor } from "./colors.js";
import { download, h, percent, visible } from "./dom.js";
import { surpriseLegend } from "./strip.js";

const TABLE_ROWS = 1024;

export async function show(main, subject, info) {
  const probabilities = await subject.probabilities;
  const characters = [...info.tokens.map((token) => token.text).join("")].length;
  const numBytes = info.tokens.reduce((sum, token) => sum + (token.bytes ? token.bytes.split(" ").length : 0), 0);
  const facts = `${info.tokens.length} tokens for ${characters} characters and ${numBytes} bytes: ${(numBytes / info.tokens.length).toFixed(2)} bytes per token.`;
  const rows = info.tokens.slice(0, TABLE_ROWS).map((token, place) => tableRow(token, place, probabilities?.[place]));
  const table = h("table", { id: "token-table" }, h("thead", {}, h("tr", {}, ...["#", "token", "id", "probability", "bytes (UTF-8)"].map((name, place) => h("th", { scope: "col", class: place === 1 || place === 4 ? "left" : "" }, name)))), h("tbody", {}, ...rows));
  const source = info.source.length ? [h("section", { class: "panel" }, h("h2", {}, "Source of the encoder"), cutText(info.source))] : [];
  main.replaceChildren(
    h("section", { class: "panel" }, h("div", { class: "row spread" }, h("h2", {}, "How the text was cut"), exports(info, probabilities)), h("p", {}, facts), cutText(info.tokens), h("p", { class: "hint" }, "Colors only separate neighbors. Special tokens, which the tokenizer or the template added, are outlined.")),
    ...source,
    h("section", { class: "panel" }, h("div", { class: "row spread" }, h("h2", {}, "Every token"), surpriseLegend()), h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Table of tokens" }, table)),
  );
  const mark = (place) => {
    for (const row of table.tBodies[0].rows) row.classList.toggle("chosen", Number(row.dataset.place) === place);
    table.tBodies[0].rows[place]?.scrollIntoView({ block: "nearest" });
  };
  return { choose: mark };
}

function cutText(tokens) {
  const pieces = tokens.map((token, place) => {
    const piece = h("span", { class: token.special ? "cut special" : "cut", title: `id ${token.id}` }, h("span", {}, token.text.replaceAll("\n", "⏎\n")), h("small", {}, String(token.id)));
    if (!token.special) paint(piece, ramp([0.1, 0.3, 0.2][place % 3]));
    return piece;
  });
  return h("div", { class: "cut-text", tabindex: 0, role: "region", "aria-label": "Text in tokens" }, ...pieces);
}

function tableRow(token, place, probability) {
  const value = h("td", {}, percent(probability));
  if (probability !== null && probability !== undefined) paint(value, surpriseColor(probability));
  return h("tr", { "data-place": place }, h("td", {}, String(place)), h("td", { class: "left" }, h("span", { class: "token" }, visible(token.text))), h("td", {}, String(token.id)), value, h("td", { class: "left mono" }, token.bytes));
}

function exports(info, probabilities) {
  const csv = () => ["position,id,text,bytes,probability", ...info.tokens.map((token, place) => [place, token.id, `"${token.text.replaceAll('"', '""')}"`, token.bytes, probabilities?.[place] ?? ""].join(","))].join("\n");
  return h("button", { type: "button", onclick: () => download("tokens.csv", csv(), "text/csv") }, "Save CSV");
}
