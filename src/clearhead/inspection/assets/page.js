// Set up the page: connect the controls, and keep the selection in the address.

const STEPS = { scores: "scores", mask: "after the mask", weights: "weights (softmax)" };
const MODES = { top: "most likely tokens at this position", all: "most likely token at every position" };

let addressTimer = 0;

/**
 * Store the selection in the address, if the page has one, so that a link opens the same head.
 * Browsers allow about a hundred such changes in half a minute, so wait until the pointer rests.
 */
function updateAddress() {
  if (location.protocol === "about:") return;
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    const { view, layer, head, step, row, column } = state;
    history.replaceState(null, "", `#${[view, layer, head, step, row, column].join("/")}`);
  }, 300);
}

function readAddress() {
  if (!location.hash) return;
  const [view, layer, head, step, row, column] = location.hash.slice(1).split("/");
  const parseIndex = (text, length) => Math.min(Math.max(Number.parseInt(text, 10) || 0, 0), length - 1);
  state.view = parseIndex(view, data.views.length);
  state.layer = parseIndex(layer, currentView().layers.length);
  state.head = parseIndex(head, currentLayer().heads.length);
  state.row = parseIndex(row, currentView().rows.length);
  state.column = parseIndex(column, numKeys());
  if (step in STEPS) state.step = step;
}

function showHead() {
  const { scores } = currentLayer().heads[state.head];
  const { number } = currentLayer();
  byId("head-heading").textContent = `${currentView().title}, layer ${number}, head ${state.head}`;
  byId("matrix").setAttribute(
    "aria-label",
    `Attention of layer ${number}, head ${state.head}; use the arrow keys to select a cell`,
  );
  byId("steps").hidden = !scores;
  if (!scores) state.step = "weights";
  checkRadioButton("step", state.step);
  markSelectedThumbnail();
  drawMatrix();
  showRow();
  showReadout();
}

function showView() {
  checkRadioButton("view", state.view);
  drawThumbnails();
  showHead();
  showLens();
}

function start() {
  document.title = data.title;
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.subtitle;
  const titles = Object.fromEntries(data.views.map((view, number) => [number, view.title]));
  addRadioButtons(byId("views"), "view", titles, (value) => {
    Object.assign(state, { view: Number(value), layer: 0, head: 0, row: 0, column: 0 });
    showView();
  });
  addRadioButtons(byId("steps"), "step", STEPS, (value) => {
    state.step = value;
    drawMatrix();
    updateAddress();
  });
  addRadioButtons(byId("lens-modes"), "mode", MODES, (value) => {
    state.mode = value;
    showLens();
  });
  checkRadioButton("mode", state.mode);
  byId("thumbnails").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    Object.assign(state, { layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
    showHead();
  });
  byId("thumbnails").addEventListener("keydown", moveToHead);
  byId("matrix").addEventListener("pointermove", moveToPointer);
  byId("matrix").addEventListener("pointerdown", moveToPointer);
  byId("matrix").addEventListener("keydown", moveByKey);
  byId("text").addEventListener("click", (event) => {
    if (event.target.dataset.column) moveTo(state.row, Number(event.target.dataset.column));
  });
  darkTheme.addEventListener("change", showView);
  let width = 0;
  new ResizeObserver(() => {
    if (byId("figure").clientWidth === width) return;
    width = byId("figure").clientWidth;
    drawMatrix();
  }).observe(byId("figure"));
  Object.assign(state, data.start, { row: currentView().rows.length - 1 });
  readAddress();
  showView();
}

start();
