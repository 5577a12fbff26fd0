// One query: the text shaded by the attention weights, and a table from score to weight.

const MAX_TABLE_ROWS = 16;

function showRow() {
  const matrices = currentMatrices();
  const { rows, columns } = currentView();
  byId("row-heading").textContent = `Query ${state.row} “${rows[state.row]}” attends to`;
  byId("row").replaceChildren();
  byId("text").replaceChildren();
  byId("row-caption").textContent = "";
  for (const heading of document.querySelectorAll("th.score")) heading.hidden = matrices === null || !matrices.scores;
  if (matrices === null) return;
  const first = state.row * numKeys();
  const weights = matrices.weights.subarray(first, first + numKeys());
  const largest = weights.reduce((one, other) => Math.max(one, other), 0) || 1;
  byId("text").append(
    ...columns.map((text, column) => {
      const weight = formatWeight(weights[column], matrices.isMasked(first + column));
      const token = createElement("span", text, { title: `key ${column}: ${weight}` });
      token.dataset.column = column;
      shade(token, Math.sqrt(weights[column] / largest));
      return token;
    }),
  );
  const order = columns.map((_, column) => column);
  if (order.length > MAX_TABLE_ROWS) order.sort((one, other) => weights[other] - weights[one]);
  const listed = order.slice(0, MAX_TABLE_ROWS);
  if (listed.length < order.length)
    byId("row-caption").textContent = `the ${listed.length} largest of ${order.length} weights`;
  for (const column of listed) byId("row").append(tableRow(matrices, first, column, weights[column], largest));
}

function tableRow(matrices, first, column, weight, largest) {
  const line = createElement("tr", null);
  const isMasked = matrices.isMasked(first + column);
  const shaded = createElement("td", formatWeight(weight, isMasked));
  shade(shaded, Math.sqrt(weight / largest));
  line.append(
    createElement("th", String(column), { scope: "row" }),
    createElement("td", currentView().columns[column], { class: "token" }),
  );
  if (matrices.scores) {
    const score = matrices.scores[first + column];
    line.append(
      createElement("td", formatScore(score, matrices.step)),
      createElement("td", formatScore(isMasked ? -Infinity : score, matrices.step)),
    );
  }
  line.append(shaded);
  return line;
}
