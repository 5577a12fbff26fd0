// One query: the text shaded by its weights, and the way from score to weight as a table.

const NUM_ROWS = 16;

function showRow() {
  const matrices = head();
  const { rows, columns } = view();
  byId("row-heading").textContent = `Query ${state.row} “${rows[state.row]}” looks at`;
  byId("row").replaceChildren();
  byId("text").replaceChildren();
  if (matrices === null) return;
  const first = state.row * numKeys();
  const weights = matrices.weights.subarray(first, first + numKeys());
  const largest = Math.max(...weights) || 1;
  byId("text").append(
    ...columns.map((text, column) => {
      const token = element("span", text);
      token.dataset.column = column;
      shade(token, Math.sqrt(weights[column] / largest));
      return token;
    }),
  );
  const order = columns.map((_, column) => column);
  if (order.length > NUM_ROWS) order.sort((one, other) => weights[other] - weights[one]);
  const few = order.slice(0, NUM_ROWS);
  byId("row-caption").textContent =
    few.length < order.length ? `the ${few.length} largest weights of ${order.length}` : "";
  for (const column of few) {
    const score = matrices.scores ? matrices.scores[first + column] : NaN;
    const allowed = !matrices.allowed || matrices.allowed[first + column];
    const line = element("tr", null);
    const weight = element("td", shown(weights[column]));
    shade(weight, Math.sqrt(weights[column] / largest));
    line.append(
      element("th", String(column), { scope: "row" }),
      element("td", columns[column], { class: "token" }),
      element("td", matrices.scores ? shown(score) : ""),
      element("td", matrices.scores ? shown(allowed ? score : -Infinity) : ""),
      weight,
    );
    byId("row").append(line);
  }
}
