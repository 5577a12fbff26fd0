// All heads: one button each, moved through by the arrow keys.

function drawThumbnails() {
  const place = byId("thumbnails");
  place.replaceChildren();
  view().layers.forEach((each, number) => {
    const [count, height, width] = each.thumbnails.shape;
    const bytes = numbers(each.thumbnails);
    const buttons = element("div", null);
    for (let index = 0; index < count; index++) {
      const button = element("button", null, {
        type: "button",
        class: "thumbnail",
        "aria-label": `layer ${each.number}, head ${index}`,
      });
      button.dataset.layer = number;
      button.dataset.head = index;
      button.append(pixels(width, height, (cell) => bytes[index * height * width + cell] / 255));
      buttons.append(button);
    }
    const line = element("div", null, { class: "layer" });
    line.append(element("span", `L${each.number}`), buttons);
    place.append(line);
  });
}

function markThumbnail() {
  for (const button of byId("thumbnails").querySelectorAll("button")) {
    const chosen = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
    button.setAttribute("aria-pressed", chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
}

function moveToHead(event) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  const layers = view().layers;
  state.layer = Math.min(Math.max(state.layer + move[0], 0), layers.length - 1);
  state.head = Math.min(Math.max(state.head + move[1], 0), layers[state.layer].heads.length - 1);
  showHead();
  byId("thumbnails").querySelector('[aria-pressed="true"]').focus();
}
