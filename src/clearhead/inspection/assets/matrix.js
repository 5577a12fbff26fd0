// One head: a canvas with its matrix, and one above it that outlines the selected cell.

const EDGE = 2; // pixels around the matrix for the outline
const geometry = { cell: 1, left: 0, top: 0 };

function layOut() {
  const { rows, columns } = currentView();
  const available = byId("figure").clientWidth;
  const gutter = available < 500 ? 56 : 96;
  const cellSize = (left) => Math.floor(Math.min((available - left - EDGE) / columns.length, 640 / rows.length));
  const labeled = cellSize(gutter) >= 11;
  geometry.left = geometry.top = labeled ? gutter : EDGE;
  geometry.cell = Math.min(Math.max(cellSize(geometry.left), 1), 48);
}

/** Resize a canvas to the matrix and return its drawing context. */
function resize(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = geometry.left + geometry.cell * currentView().columns.length + EDGE;
  const height = geometry.top + geometry.cell * currentView().rows.length + EDGE;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** The values of the selected step, their range, and the intensity of each cell. */
function selectStep(matrices) {
  const values = state.step === "weights" ? matrices.weights : matrices.scores;
  const isMasked = (cell) => state.step !== "scores" && matrices.allowed && !matrices.allowed[cell];
  let low = Infinity;
  let high = -Infinity;
  for (let cell = 0; cell < values.length; cell++) {
    if (isMasked(cell)) continue;
    if (values[cell] < low) low = values[cell];
    if (values[cell] > high) high = values[cell];
  }
  const bySquareRoot = state.step === "weights";
  if (bySquareRoot) low = 0;
  const span = high - low || 1;
  const linear = (cell) => (values[cell] - low) / span;
  const intensityAt = (cell) => (isMasked(cell) ? null : bySquareRoot ? Math.sqrt(linear(cell)) : linear(cell));
  return { values, low, high, intensityAt, isMasked, bySquareRoot };
}

function drawMatrix() {
  layOut();
  const matrices = currentMatrices();
  const context = resize(byId("matrix"));
  const { rows, columns } = currentView();
  const { cell, left, top } = geometry;
  context.imageSmoothingEnabled = false;
  if (matrices === null) {
    const [, height, width] = currentLayer().thumbnails.shape;
    const bytes = arrayOf(currentLayer().thumbnails);
    const thumbnail = drawPixels(width, height, (pixel) => bytes[state.head * height * width + pixel] / 255);
    context.drawImage(thumbnail, left, top, cell * columns.length, cell * rows.length);
  } else {
    const step = selectStep(matrices);
    context.drawImage(
      drawPixels(columns.length, rows.length, step.intensityAt),
      left,
      top,
      cell * columns.length,
      cell * rows.length,
    );
    if (cell >= 36) drawNumbers(context, step);
    drawLegend(step);
  }
  byId("legend").hidden = matrices === null;
  if (left > EDGE) drawLabels(context);
  drawCursor();
}

function drawNumbers(context, step) {
  const { cell, left, top } = geometry;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  step.values.forEach((value, index) => {
    if (step.isMasked(index)) return;
    const [row, column] = [Math.floor(index / numKeys()), index % numKeys()];
    context.fillStyle = textColor(colorOf(step.intensityAt(index)));
    context.fillText(value.toFixed(2), left + (column + 0.5) * cell, top + (row + 0.5) * cell);
  });
}

function drawLabels(context) {
  const { cell, left, top } = geometry;
  context.font = `${Math.min(cell, 13)}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
  context.fillStyle = getComputedStyle(document.body).color;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const shorten = (text) => {
    while (text.length > 1 && context.measureText(text).width > left - 8) text = text.slice(0, -2) + "…";
    return text;
  };
  currentView().rows.forEach((text, row) => context.fillText(shorten(text), left - 5, top + (row + 0.5) * cell));
  context.textAlign = "left";
  currentView().columns.forEach((text, column) => {
    context.save();
    context.translate(left + (column + 0.5) * cell, top - 5);
    context.rotate(-Math.PI / 2);
    context.fillText(shorten(text), 0, 0);
    context.restore();
  });
}

function drawLegend(step) {
  byId("low").textContent = formatNumber(step.low);
  byId("high").textContent = formatNumber(step.high);
  byId("scale").textContent = step.bySquareRoot ? "color by square root" : "color by value";
  byId("ramp")
    .getContext("2d")
    .drawImage(
      drawPixels(160, 1, (pixel) => pixel / 159),
      0,
      0,
      160,
      10,
    );
}

function drawCursor() {
  const context = resize(byId("cursor"));
  const { cell, left, top } = geometry;
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--cursor");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top + state.row * cell - 0.5, cell * numKeys() + 1, cell + 1);
  context.lineWidth = 2;
  context.strokeRect(left + state.column * cell - 1, top + state.row * cell - 1, cell + 2, cell + 2);
}

function moveToPointer(event) {
  const box = byId("matrix").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - geometry.left) / geometry.cell);
  const row = Math.floor((event.clientY - box.top - geometry.top) / geometry.cell);
  if (row >= 0 && column >= 0 && row < currentView().rows.length && column < numKeys()) moveTo(row, column);
}

function moveByKey(event) {
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
  const target = targets[event.key];
  if (!target) return;
  event.preventDefault();
  moveTo(Math.min(Math.max(target[0], 0), last[0]), Math.min(Math.max(target[1], 0), last[1]));
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
  const score = matrices.scores ? `score ${formatNumber(matrices.scores[index])}` : "";
  const masked = matrices.allowed && !matrices.allowed[index] ? ", masked" : "";
  byId("readout").textContent =
    `${cell}: ${score}${masked}${score || masked ? ", " : ""}weight ${formatNumber(matrices.weights[index])}`;
  updateAddress();
}
