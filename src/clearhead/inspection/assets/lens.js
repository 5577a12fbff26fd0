// The logit lens: what each depth would say next.

const NUM_POSITIONS = 12;

function lensCell(place) {
  const { lens } = data;
  const probability = numbers(lens.probabilities)[place];
  const cell = element("td", lens.texts[numbers(lens.places)[place]], { class: "token" });
  cell.append(element("small", `${(100 * probability).toFixed(1)} %`));
  shade(cell, Math.sqrt(probability));
  return cell;
}

function showLens() {
  const { lens } = data;
  byId("lens").hidden = !lens || state.view !== 0;
  if (byId("lens").hidden) return;
  const [numStages, length, count] = lens.places.shape;
  const offset = view().rows.length - length;
  const top = state.mode === "top";
  const row = Math.max(state.row, offset);
  const from = Math.max(offset, Math.min(row - NUM_POSITIONS / 2, view().rows.length - NUM_POSITIONS));
  const positions = top
    ? [row]
    : view()
        .rows.map((_, place) => place)
        .slice(from, from + NUM_POSITIONS);
  const place = (stage, position, rank) => (stage * length + position - offset) * count + rank;
  const ranks = Array.from({ length: count }, (_, rank) => rank);
  const which = top
    ? `token ${row} “${view().rows[row]}”`
    : `the tokens ${from} to ${positions.at(-1)}, one column each`;
  byId("lens-caption").textContent = `after ${which}${offset ? ` (the lens is held over the last ${length})` : ""}`;
  const headings = top ? ranks.map((rank) => `${rank + 1}.`) : positions.map((position) => view().rows[position]);
  byId("lens-head").replaceChildren(
    element("th", "after", { scope: "col" }),
    ...headings.map((text) => element("th", text, { scope: "col", class: "token" })),
  );
  byId("lens-rows").replaceChildren();
  for (let stage = numStages - 1; stage >= 0; stage--) {
    const line = element("tr", null);
    const cells = top
      ? ranks.map((rank) => place(stage, row, rank))
      : positions.map((position) => place(stage, position, 0));
    line.append(element("th", lens.stages[stage], { scope: "row" }), ...cells.map(lensCell));
    byId("lens-rows").append(line);
  }
}
