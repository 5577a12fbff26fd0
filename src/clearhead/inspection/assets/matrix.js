// One head: a canvas with the matrix, and one above it with the frame of the cell under the pointer.

const EDGE = 2; // pixels around the matrix for that frame
const geometry = { cell: 1, left: 0, top: 0 };

function measure() {
  const { rows, columns } = view();
  const available = byId("figure").clientWidth;
  const gutter = available < 500 ? 56 : 96;
  const fitting = (room) => Math.floor(Math.min((available - room - EDGE) / columns.length, 640 / rows.length));
  const labelled = fitting(gutter) >= 11;
  geometry.left = geometry.top = labelled ? gutter : EDGE;
  geometry.cell = Math.min(Math.max(fitting(geometry.left), 1), 48);
}

function sized(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = geometry.left + geometry.cell * view().columns.length + EDGE;
  const height = geometry.top + geometry.cell * view().rows.length + EDGE;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Values of the chosen step, what range they span, and where each cell stands on the ramp. */
function stepOf(matrices) {
  const values = state.step === "weights" ? matrices.weights : matrices.scores;
  const hidden = (place) => state.step !== "scores" && matrices.allowed && !matrices.allowed[place];
  let low = Infinity;
  let high = -Infinity;
  for (let place = 0; place < values.length; place++) {
    if (hidden(place)) continue;
    if (values[place] < low) low = values[place];
    if (values[place] > high) high = values[place];
  }
  const root = state.step === "weights";
  if (root) low = 0;
  const span = high - low || 1;
  const linear = (place) => (values[place] - low) / span;
  const share = (place) => (hidden(place) ? null : root ? Math.sqrt(linear(place)) : linear(place));
  return { values, low, high, share, hidden, root };
}

function drawMatrix() {
  measure();
  const matrices = head();
  const context = sized(byId("matrix"));
  const { rows, columns } = view();
  const { cell, left, top } = geometry;
  context.imageSmoothingEnabled = false;
  if (matrices === null) {
    const [, height, width] = layer().thumbnails.shape;
    const bytes = numbers(layer().thumbnails);
    const small = pixels(width, height, (place) => bytes[state.head * height * width + place] / 255);
    context.drawImage(small, left, top, cell * columns.length, cell * rows.length);
  } else {
    const step = stepOf(matrices);
    context.drawImage(
      pixels(columns.length, rows.length, step.share),
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
  step.values.forEach((value, place) => {
    if (step.hidden(place)) return;
    const [row, column] = [Math.floor(place / numKeys()), place % numKeys()];
    context.fillStyle = ink(colour(step.share(place)));
    context.fillText(value.toFixed(2), left + (column + 0.5) * cell, top + (row + 0.5) * cell);
  });
}

function drawLabels(context) {
  const { cell, left, top } = geometry;
  context.font = `${Math.min(cell, 13)}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
  context.fillStyle = getComputedStyle(document.body).color;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const fit = (text) => {
    while (text.length > 1 && context.measureText(text).width > left - 8) text = text.slice(0, -2) + "…";
    return text;
  };
  view().rows.forEach((text, row) => context.fillText(fit(text), left - 5, top + (row + 0.5) * cell));
  context.textAlign = "left";
  view().columns.forEach((text, column) => {
    context.save();
    context.translate(left + (column + 0.5) * cell, top - 5);
    context.rotate(-Math.PI / 2);
    context.fillText(fit(text), 0, 0);
    context.restore();
  });
}

function drawLegend(step) {
  byId("low").textContent = shown(step.low);
  byId("high").textContent = shown(step.high);
  byId("scale").textContent = step.root ? "colour by the square root" : "colour by the value";
  byId("ramp")
    .getContext("2d")
    .drawImage(
      pixels(160, 1, (place) => place / 159),
      0,
      0,
      160,
      10,
    );
}

function drawCursor() {
  const context = sized(byId("cursor"));
  const { cell, left, top } = geometry;
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--cursor");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top + state.row * cell - 0.5, cell * numKeys() + 1, cell + 1);
  context.lineWidth = 2;
  context.strokeRect(left + state.column * cell - 1, top + state.row * cell - 1, cell + 2, cell + 2);
}

function cellAt(event) {
  const box = byId("matrix").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - geometry.left) / geometry.cell);
  const row = Math.floor((event.clientY - box.top - geometry.top) / geometry.cell);
  if (row >= 0 && column >= 0 && row < view().rows.length && column < numKeys()) moveTo(row, column);
}

function moveByKey(event) {
  const last = [view().rows.length - 1, numKeys() - 1];
  const places = {
    ArrowUp: [state.row - 1, state.column],
    ArrowDown: [state.row + 1, state.column],
    ArrowLeft: [state.row, state.column - 1],
    ArrowRight: [state.row, state.column + 1],
    Home: [state.row, 0],
    End: [state.row, last[1]],
    PageUp: [0, state.column],
    PageDown: [last[0], state.column],
  };
  const place = places[event.key];
  if (!place) return;
  event.preventDefault();
  moveTo(Math.min(Math.max(place[0], 0), last[0]), Math.min(Math.max(place[1], 0), last[1]));
}

function moveTo(row, column) {
  const turned = row !== state.row;
  Object.assign(state, { row, column });
  drawCursor();
  tell();
  if (turned) {
    showRow();
    showLens();
  }
}

function tell() {
  const { rows, columns } = view();
  const where = `query ${state.row} “${rows[state.row]}” → key ${state.column} “${columns[state.column]}”`;
  const matrices = head();
  if (matrices === null) {
    byId("readout").textContent =
      `${where}. This page holds only the small picture of this head; make one with --layer ${layer().number} to have its numbers.`;
    return;
  }
  const place = state.row * numKeys() + state.column;
  const score = matrices.scores ? `score ${shown(matrices.scores[place])}` : "";
  const masked = matrices.allowed && !matrices.allowed[place] ? ", masked" : "";
  byId("readout").textContent =
    `${where}: ${score}${masked}${score || masked ? ", " : ""}weight ${shown(matrices.weights[place])}`;
  remember();
}
