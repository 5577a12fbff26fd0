// Set up the page: connect the controls, and keep the selection in the address.

const STEPS = { scores: "scores", mask: "after the mask", weights: "weights (softmax)" };
const MODES = { top: "most likely tokens at this position", all: "most likely token at every position" };

const singleColumn = window.matchMedia("(max-width: 60rem)");
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
  const parseIndex = (text, length) => clamp(Number.parseInt(text, 10) || 0, 0, length - 1);
  state.view = parseIndex(view, data.views.length);
  state.layer = parseIndex(layer, currentView().layers.length);
  state.head = parseIndex(head, currentLayer().num_heads);
  state.row = parseIndex(row, currentView().rows.length);
  state.column = parseIndex(column, numKeys());
  if (step in STEPS) state.step = step;
}

function showHead() {
  const { number, scores } = currentLayer();
  const hasScores = scores && currentLayer().full.includes(state.head);
  byId("head-heading").textContent = `${currentView().title}, layer ${number}, head ${state.head}`;
  byId("matrix").setAttribute(
    "aria-label",
    `Attention of layer ${number}, head ${state.head}; use the arrow keys to select a cell`,
  );
  byId("steps").hidden = !hasScores;
  if (!hasScores) state.step = "weights";
  checkRadioButton("step", state.step);
  markSelectedThumbnail();
  markRanking();
  showSummary();
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

/** Show a view at its most specific head. */
function selectView(view) {
  const heads = data.views[view].layers.flatMap((layer, index) =>
    Array.from({ length: layer.num_heads }, (_, head) => ({ layer: index, head, share: layer.shares?.specific[head] ?? 0 })),
  );
  const { layer, head } = heads.reduce((best, one) => (one.share > best.share ? one : best));
  const known = data.ranking.find((one) => isHead(one, { view, layer, head }));
  Object.assign(state, known ?? { view, layer, head, row: data.views[view].rows.length - 1, column: 0 });
  showView();
}

function addControls() {
  const titles = Object.fromEntries(data.views.map((view, number) => [number, view.title]));
  addRadioButtons(byId("views"), "view", titles, (value) => selectView(Number(value)));
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
  addRanking();
}

function connectEvents() {
  byId("thumbnails").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    Object.assign(state, { layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
    showHead();
    if (singleColumn.matches) byId("head-heading").scrollIntoView();
  });
  byId("thumbnails").addEventListener("keydown", moveToHead);
  byId("matrix").addEventListener("pointermove", moveToPointer);
  byId("matrix").addEventListener("pointerdown", moveToPointer);
  byId("matrix").addEventListener("keydown", (event) => {
    if (moveByKey(event.key)) event.preventDefault();
  });
  byId("arrows").addEventListener("click", (event) => moveByKey(event.target.dataset.key));
  byId("text").addEventListener("click", (event) => {
    if (event.target.dataset.column) moveTo(state.row, Number(event.target.dataset.column));
  });
  darkTheme.addEventListener("change", showView);
  let width = byId("figure").clientWidth;
  new ResizeObserver(() => {
    if (byId("figure").clientWidth === width) return;
    width = byId("figure").clientWidth;
    drawMatrix();
  }).observe(byId("figure"));
}

async function start() {
  document.title = data.title;
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.subtitle;
  try {
    await loadArrays();
  } catch (error) {
    byId("problem").textContent =
      `This browser cannot read the numbers of this page (${error.message}). Chrome 80, Firefox 113, Safari 16.4 and later versions can.`;
    byId("problem").hidden = false;
    return;
  }
  document.querySelector("main").hidden = false;
  addControls();
  const { view, layer, head, row, column } = data.start;
  Object.assign(state, { view, layer, head, row, column });
  readAddress();
  showView();
  connectEvents();
}

start();
