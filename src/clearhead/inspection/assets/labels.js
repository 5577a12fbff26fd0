// The axis labels of the matrix. Where there is no space for all, every second, third, ... token has a label, and the
// selected query and key always have one.

const LABEL_PADDING = 10; // pixels on both sides of a label together
const LABEL_FONT = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';
const MAX_LABEL_WIDTH = 92; // pixels
const MAX_LABEL_SIZE = 13; // pixels
const MIN_LABEL_SPACING = 10; // pixels: closer labels cannot be read

const labelSize = () => clamp(geometry.cell, MIN_LABEL_SPACING, MAX_LABEL_SIZE);

/** The distance in cells between two labels. */
const labelInterval = () => (geometry.cell >= MIN_LABEL_SPACING ? 1 : Math.ceil((MIN_LABEL_SPACING + 2) / geometry.cell));

/** The space for the labels of an axis: that of the longest, within limits. */
function labelWidth(texts, available) {
  const context = byId("matrix").getContext("2d");
  const size = clamp((available - MAX_LABEL_WIDTH) / numKeys(), MIN_LABEL_SPACING, MAX_LABEL_SIZE);
  context.font = `${size}px ${LABEL_FONT}`;
  const longest = texts.reduce((width, text) => Math.max(width, context.measureText(text).width), 0);
  return Math.ceil(clamp(longest + LABEL_PADDING, 32, available < 500 ? MAX_LABEL_WIDTH - 24 : MAX_LABEL_WIDTH));
}

/** Cut a text to a width. Array.from keeps characters of two code units whole. */
function shorten(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const characters = Array.from(text);
  while (characters.length > 1 && context.measureText(`${characters.join("")}…`).width > width) characters.pop();
  return `${characters.join("")}…`;
}

/** Draw the label of a row, or turned by 90° that of a column; a selected one has a background. */
function drawLabel(context, axis, index, selected) {
  const { cell, left, top } = geometry;
  const isRow = axis === "row";
  const size = labelSize();
  context.save();
  if (isRow) context.translate(left - LABEL_PADDING / 2, top + (index + 0.5) * cell);
  else {
    context.translate(left + (index + 0.5) * cell, top - LABEL_PADDING / 2);
    context.rotate(-Math.PI / 2);
  }
  context.font = `${size}px ${LABEL_FONT}`;
  context.textAlign = isRow ? "right" : "left";
  context.textBaseline = "middle";
  const text = currentView()[isRow ? "rows" : "columns"][index];
  const shown = shorten(context, text, (isRow ? left : top) - LABEL_PADDING);
  const style = getComputedStyle(document.documentElement);
  if (selected) {
    const width = context.measureText(shown).width + 6;
    context.fillStyle = style.getPropertyValue("--cursor");
    context.fillRect(isRow ? 3 - width : -3, -size / 2 - 2, width, size + 4);
  }
  context.fillStyle = style.getPropertyValue(selected ? "--background" : "--text");
  context.fillText(shown, 0, 0);
  context.restore();
}

function drawLabels(context) {
  const interval = labelInterval();
  for (const [axis, texts] of [
    ["row", currentView().rows],
    ["column", currentView().columns],
  ])
    for (let index = 0; index < texts.length; index += interval) drawLabel(context, axis, index, false);
}

function drawSelectedLabels(context) {
  drawLabel(context, "row", state.row, true);
  drawLabel(context, "column", state.column, true);
}
