// Thumbnails of all heads: one button each; the arrow keys move between them.

const THUMBNAIL_SIZE = 36; // maximum number of cells per side, as in page_data.py

/** Max-pool a matrix given by its cells to `height` × `width`, in bins that start and end as those of PyTorch. */
function poolMatrix(values, numRows, numColumns, height, width) {
  const pooled = new Float32Array(height * width);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      let largest = 0;
      for (let row = Math.floor((y * numRows) / height); row < Math.ceil(((y + 1) * numRows) / height); row++) {
        const first = row * numColumns;
        const end = first + Math.ceil(((x + 1) * numColumns) / width);
        for (let cell = first + Math.floor((x * numColumns) / width); cell < end; cell++)
          if (values[cell] > largest) largest = values[cell];
      }
      pooled[y * width + x] = largest;
    }
  }
  return pooled;
}

/** The intensities of a thumbnail and its size: computed from the weights, or embedded if the page has no weights. */
function thumbnailOf(view, layer, head) {
  const [numRows, numColumns] = [view.rows.length, view.columns.length];
  if (!layer.full.includes(head)) {
    const [, height, width] = layer.thumbnails.shape;
    const place = head - layer.full.filter((other) => other < head).length;
    const bytes = arrayOf(layer.thumbnails).subarray(place * height * width, (place + 1) * height * width);
    return { width, height, intensityAt: (cell) => bytes[cell] / 255 };
  }
  const roots = new Float32Array(numRows * numColumns);
  visitWeights(view, layer, head, (cell, root) => (roots[cell] = root));
  const [height, width] = [Math.min(numRows, THUMBNAIL_SIZE), Math.min(numColumns, THUMBNAIL_SIZE)];
  const pooled = poolMatrix(roots, numRows, numColumns, height, width);
  const largest = pooled.reduce((one, other) => Math.max(one, other), 0) || 1;
  return { width, height, intensityAt: (cell) => pooled[cell] / largest };
}

function drawThumbnails() {
  const container = byId("thumbnails");
  container.replaceChildren();
  currentView().layers.forEach((layer, layerIndex) => {
    const buttons = createElement("div", null);
    for (let head = 0; head < layer.num_heads; head++) {
      const button = createElement("button", null, {
        type: "button",
        class: "thumbnail",
        "aria-label": `layer ${layer.number}, head ${head}`,
        title: `layer ${layer.number}, head ${head}`,
      });
      button.dataset.layer = layerIndex;
      button.dataset.head = head;
      const { width, height, intensityAt } = thumbnailOf(currentView(), layer, head);
      button.append(drawPixels(width, height, intensityAt));
      buttons.append(button);
    }
    const line = createElement("div", null, { class: "layer" });
    line.append(createElement("span", `L${layer.number}`), buttons);
    container.append(line);
  });
}

/** Mark the thumbnail of the selected head, and scroll the list, but not the page, so that it can be seen. */
function markSelectedThumbnail() {
  const container = byId("thumbnails");
  for (const button of container.querySelectorAll("button")) {
    const selected = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
    button.setAttribute("aria-pressed", selected);
    button.tabIndex = selected ? 0 : -1;
    if (!selected) continue;
    const [outer, inner] = [container.getBoundingClientRect(), button.getBoundingClientRect()];
    if (inner.top < outer.top || inner.bottom > outer.bottom)
      container.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
  }
}

function moveToHead(event) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  const layers = currentView().layers;
  state.layer = clamp(state.layer + move[0], 0, layers.length - 1);
  state.head = clamp(state.head + move[1], 0, layers[state.layer].num_heads - 1);
  showHead();
  byId("thumbnails").querySelector('[aria-pressed="true"]').focus();
}
