// Thumbnails of all heads: one button each; the arrow keys move between them.

function drawThumbnails() {
  const container = byId("thumbnails");
  container.replaceChildren();
  currentView().layers.forEach((layer, layerIndex) => {
    const [numHeads, height, width] = layer.thumbnails.shape;
    const bytes = arrayOf(layer.thumbnails);
    const buttons = createElement("div", null);
    for (let head = 0; head < numHeads; head++) {
      const button = createElement("button", null, {
        type: "button",
        class: "thumbnail",
        "aria-label": `layer ${layer.number}, head ${head}`,
      });
      button.dataset.layer = layerIndex;
      button.dataset.head = head;
      button.append(drawPixels(width, height, (cell) => bytes[head * height * width + cell] / 255));
      buttons.append(button);
    }
    const line = createElement("div", null, { class: "layer" });
    line.append(createElement("span", `L${layer.number}`), buttons);
    container.append(line);
  });
}

function markSelectedThumbnail() {
  for (const button of byId("thumbnails").querySelectorAll("button")) {
    const selected = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
    button.setAttribute("aria-pressed", selected);
    button.tabIndex = selected ? 0 : -1;
  }
}

function moveToHead(event) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  const layers = currentView().layers;
  state.layer = Math.min(Math.max(state.layer + move[0], 0), layers.length - 1);
  state.head = Math.min(Math.max(state.head + move[1], 0), layers[state.layer].heads.length - 1);
  showHead();
  byId("thumbnails").querySelector('[aria-pressed="true"]').focus();
}
