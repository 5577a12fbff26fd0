// One query: the text shaded by the attention weights, and a table from score to weight.

const MAX_TABLE_ROWS = 16;

function showRow() {
  const matrices = currentMatrices();
  const { rows, columns } = currentView();
  byId("row-heading").textContent = `Query ${state.row} “${rows[state.row]}” attends to`;
  byId("row").replaceChildren();
  byId("text").replaceChildren();
  if (matrices === null) return;
  const first = state.row * numKeys();
  const weights = matrices.weights.subarray(first, first + numKeys());
  const largest = Math.max(...weights) || 1;
  byId("text").append(
    ...columns.map((text, column) => {
      const token = createElement("span", text);
      token.dataset.column = column;
      shade(token, Math.sqrt(weights[column] / largest));
      return token;
    }),
  );
  const order = columns.map((_, column) => column);
  if (order.length > MAX_TABLE_ROWS) order.sort((one, other) => weights[other] - weights[one]);
  const listed = order.slice(0, MAX_TABLE_ROWS);
  byId("row-caption").textContent =
    listed.length < order.length ? `the ${listed.length} largest of ${order.length} weights` : "";
  for (const column of listed) {
    const score = matrices.scores ? matrices.scores[first + column] : NaN;
    const allowed = !matrices.allowed || matrices.allowed[first + column];
    const line = createElement("tr", null);
    const weight = createElement("td", formatNumber(weights[column]));
    shade(weight, Math.sqrt(weights[column] / largest));
    line.append(
      createElement("th", String(column), { scope: "row" }),
      createElement("td", columns[column], { class: "token" }),
      createElement("td", matrices.scores ? formatNumber(score) : ""),
      createElement("td", matrices.scores ? formatNumber(allowed ? score : -Infinity) : ""),
      weight,
    );
    byId("row").append(line);
  }
}
