// The logit lens: what the model would predict next at each depth.

const MAX_LENS_COLUMNS = 12;
const MAX_PROBABILITY = 65535; // the level of a probability of 1

/** Whether the queries of the current view are the tokens that the lens is computed for: not those of an encoder. */
const hasLens = () => data.lens !== null && currentView().rows.join("\n") === data.views[0].rows.join("\n");

function lensCell(index) {
  const { lens } = data;
  const probability = arrayOf(lens.probabilities)[index] / MAX_PROBABILITY;
  const cell = createElement("td", lens.texts[arrayOf(lens.places)[index]], { class: "token" });
  cell.append(createElement("small", `${(100 * probability).toFixed(1)} %`));
  shade(cell, Math.sqrt(probability));
  return cell;
}

function showLens() {
  const { lens } = data;
  byId("lens").hidden = !hasLens();
  if (byId("lens").hidden) return;
  const { rows } = currentView();
  const [numStages, length, count] = lens.places.shape;
  const offset = rows.length - length;
  const top = state.mode === "top";
  const row = Math.max(state.row, offset);
  const from = Math.max(offset, Math.min(row - MAX_LENS_COLUMNS / 2, rows.length - MAX_LENS_COLUMNS));
  const positions = top ? [row] : rows.map((_, position) => position).slice(from, from + MAX_LENS_COLUMNS);
  const indexOf = (stage, position, rank) => (stage * length + position - offset) * count + rank;
  const ranks = Array.from({ length: count }, (_, rank) => rank);
  const tokens = top ? `token ${row} “${rows[row]}”` : `tokens ${from} to ${positions.at(-1)}, one column each`;
  byId("lens-caption").textContent =
    `after ${tokens}${offset ? ` (the lens covers the last ${length} tokens)` : ""}`;
  const headings = top ? ranks.map((rank) => `${rank + 1}.`) : positions.map((position) => rows[position]);
  byId("lens-head").replaceChildren(
    createElement("th", "after", { scope: "col" }),
    ...headings.map((text) => createElement("th", text, { scope: "col", class: "token" })),
  );
  byId("lens-rows").replaceChildren();
  for (let stage = numStages - 1; stage >= 0; stage--) {
    const line = createElement("tr", null);
    const cells = top
      ? ranks.map((rank) => indexOf(stage, row, rank))
      : positions.map((position) => indexOf(stage, position, 0));
    line.append(createElement("th", lens.stages[stage].replace("layer ", "L"), { scope: "row" }), ...cells.map(lensCell));
    byId("lens-rows").append(line);
  }
}
