// Select a cell with the pointer, the keyboard or the arrow buttons.

function moveToPointer(event) {
  const box = byId("matrix").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - geometry.left) / geometry.cell);
  const row = Math.floor((event.clientY - box.top - geometry.top) / geometry.cell);
  if (row >= 0 && column >= 0 && row < currentView().rows.length && column < numKeys()) moveTo(row, column);
}

function moveByKey(key) {
  const last = [currentView().rows.length - 1, numKeys() - 1];
  const targets = {
    ArrowUp: [state.row - 1, state.column],
    ArrowDown: [state.row + 1, state.column],
    ArrowLeft: [state.row, state.column - 1],
    ArrowRight: [state.row, state.column + 1],
    Home: [state.row, 0],
    End: [state.row, last[1]],
    PageUp: [0, state.column],
    PageDown: [last[0], state.column],
  };
  const target = targets[key];
  if (target) moveTo(clamp(target[0], 0, last[0]), clamp(target[1], 0, last[1]));
  return Boolean(target);
}

function moveTo(row, column) {
  const rowChanged = row !== state.row;
  Object.assign(state, { row, column });
  drawCursor();
  showReadout();
  if (rowChanged) {
    showRow();
    showLens();
  }
}

function showReadout() {
  const { rows, columns } = currentView();
  const cell = `query ${state.row} “${rows[state.row]}” → key ${state.column} “${columns[state.column]}”`;
  const matrices = currentMatrices();
  if (matrices === null) {
    byId("readout").textContent =
      `${cell}. This page has only the thumbnail of this head; create a page with --layer ${currentLayer().number} to include its numbers.`;
    return;
  }
  const index = state.row * numKeys() + state.column;
  const score = matrices.scores ? `score ${formatScore(matrices.scores[index], matrices.step)}` : "";
  const masked = matrices.isMasked(index) ? ", masked" : "";
  byId("readout").textContent =
    `${cell}: ${score}${masked}${score || masked ? ", " : ""}weight ${formatWeight(matrices.weights[index], masked)}`;
  updateAddress();
}
