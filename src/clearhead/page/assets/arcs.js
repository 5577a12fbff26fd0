// Attention between words: arcs above a line of text, and lines between two columns of words.

import { h, svg, visible } from "./dom.js";

const ROW = 22; // pixels
const CHARACTER = 8; // pixels
const MAX_WORDS = 60;
const MIN_WEIGHT = 0.02;
const MIN_NAMED = 0.1; // of the weights of a small picture: the words of smaller ones are dots

/** Arcs from the token at `query` to the tokens that it attends to; `weights` are those of its row. */
export function arcDiagram(texts, weights, query, { width = 640, height = 150 } = {}) {
  const named = texts.map((_, place) => place === query || weights[place] >= MIN_NAMED);
  const sizes = texts.map((text, place) => (named[place] ? [...text.trim()].length * 9.6 + 16 : 17));
  const total = sizes.reduce((sum, size) => sum + size, 0);
  const scale = Math.min(1, width / total);
  let left = (width - total * scale) / 2;
  const centers = sizes.map((size) => {
    left += size * scale;
    return left - (size * scale) / 2;
  });
  const base = height - 26;
  const largest = Math.max(...weights.filter((_, place) => place !== query), 0.001);
  const arcs = weights.map((weight, place) => {
    if (place === query || weight < MIN_WEIGHT) return null;
    const distance = Math.abs(centers[query] - centers[place]);
    const rise = Math.min(18 + distance * 0.42, base - 6);
    const path = `M ${centers[place]} ${base} C ${centers[place]} ${base - rise * 1.3}, ${centers[query]} ${base - rise * 1.3}, ${centers[query]} ${base}`;
    return svg("path", { d: path, class: "arc", "stroke-width": (1 + 6 * (weight / largest)).toFixed(2), opacity: (0.15 + 0.85 * (weight / largest)).toFixed(3) });
  });
  const words = texts.map((text, place) => svg("text", { x: centers[place], y: height - 8, "text-anchor": "middle", "font-size": (16 * scale).toFixed(1), class: place === query ? "word query" : named[place] ? "word" : "word faint" }, named[place] ? text.trim() : "·"));
  return svg("svg", { class: "arcs", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Attention of ${visible(texts[query])}` }, ...arcs.filter(Boolean), ...words);
}

/** Lines from queries on the left to keys on the right, as strong as the weights; those of one query stand out. */
export function wordLines(rows, columns, weights, selected, onChoose, width = 420) {
  const first = Math.max(Math.min(selected - Math.floor(MAX_WORDS / 2), rows.length - MAX_WORDS), 0);
  const shownRows = rows.slice(first, first + MAX_WORDS);
  const firstColumn = rows.length === columns.length ? first : 0;
  const shownColumns = columns.slice(firstColumn, firstColumn + MAX_WORDS);
  const height = Math.max(shownRows.length, shownColumns.length) * ROW + 8;
  const [left, right] = [Math.round(0.38 * width), Math.round(0.62 * width)];
  const longest = Math.max(Math.floor(left / CHARACTER), 4);
  const y = (place) => place * ROW + ROW / 2 + 4;
  const lines = [];
  shownRows.forEach((_, row) =>
    shownColumns.forEach((_, column) => {
      const weight = weights[(first + row) * columns.length + firstColumn + column];
      if (!(weight >= MIN_WEIGHT)) return;
      const chosen = first + row === selected;
      lines.push([chosen, svg("line", { x1: left + 6, x2: right - 6, y1: y(row), y2: y(column), class: chosen ? "strand chosen" : "strand", "stroke-width": chosen ? (1 + 4 * weight).toFixed(2) : 1, opacity: chosen ? (0.25 + 0.75 * weight).toFixed(3) : (0.35 * weight).toFixed(3) })]);
    }),
  );
  lines.sort(([one], [other]) => one - other);
  const label = (text, place, x, anchor, chosen) => svg("text", { x, y: y(place) + 4, "text-anchor": anchor, "font-size": 13, class: chosen ? "word query" : "word" }, visible(text, longest));
  const queries = shownRows.map((text, place) => {
    const word = label(text, place, left, "end", first + place === selected);
    word.addEventListener("mouseenter", () => onChoose(first + place));
    word.addEventListener("click", () => onChoose(first + place));
    return word;
  });
  const keys = shownColumns.map((text, place) => {
    const weight = weights[selected * columns.length + firstColumn + place];
    const word = label(text, place, right, "start", false);
    word.setAttribute("opacity", (0.55 + 0.45 * Math.min(weight * 3, 1)).toFixed(2));
    return word;
  });
  const note = rows.length > MAX_WORDS ? h("p", { class: "hint" }, `Tokens ${first} to ${first + MAX_WORDS - 1} of ${rows.length}.`) : null;
  const picture = svg("svg", { class: "strands", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Lines from each token to the tokens it attends to" }, ...lines.map(([, line]) => line), ...queries, ...keys);
  return h("div", {}, note, picture);
}
