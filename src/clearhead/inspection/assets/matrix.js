// One head: a canvas with its matrix, and one above it that outlines the selected cell.

const EDGE = 2; // pixels around the matrix for the outline
const MAX_CELL = 48; // pixels
const MIN_WIDTH = 240; // pixels: a hidden frame has none
const MAX_HEIGHT = 1000; // pixels, of a matrix with many more rows than columns
const MIN_NUMBER_CELL = 36; // pixels: smaller cells show only their color
const geometry = { cell: 1, left: 0, top: 0 };

/** Choose the size of a cell, so that the matrix and its labels fit the width. Large cells have whole pixels. */
function layOut() {
  const { rows, columns } = currentView();
  const available = Math.max(byId("figure").clientWidth, MIN_WIDTH);
  geometry.left = labelWidth(rows, available);
  geometry.top = labelWidth(columns, available);
  const fitting = Math.min((available - geometry.left - EDGE) / columns.length, MAX_HEIGHT / rows.length, MAX_CELL);
  geometry.cell = fitting >= 5 ? Math.floor(fitting) : fitting;
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
  const isMasked = (cell) => state.step !== "scores" && matrices.isMasked(cell);
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
  const format = (value) => (bySquareRoot ? formatWeight(value) : formatScore(value, matrices.step));
  return { values, low, high, intensityAt, isMasked, bySquareRoot, format };
}

/** Draw a matrix with one pixel per cell; where a pixel of the screen covers several cells, with their largest. */
function drawCells(step) {
  const [numRows, numColumns] = [currentView().rows.length, currentView().columns.length];
  const pixels = geometry.cell * (window.devicePixelRatio || 1);
  if (pixels >= 1) return drawPixels(numColumns, numRows, step.intensityAt);
  const [height, width] = [numRows, numColumns].map((count) => Math.max(Math.floor(count * pixels), 1));
  const intensities = Float32Array.from(step.values, (_, cell) => step.intensityAt(cell) ?? -1);
  const shown = intensities.map((intensity) => intensity + 1); // 0 is masked
  const pooled = poolMatrix(shown, numRows, numColumns, height, width);
  return drawPixels(width, height, (cell) => (pooled[cell] === 0 ? null : pooled[cell] - 1));
}

function drawMatrix() {
  layOut();
  const matrices = currentMatrices();
  const context = resize(byId("matrix"));
  const { rows, columns } = currentView();
  const { cell, left, top } = geometry;
  let picture;
  context.imageSmoothingEnabled = false;
  if (matrices === null) {
    const { width, height, intensityAt } = thumbnailOf(currentView(), currentLayer(), state.head);
    picture = drawPixels(width, height, intensityAt);
  } else {
    picture = drawCells(selectStep(matrices));
  }
  context.drawImage(picture, left, top, cell * columns.length, cell * rows.length);
  if (matrices !== null) {
    if (cell >= MIN_NUMBER_CELL) drawNumbers(context, selectStep(matrices));
    drawLegend(selectStep(matrices));
  }
  byId("legend").hidden = matrices === null;
  drawLabels(context);
  drawCursor();
}

function drawNumbers(context, step) {
  const { cell, left, top } = geometry;
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  step.values.forEach((value, index) => {
    if (step.isMasked(index)) return;
    const [row, column] = [Math.floor(index / numKeys()), index % numKeys()];
    context.fillStyle = textColor(colorOf(step.intensityAt(index)));
    const text = step.bySquareRoot ? (value < 0.005 ? "0" : value.toFixed(2)) : step.format(value);
    context.fillText(text, left + (column + 0.5) * cell, top + (row + 0.5) * cell);
  });
}

function drawLegend(step) {
  byId("low").textContent = step.bySquareRoot ? "0" : step.format(step.low);
  byId("high").textContent = step.format(step.high);
  byId("scale").textContent = step.bySquareRoot ? "color by square root" : "color by value";
  byId("masked-key").hidden = state.step === "scores" || !currentMatrices().allowed?.includes(0);
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
  const size = Math.max(cell, 3);
  const [x, y] = [left + (state.column + 0.5) * cell - size / 2, top + (state.row + 0.5) * cell - size / 2];
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--cursor");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, y - 0.5, cell * numKeys() + 1, size + 1);
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, size + 2, size + 2);
  drawSelectedLabels(context);
}
